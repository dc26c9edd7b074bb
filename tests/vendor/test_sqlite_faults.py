"""Faults that a hostile engineer found in SQLite leases: each one here so that it stays away."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from grel_core.coordination import LeaderElection, Lock, LockLockedCheckError
from grel_core.lease.names import LOCK, Key
from grel_core.providers.sqlite import SQLiteProvider
from grel_core.providers.sqlite_file import File
from tests.harness import eventually, work

pytestmark = pytest.mark.anyio

CART = Key(LOCK, "cart")


class CountingFile(File):
    """Counts how often it was looked at for changes."""

    looks = 0

    def changed(self, keys: Sequence[Key]) -> list[Key]:
        self.looks += 1
        return super().changed(keys)


class Counting(SQLiteProvider):
    """A provider on such a file."""

    file: CountingFile

    def _file(self) -> File:
        self.file = CountingFile(self.path, prefix=self.prefix, keep=self.keep, timeout=self.backend_timeout * 0.8)
        return self.file


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@asynccontextmanager
async def occupied(provider: SQLiteProvider) -> AsyncIterator[None]:
    """Somebody else's transaction keeps the worker waiting: whatever the body asks for is one batch."""
    other = sqlite3.connect(provider.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    first = asyncio.create_task(provider.take(Key(LOCK, "first"), "a.1", 60))
    await asyncio.sleep(0)
    await eventually(provider._jobs.empty)
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()
        await first


async def test_who_waits_while_the_directory_is_away_comes_in_when_it_is_back(directory: Path) -> None:
    async with Counting(directory / "leases.db", backend_timeout=1) as provider:
        holder = await asyncio.create_task(Lock("cart", backend=provider.lock()).acquire())
        waiting = asyncio.create_task(Lock("cart", backend=provider.lock()).acquire(timeout=20))
        await eventually(lambda: provider.file.looks > 2)
        away, looks = directory.rename(directory.with_name("away")), provider.file.looks
        try:
            await eventually(lambda: provider.file.looks > looks + 2, what="a worker that lives")
        finally:
            away.rename(directory)

        async def answers() -> bool:
            (outcome,) = await asyncio.gather(provider.check(), return_exceptions=True)
            return outcome is None

        await eventually(answers)
        await holder.release()
        assert (await asyncio.wait_for(waiting, 5)).fencing_token > holder.fencing_token


async def test_a_directory_that_was_away_for_one_call_is_used_by_the_next_one(directory: Path) -> None:
    async with SQLiteProvider(directory / "leases.db", backend_timeout=1) as provider:
        lock = Lock("cart", backend=provider.lock())
        handle = await lock.acquire()
        away = directory.rename(directory.with_name("away"))
        try:
            with pytest.raises(LockLockedCheckError):
                await lock.locked()
        finally:
            away.rename(directory)
        assert await lock.locked()
        await handle.release()


async def test_a_wake_up_beside_a_release_at_the_close_fails_nothing(directory: Path) -> None:
    provider = SQLiteProvider(directory / "leases.db")
    await provider.__aenter__()
    await provider.take(CART, "a.1", 60)
    async with occupied(provider):
        await provider.listen()
        release = asyncio.create_task(provider.drop(CART, "a.1"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(provider.__aexit__())
        await work(0.02)
    await closing
    assert await release


async def test_a_rule_that_cannot_be_stored_fails_nobody_beside_it(directory: Path) -> None:
    async with SQLiteProvider(directory / "leases.db") as provider:
        lock = provider.lock()

        async def take(number: int, duration: float) -> int | None:
            return await lock.acquire(name=f"order:{number}", token="a.1", duration=duration)

        async with occupied(provider):
            tasks = [asyncio.create_task(take(number, 1e300 if number == 2 else 60)) for number in range(5)]
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(outcome, int) for outcome in outcomes] == [True, True, False, True, True], outcomes


async def test_an_idle_leader_does_not_look_at_the_file_again_and_again(directory: Path) -> None:
    async with Counting(directory / "leases.db") as provider:
        election = LeaderElection("jobs", backend=provider.leaderelection())
        running = asyncio.create_task(election.run())
        await election.wait_for_leader()
        await work(0.1)
        looks = provider.file.looks
        await work(0.5)
        looks = provider.file.looks - looks
        running.cancel()
        await asyncio.wait([running])
        assert looks < 10


UNCLOSED = """
import asyncio, sys
from grel_core.coordination import Lock
from grel_core.providers.sqlite import SQLiteProvider

async def main():
    provider = await SQLiteProvider(sys.argv[1]).__aenter__()
    await Lock("cart", backend=provider.lock()).acquire()
    sys.exit(7)

asyncio.run(main())
"""


def test_a_program_that_forgets_to_close_its_provider_ends(directory: Path) -> None:
    command = [sys.executable, "-c", UNCLOSED, str(directory / "leases.db")]
    assert subprocess.run(command, check=False, timeout=15, capture_output=True).returncode == 7
