"""`MemoryLockAdapter` and `MemoryLeaderElectionAdapter`: backends for one process, without an app."""

import asyncio

import pytest

from grel_core import NotStartedError
from grel_core.coordination import (
    CoordinationBackendError,
    LeaderElection,
    Lock,
    LockReentrantError,
    MemoryLeaderElectionAdapter,
    MemoryLockAdapter,
    WouldBlockError,
)
from tests.unit.test_opening import run

pytestmark = pytest.mark.anyio


async def test_a_lock_works_without_an_app() -> None:
    backend = MemoryLockAdapter()
    lock = Lock("cart", backend=backend)
    async with lock as first:
        assert await lock.owned()
        with pytest.raises(LockReentrantError):
            await lock.acquire()
        with pytest.raises(WouldBlockError):
            await asyncio.create_task(Lock("cart", backend=backend).acquire_nowait())
        waiting = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
    second = await waiting
    assert second.fencing_token > first.fencing_token
    await second.release()


async def test_each_adapter_is_a_place_of_its_own() -> None:
    async with Lock("cart", backend=MemoryLockAdapter()), Lock("cart", backend=MemoryLockAdapter()):
        pass


async def test_an_election_works_without_an_app() -> None:
    backend = MemoryLeaderElectionAdapter()
    first, second = (LeaderElection("jobs", backend=backend) for _ in range(2))
    running = [asyncio.create_task(first.run())]
    await first.wait_for_leader()
    running.append(asyncio.create_task(second.run()))
    await second.wait_for_record()
    assert (first.is_leader(), second.is_leader()) == (True, False)
    running[0].cancel()
    await asyncio.wait_for(second.wait_for_leader(), 1)
    running[1].cancel()
    await asyncio.wait(running)


async def test_threads_work_once_the_loop_is_known() -> None:
    lock = Lock("cart", backend=MemoryLockAdapter())
    with pytest.raises(NotStartedError, match="is not open"):
        await asyncio.to_thread(lock.from_thread.locked)
    assert not await lock.locked()

    def work() -> None:
        with lock.from_thread:
            assert lock.from_thread.owned()

    await asyncio.to_thread(work)


def test_one_loop_may_come_after_another_and_fences_still_rise() -> None:
    lock, election = (
        Lock("cart", backend=MemoryLockAdapter()),
        LeaderElection("jobs", backend=MemoryLeaderElectionAdapter()),
    )
    fences = []

    async def main() -> None:
        campaign = asyncio.create_task(election.run())
        async with lock as handle:
            fences.append(handle.fencing_token)
            waiting = asyncio.create_task(lock.acquire())
            await asyncio.sleep(0)
        await (await waiting).release()
        await election.wait_for_leader()
        campaign.cancel()
        await asyncio.wait([campaign])

    for _ in range(3):
        run(main())
    assert fences == sorted(set(fences))


def test_a_waiter_that_was_torn_down_with_its_loop_leaves_the_next_loop_free() -> None:
    lock = Lock("cart", backend=MemoryLockAdapter())
    left = []

    async def killed() -> None:
        await asyncio.create_task(lock.acquire())
        left.append(asyncio.create_task(lock.acquire()))
        await asyncio.sleep(0)

    run(killed())
    assert left[0].cancelled()

    async def next_one() -> None:
        assert await lock.locked()  # nobody gave it back: it stays held until its lease ends
        async with asyncio.timeout(61):
            await (await lock.acquire()).release()

    run(next_one())


async def test_two_loops_at_once_are_an_error_that_says_so() -> None:
    backend = MemoryLockAdapter()
    lock, election = Lock("cart", backend=backend), LeaderElection("jobs", backend=MemoryLeaderElectionAdapter())
    campaign = asyncio.create_task(election.run())
    await election.wait_for_leader()

    async def other_loop() -> None:
        for use in (lock.acquire, lock.acquire_nowait, lock.locked, lock.owned):
            with pytest.raises(CoordinationBackendError, match=r"open on another event loop; use `from_thread`"):
                await use()
        with pytest.raises(CoordinationBackendError, match="another event loop"):
            await LeaderElection("jobs", backend=election.backend).run()

    async with lock:
        await asyncio.to_thread(run, other_loop())
    assert not await lock.locked()
    campaign.cancel()
    await asyncio.wait([campaign])
