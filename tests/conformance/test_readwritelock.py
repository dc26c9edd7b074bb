"""What a read-write lock does, on every backend."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from grel_core import Grelmicro
from grel_core.coordination import (
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    LockUpgradeError,
    ReadWriteLock,
    ReadWriteLockConfig,
    WouldBlockError,
)
from grel_core.lease.names import READWRITELOCK, Key
from grel_core.lease.rules import Busy, Grant
from grel_core.providers.base import Provider
from tests.harness import Harness, eventually, work

pytestmark = pytest.mark.anyio

KEY = Key(READWRITELOCK, "book")


@pytest.fixture
async def mine(harness: Harness) -> AsyncIterator[Provider]:
    async with harness.provider() as provider:
        yield provider


@pytest.fixture
async def theirs(harness: Harness) -> AsyncIterator[Provider]:
    """Another process, as far as a backend can tell."""
    async with harness.provider() as provider:
        yield provider


def book(provider: Provider, lease_duration: float = 60) -> ReadWriteLock:
    return ReadWriteLock("book", backend=provider.readwritelock(), lease_duration=lease_duration)


async def in_line(provider: Provider) -> int:
    record, _ = await provider.peek(KEY)
    return len(record.waiters)


async def waiting(provider: Provider, count: int) -> None:
    async def stand() -> bool:
        return await in_line(provider) == count

    await eventually(stand, what=f"{count} in line")


async def test_readers_share_and_a_writer_is_alone(mine: Provider, theirs: Provider) -> None:
    ours, other = book(mine), book(theirs)
    async with ours.read as first:
        async with asyncio.timeout(5):
            second = await asyncio.create_task(other.read.acquire())
        assert first.generation == second.generation
        with pytest.raises(WouldBlockError):
            await asyncio.create_task(other.write.acquire_nowait())
        state = await other.state()
        assert (state.readers, state.writing, state.waiting_writers) == (2, False, 0)
        await second.release()
    async with ours.write as writer:
        assert writer.fencing_token > first.expires_in
        assert not writer.poisoned
        assert (await other.state()).writing
        for refused in (other.read.acquire_nowait, other.write.acquire_nowait):
            with pytest.raises(WouldBlockError):
                await asyncio.create_task(refused())
    async with other.read as reader:
        assert reader.generation >= writer.key.name.count("book")
    assert not await ours.write.locked()


async def test_a_reader_knows_which_writer_wrote_last(mine: Provider) -> None:
    lock = book(mine)
    async with lock.write as writer:
        token = writer.fencing_token
    async with lock.read as reader:
        assert reader.generation == token
        assert reader.expires_in > 0


async def test_a_token_of_a_claim_that_is_over_is_not_given_out(mine: Provider, harness: Harness) -> None:
    lock = book(mine, lease_duration=5)
    guard = await lock.write.acquire()
    await guard.release()
    with pytest.raises(LockLostError):
        _ = guard.fencing_token
    reader = await lock.read.acquire()
    await harness.advance(6)
    with pytest.raises(LockNotOwnedError):
        await lock.read.extend()
    with pytest.raises(LockLostError):
        _ = reader.generation


async def test_upgrading_and_nesting_raise_at_once(mine: Provider) -> None:
    lock = book(mine)
    async with lock.read:
        with pytest.raises(LockUpgradeError):
            await lock.write.acquire()
        with pytest.raises(LockReentrantError):
            await book(mine).read.acquire()
    async with lock.write:
        with pytest.raises(LockReentrantError):
            await lock.read.acquire()
        with pytest.raises(LockReentrantError):
            await lock.write.acquire()


async def test_downgrading_lets_readers_in_and_no_writer(mine: Provider, theirs: Provider) -> None:
    lock, other = book(mine), book(theirs)
    async with lock.write as writer:
        token = writer.fencing_token
        reader = await writer.downgrade()
        assert reader.generation == token
        with pytest.raises(LockLostError):
            _ = writer.fencing_token
        with pytest.raises(WouldBlockError):
            await asyncio.create_task(other.write.acquire_nowait())
        guest = await asyncio.create_task(other.read.acquire())
        await guest.release()
        await lock.read.extend()
    assert (await other.state()).readers == 0


async def test_a_lapsed_writer_cannot_downgrade_and_poisons_the_next_one(mine: Provider, harness: Harness) -> None:
    lock = book(mine, lease_duration=5)
    writer = await asyncio.create_task(lock.write.acquire())
    await harness.advance(6)
    with pytest.raises(LockNotOwnedError):
        await writer.downgrade()
    async with lock.read:
        pass
    async with lock.write as second:
        assert second.poisoned
    async with lock.write as third:
        assert not third.poisoned


async def test_each_reader_has_a_lease_of_its_own(mine: Provider, theirs: Provider, harness: Harness) -> None:
    await asyncio.create_task(book(mine, lease_duration=5).read.acquire())
    living = await asyncio.create_task(book(mine, lease_duration=60).read.acquire())
    await harness.advance(6)
    assert (await book(theirs).state()).readers == 1
    await living.release()
    async with book(theirs).write:
        pass


async def test_a_waiting_writer_keeps_new_readers_out_and_comes_in_next(mine: Provider, theirs: Provider) -> None:
    lock, other = book(mine), book(theirs)
    reader = await lock.read.acquire()
    writing = asyncio.create_task(other.write.acquire())
    await waiting(mine, 1)
    assert (await lock.state()).waiting_writers == 1
    with pytest.raises(WouldBlockError):
        await asyncio.create_task(lock.read.acquire_nowait())
    late = asyncio.create_task(lock.read.acquire())
    await waiting(mine, 2)
    await reader.release()
    writer = await writing
    assert not late.done()
    await writer.release()
    await (await late).release()


async def test_readers_that_waited_for_a_writer_come_in_before_the_next_one(mine: Provider, theirs: Provider) -> None:
    lock, other = book(mine), book(theirs)
    first = await lock.write.acquire()
    second = asyncio.create_task(other.write.acquire())
    await waiting(mine, 1)
    reading = asyncio.create_task(lock.read.acquire())
    await waiting(mine, 2)
    await first.release()
    reader = await asyncio.wait_for(reading, 5)
    assert not second.done()
    await reader.release()
    await (await asyncio.wait_for(second, 5)).release()


async def test_a_cancelled_writer_leaves_no_intent_no_claim_and_no_poison(mine: Provider, theirs: Provider) -> None:
    lock, other = book(mine), book(theirs)
    reader = await lock.read.acquire()
    writing = asyncio.create_task(other.write.acquire())
    await waiting(mine, 1)
    late = asyncio.create_task(lock.read.acquire())
    await waiting(mine, 2)
    writing.cancel()
    await asyncio.wait([writing])
    await (await asyncio.wait_for(late, 5)).release()
    await reader.release()
    async with lock.write as writer:
        assert not writer.poisoned
    assert await in_line(mine) == 0


async def test_a_writer_that_dies_waiting_blocks_for_seconds_only(
    mine: Provider, theirs: Provider, harness: Harness
) -> None:
    await mine.take(KEY, "reader.1", 600, shared=True)
    await theirs.take(KEY, "dead.1", 600, queue=3)
    with pytest.raises(WouldBlockError):
        await book(mine).read.acquire_nowait()
    await harness.advance(3.1)
    await (await book(mine).read.acquire_nowait()).release()


async def test_a_bounded_wait_ends_in_time_and_leaves_the_line(mine: Provider) -> None:
    lock = book(mine)
    async with lock.read:
        with pytest.raises(LockTimeoutError):
            await asyncio.create_task(lock.write.acquire(timeout=0.05))
        await waiting(mine, 0)


async def test_both_sides_hold_and_serve_threads(mine: Provider) -> None:
    lock = book(mine)
    async with lock.read.hold() as reader:
        assert reader.generation >= 0

    def work() -> int:
        with lock.write.from_thread as writer, pytest.raises(LockReentrantError):
            lock.read.from_thread.acquire_nowait()
        with lock.read.from_thread.hold(timeout=1) as reader:
            return reader.generation + (writer.poisoned)

    assert await asyncio.to_thread(work) > 0


async def test_it_is_found_through_the_app_and_made_from_a_configuration(harness: Harness) -> None:
    async with Grelmicro(uses=[harness.provider()]) as micro:
        config = ReadWriteLockConfig(lease_duration=7)
        lock = ReadWriteLock.from_config("book", config)
        async with lock.write as writer:
            assert 6 < writer.expires_in < 7
            assert await micro.coordination.readwritelock("book").write.locked()
        lock.reconfigure(config.model_copy(update={"lease_duration": 9.0}))
        async with lock.read as reader:
            assert reader.expires_in > 8


async def test_neither_side_starves_under_load_of_the_other(mine: Provider, theirs: Provider) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + 2
    longest = {"read": 0.0, "write": 0.0}
    inside = {"read": 0, "write": 0}

    async def visit(provider: Provider, kind: str) -> None:
        side = getattr(book(provider), kind)
        while loop.time() < until:
            began = loop.time()
            async with side:
                longest[kind] = max(longest[kind], loop.time() - began)
                inside[kind] += 1
                assert inside["write"] <= 1
                assert not (inside["write"] and inside["read"])
                await work(0.01)
                inside[kind] -= 1

    visits = [visit(mine, "write"), visit(theirs, "write")]
    visits += [visit(provider, "read") for provider in (mine, theirs) for _ in range(4)]
    await asyncio.gather(*visits)
    assert max(longest.values()) < 1


async def test_a_refused_writer_learns_how_long_the_longest_reader_may_stay(mine: Provider) -> None:
    for number, seconds in enumerate((20, 600, 10)):
        assert isinstance(await mine.take(KEY, f"reader.{number}", seconds, shared=True), Grant)
    for token, rest in (("reader.1", 20), ("reader.0", 10)):
        refused = await mine.take(KEY, "writer.1", 60)
        assert isinstance(refused, Busy)
        assert refused.remaining > rest * 1_000_000
        assert await mine.drop(KEY, token)
        shorter = await mine.take(KEY, "writer.1", 60)
        assert isinstance(shorter, Busy)
        assert (rest - 5) * 1_000_000 < shorter.remaining <= rest * 1_000_000
    assert await mine.drop(KEY, "reader.2")
    assert isinstance(await mine.take(KEY, "writer.1", 60), Grant)
