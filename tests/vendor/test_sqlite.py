"""What only SQLite has: a file that many processes open, that can be deleted, locked, outlive a boot or be too new."""

import asyncio
import multiprocessing
import sqlite3
import time
from pathlib import Path

import pytest

from grel_core.coordination import Lock, LockAcquireError, LockNotOwnedError
from grel_core.errors import CoordinationBackendError
from grel_core.lease.names import ELECTION, LOCK, READWRITELOCK, Key
from grel_core.providers.sqlite import SQLiteProvider
from tests.harness import SQLiteHarness, eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leases.db"


async def test_tokens_rise_when_the_file_is_deleted(path: Path) -> None:
    async with SQLiteProvider(path) as provider:
        before = await provider.lock().acquire(name="cart", token="a.1", duration=60)
    path.unlink()
    async with SQLiteProvider(path) as provider:
        after = await provider.lock().acquire(name="cart", token="b.1", duration=60)
    assert before is not None
    assert after is not None
    assert after > before


async def test_whoever_has_a_deleted_file_open_moves_to_the_new_one(path: Path) -> None:
    async with SQLiteProvider(path) as old:
        lock = Lock("cart", backend=old.lock())
        await lock.acquire()
        for file in path.parent.glob("leases.db*"):
            file.unlink()
        async with SQLiteProvider(path) as new:
            successor = await asyncio.create_task(Lock("cart", backend=new.lock()).acquire(timeout=0))
            with pytest.raises(LockNotOwnedError):
                await lock.release()
            assert await old.owned(Key(LOCK, "cart"), successor.token)


async def test_a_reboot_ends_every_lease_and_forgets_no_fence_or_term(path: Path) -> None:
    lock, election, rwlock = Key(LOCK, "cart"), Key(ELECTION, "jobs"), Key(READWRITELOCK, "book")
    async with SQLiteProvider(path) as provider:
        first = await provider.take(lock, "a.1", 3600)
        await provider.take(election, "a.1", 3600)
        await provider.take(rwlock, "a.1", 3600, shared=True)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE grel_meta SET value = 'another boot' WHERE name = 'boot'")
    database.close()
    async with SQLiteProvider(path) as provider:
        second = await provider.take(lock, "b.1", 60)
        term = await provider.take(election, "b.1", 60)
        assert hasattr(await provider.take(rwlock, "b.1", 60), "fence")
        assert second.fence > first.fence  # type: ignore[union-attr]  # both are grants, or this fails
        assert second.lapsed  # type: ignore[union-attr]
        assert term.transitions == 1  # type: ignore[union-attr]


async def test_a_newer_file_is_refused_and_left_alone(path: Path) -> None:
    async with SQLiteProvider(path):
        pass
    with sqlite3.connect(path) as database:
        database.execute("UPDATE grel_meta SET value = '99' WHERE name = 'format'")
    database.close()
    with pytest.raises(CoordinationBackendError, match="newer version"):
        await SQLiteProvider(path).__aenter__()


async def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(CoordinationBackendError, match="nowhere"):
        await SQLiteProvider(tmp_path / "nowhere" / "leases.db").__aenter__()
    with pytest.raises(ValueError, match="MemoryProvider"):
        SQLiteProvider(":memory:")


async def test_a_file_locked_by_someone_else_ends_in_time_and_then_works_again(path: Path) -> None:
    async with SQLiteProvider(path, backend_timeout=0.3) as provider:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        lock = Lock("cart", backend=provider.lock())
        began = time.monotonic()
        with pytest.raises(LockAcquireError):
            await lock.acquire(timeout=0)
        assert time.monotonic() - began < 1
        waiting = asyncio.create_task(lock.acquire(timeout=10))
        await eventually(lambda: provider.lines.waiting(Key(LOCK, "cart")) == 1)
        other.execute("ROLLBACK")
        other.close()
        handle = await waiting
        await handle.release()


