"""Faults that a hostile engineer found, on every backend: each one here so that it stays away."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from grel_core.coordination import LeaderElection, Lock, LockReleaseError, TaskLock
from grel_core.lease.backend import T
from grel_core.lease.names import Key
from grel_core.lease.queue import Watch
from grel_core.lease.rules import Release, Rule, Take
from grel_core.providers.base import Provider
from tests.harness import Harness, eventually, work

pytestmark = pytest.mark.anyio


class Late(Provider):
    """A way to a real provider: the next rule of a kind is lost before it arrives, or its answer comes late."""

    def __init__(self, inner: Provider) -> None:
        super().__init__(backend_timeout=inner.backend_timeout)
        self.inner = inner
        self.loses: type[Rule[Any]] | None = None
        self.withholds: type[Rule[Any]] | None = None
        self.withheld = asyncio.Event()
        self.go = asyncio.Event()

    async def _open(self) -> None:
        await self.inner.__aenter__()

    async def _close(self) -> None:
        await self.inner.__aexit__()

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        if self.loses is not None and isinstance(rule, self.loses):
            self.loses = None
            raise ConnectionError("reset")
        answer = await self.inner.apply(key, rule)
        if self.withholds is not None and isinstance(rule, self.withholds):
            self.withholds = None
            self.withheld.set()
            await self.go.wait()
        return answer

    async def listen(self) -> bool:
        return await self.inner.listen()

    def watch(self, key: Key, pace: float = 0) -> Watch:
        return self.inner.watch(key)


@pytest.fixture
async def late(harness: Harness) -> AsyncIterator[Late]:
    async with Late(harness.provider()) as provider:
        yield provider


async def test_who_steps_down_while_the_lead_is_being_granted_does_not_lead(late: Late, harness: Harness) -> None:
    election = LeaderElection("jobs", backend=late.leaderelection(), worker="a")
    late.withholds = Take
    running = [asyncio.create_task(election.run())]
    await late.withheld.wait()
    await election.step_down(stay_out=60)
    async with harness.provider() as other:
        rival = LeaderElection("jobs", backend=other.leaderelection(), worker="b")
        running.append(asyncio.create_task(rival.run()))
        await asyncio.wait_for(rival.wait_for_leader(), 5)
        late.go.set()
        await work(0.05)
        leading = election.is_leader(), rival.is_leader()
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    assert leading == (False, True)


async def test_a_task_lock_whose_exit_is_cancelled_is_kept_for_its_minimum(late: Late) -> None:
    lock = TaskLock("digest", backend=late.lock(), min_hold_duration=30)

    async def tick() -> None:
        async with lock:
            late.withholds = Release

    ticking = asyncio.create_task(tick())
    await late.withheld.wait()
    ticking.cancel()
    late.go.set()
    await asyncio.wait([ticking])
    assert await lock.locked()


LEAVING: dict[str, Callable[[Late], Any]] = {
    "with": lambda late: Lock("cart", backend=late.lock()),
    "hold": lambda late: Lock("cart", backend=late.lock()).hold(),
    "tasklock": lambda late: TaskLock("cart", backend=late.lock(), min_hold_duration=0),
}


@pytest.mark.parametrize("way", LEAVING)
async def test_a_release_that_is_lost_on_its_way_is_made_again(late: Late, way: str) -> None:
    lock = TaskLock("cart", backend=late.lock()) if way == "tasklock" else Lock("cart", backend=late.lock())
    with suppress(LockReleaseError):
        async with LEAVING[way](late):
            assert await lock.locked()
            late.loses = Release
    assert late.loses is None

    async def free() -> bool:
        return not await lock.locked()

    await eventually(free, within=3, what="the lock free")


BEYOND: dict[str, dict[str, Any]] = {
    "a token that is no text": {"token": uuid.uuid4(), "duration": 10},
    "three hundred million years": {"token": "a.1", "duration": 1e16},
    "longer than numbers go": {"token": "a.1", "duration": 1e300},
}


@pytest.mark.parametrize("what", BEYOND)
async def test_what_no_store_can_keep_is_refused_and_leaves_nothing_held(harness: Harness, what: str) -> None:
    async with harness.provider() as provider:
        lock, book, jobs = provider.lock(), provider.readwritelock(), provider.leaderelection()
        calls: list[Callable[..., Awaitable[Any]]] = [
            lock.acquire, book.acquire_read, book.acquire_write, jobs.acquire_or_renew,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises((TypeError, ValueError)):
                await call(name="cart", **BEYOND[what])
        state = await book.state(name="cart")
        assert not await lock.locked(name="cart")
        assert (state.writing, state.readers, state.waiting_writers) == (False, 0, 0)
        assert await jobs.get(name="cart") is None
