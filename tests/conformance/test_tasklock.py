"""What a task lock does, on every backend."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from grel_core import Grelmicro
from grel_core.coordination import (
    Lock,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    TaskLock,
    TaskLockConfig,
    WouldBlockError,
)
from grel_core.providers.base import Provider
from tests.harness import Harness, eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
async def provider(harness: Harness) -> AsyncIterator[Provider]:
    async with harness.provider() as opened:
        yield opened


async def refused(lock: TaskLock) -> bool:
    """Whether another task does not get in."""

    async def enter() -> bool:
        try:
            async with lock:
                return False
        except WouldBlockError:
            return True

    return await asyncio.create_task(enter())


async def test_it_never_waits_and_is_kept_for_the_minimum(provider: Provider, harness: Harness) -> None:
    lock = TaskLock("digest", backend=provider.lock(), min_hold_duration=10, lease_duration=60)
    async with lock as handle:
        assert handle.fencing_token > 0
        assert await refused(lock)
    assert await lock.locked()
    await harness.advance(9)
    assert await refused(lock)
    await harness.advance(1.5)
    assert not await lock.locked()
    assert not await refused(TaskLock("digest", backend=provider.lock(), min_hold_duration=0))


async def test_after_the_minimum_it_is_free_at_once(provider: Provider, harness: Harness) -> None:
    lock = TaskLock("digest", backend=provider.lock(), min_hold_duration=5, lease_duration=60)
    async with lock:
        await harness.advance(6)
    assert not await lock.locked()
    async with TaskLock("digest", backend=provider.lock(), min_hold_duration=0):
        pass
    assert not await lock.locked()


async def test_one_object_serves_many_tasks_and_nesting_is_an_error(provider: Provider) -> None:
    lock = TaskLock("digest", backend=provider.lock(), min_hold_duration=0)
    async with lock:
        with pytest.raises(LockReentrantError):
            await lock.__aenter__()
        assert await refused(lock)
    entered = 0
    for _ in range(3):
        entered += not await refused(lock)
    assert entered == 3


async def test_refreshing_never_takes_a_lapsed_lock_anew(provider: Provider, harness: Harness) -> None:
    lock = TaskLock("digest", backend=provider.lock(), min_hold_duration=0, lease_duration=5)
    with pytest.raises(LockNotOwnedError):
        async with lock:
            await harness.advance(3)
            await lock.refresh()
            await harness.advance(3)
            await lock.refresh()
            await harness.advance(6)
            with pytest.raises(LockNotOwnedError):
                await lock.refresh()
            assert not await lock.locked()
    assert not await lock.locked()


async def test_leaving_late_never_takes_the_lock_from_a_successor(provider: Provider, harness: Harness) -> None:
    lock = TaskLock("digest", backend=provider.lock(), min_hold_duration=5, lease_duration=5)
    successor = TaskLock("digest", backend=provider.lock(), min_hold_duration=0, lease_duration=60)
    with pytest.raises(LockNotOwnedError):
        async with lock:
            await harness.advance(6)
            entered, leave = asyncio.Event(), asyncio.Event()

            async def work() -> None:
                async with successor:
                    entered.set()
                    await leave.wait()

            working = asyncio.create_task(work())
            await entered.wait()
    assert await lock.locked()
    leave.set()
    await working


async def test_a_long_body_is_warned_about(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "grel"):
        async with TaskLock("digest", backend=provider.lock(), min_hold_duration=0, lease_duration=0.5):
            await eventually(lambda: "80 %" in caplog.text)


async def test_keep_alive_renews_and_cancels_the_body_when_the_lease_is_lost(
    provider: Provider, harness: Harness
) -> None:
    lock = TaskLock("digest", backend=provider.lock(), min_hold_duration=0, lease_duration=0.3, keep_alive=True)
    with pytest.raises(LockLostError):
        async with lock as handle:
            first = handle.deadline
            await eventually(lambda: handle.deadline > first + 0.1)
            await harness.advance(5)
            await asyncio.Event().wait()
    assert not await lock.locked()


async def test_a_thread_enters_leaves_and_refreshes(provider: Provider) -> None:
    lock = TaskLock("digest", backend=provider.lock(), min_hold_duration=0)

    def work() -> bool:
        with lock.from_thread:
            lock.from_thread.refresh()
            return lock.from_thread.locked()

    assert await asyncio.to_thread(work)
    assert not await lock.locked()
    async with lock:
        with pytest.raises(WouldBlockError):
            await asyncio.to_thread(work)
    await lock.do_thread_enter()
    assert await lock.locked()
    await lock.do_thread_exit()
    assert not await lock.locked()


async def test_the_error_of_the_body_is_never_masked(provider: Provider, harness: Harness) -> None:
    with pytest.raises(KeyError):
        async with TaskLock("digest", backend=provider.lock(), lease_duration=5):
            await harness.advance(6)
            raise KeyError


async def test_it_never_meets_a_lock_of_the_same_name(harness: Harness) -> None:
    async with Grelmicro(uses=[harness.provider()]) as micro, Lock("x"), TaskLock("x"):
        assert await micro.coordination.tasklock("x").locked()
        assert TaskLock.from_config("x", TaskLockConfig(lease_duration=7)).config.min_hold_duration == 1


def test_a_minimum_longer_than_the_lease_is_refused() -> None:
    with pytest.raises(ValueError, match="min_hold_duration"):
        TaskLock("digest", min_hold_duration=61)


async def test_the_operations_by_the_names_of_the_reference_are_the_same_ones(
    provider: Provider, harness: Harness
) -> None:
    lock = TaskLock("digest", backend=provider.lock(), lease_duration=60)
    assert await lock.do_acquire("w.1", duration=60)
    assert not await lock.do_acquire("w.2", duration=60)
    assert await lock.do_reacquire("w.1", 5)
    assert not await lock.do_reacquire("w.2", 5)
    await lock.do_exit("w.1", min_hold_duration=4)
    assert await lock.locked()
    await harness.advance(4.1)
    assert not await lock.locked()
    assert not await lock.do_reacquire("w.1", 5)
    assert await lock.do_acquire("w.3", duration=60)
    assert await lock.do_release("w.3")