async def test_sub_second_leases_last_as_long_as_they_say(path: Path) -> None:
    async with SQLiteProvider(path) as provider:
        for duration in (0.05, 0.2):
            began = time.monotonic()
            await provider.take(Key(LOCK, "cart"), f"a.{duration}", duration)

            async def free() -> bool:
                return not await provider.locked(Key(LOCK, "cart"))

            await eventually(free)
            assert duration <= time.monotonic() - began < duration + 0.1


async def test_a_step_of_the_wall_clock_moves_no_lease_and_no_fence_back(tmp_path: Path) -> None:
    harness = SQLiteHarness(tmp_path)
    await harness.freeze(now=50_000_000, wall=1_800_000_000_000_000)
    async with harness.provider() as provider:
        key = Key(LOCK, "cart")
        first = await provider.take(key, "a.1", 60)
        await harness.freeze(now=51_000_000, wall=1_800_000_000_000_000 - 3_600_000_000)
        assert await provider.owned(key, "a.1")
        assert await provider.drop(key, "a.1")
        second = await provider.take(key, "b.1", 60)
        assert second.fence == first.fence + 1  # type: ignore[union-attr]  # both are grants, or this fails
        await harness.freeze(now=52_000_000, wall=1_800_000_000_000_000 + 3_600_000_000)
        assert await provider.owned(key, "b.1")


async def test_ten_thousand_one_shot_names_leave_nothing_behind(path: Path) -> None:
    async with SQLiteProvider(path, retention=0.2) as provider:

        async def once(number: int) -> None:
            key = Key(LOCK, f"order:{number}")
            await provider.take(key, "a.1", 60)
            await provider.drop(key, "a.1")

        for start in range(0, 10_000, 500):
            await asyncio.gather(*(once(number) for number in range(start, start + 500)))

        def rows() -> int:
            database = sqlite3.connect(path)
            (count,) = database.execute("SELECT count(*) FROM grel_lease").fetchone()
            database.close()
            return int(count)

        async def swept() -> bool:
            for _ in range(200):
                await provider.take(Key(LOCK, "busy"), "a.1", 60)
            return rows() <= 1

        await eventually(swept, within=20)


async def test_a_thousand_live_readers_are_all_counted_and_any_of_them_keeps_the_writer_out(path: Path) -> None:
    key = Key(READWRITELOCK, "book")
    async with SQLiteProvider(path) as provider:
        await asyncio.gather(*(provider.take(key, f"r.{number}", 60, shared=True) for number in range(1000)))
        record, _ = await provider.peek(key)
        assert len(record.readers) == 1000
        for number in range(1000):
            assert await provider.drop(key, f"r.{number}")
            if number in {0, 500, 998}:
                assert not hasattr(await provider.take(key, "w.1", 60), "fence")
        assert hasattr(await provider.take(key, "w.1", 60), "fence")


def _open(path: str, ready: "multiprocessing.synchronize.Barrier", failures: "multiprocessing.Queue[str]") -> None:
    async def work() -> None:
        ready.wait(30)
        async with SQLiteProvider(path) as provider, Lock("cart", backend=provider.lock()):
            pass

    try:
        asyncio.run(work())
    except Exception as error:  # noqa: BLE001 - reported to the parent, which fails
        failures.put(repr(error))


def test_many_processes_may_open_a_new_file_at_once(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, failures = context.Barrier(6), context.Queue()
    processes = [context.Process(target=_open, args=(str(path), barrier, failures)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert failures.empty(), failures.get()


async def test_another_process_is_heard_within_milliseconds(path: Path) -> None:
    async with SQLiteProvider(path) as one, SQLiteProvider(path) as two:
        lock = Lock("cart", backend=one.lock())
        await lock.acquire()
        waiting = asyncio.create_task(Lock("cart", backend=two.lock()).acquire())
        key = Key(LOCK, "cart")

        async def in_line() -> bool:
            return bool((await one.peek(key))[0].waiters)

        await eventually(in_line)
        began = time.monotonic()
        await lock.release()
        handle = await waiting
        assert time.monotonic() - began < 0.2
        await handle.release()
