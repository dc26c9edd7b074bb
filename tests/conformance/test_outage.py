"""A backend that is down, hangs and comes back: who waits goes on, and who holds knows where it stands."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from grel_core.coordination import (
    LeaderElection,
    Lock,
    LockAcquireError,
    LockLockedCheckError,
    LockLostError,
    LockOwnedCheckError,
    LockReleaseError,
    LockTimeoutError,
)
from grel_core.errors import CoordinationBackendError
from grel_core.lease.backend import T
from grel_core.lease.names import LOCK, Key
from grel_core.lease.queue import Watch
from grel_core.lease.rules import Rule
from grel_core.providers.base import Provider
from tests.harness import Harness, eventually

pytestmark = pytest.mark.anyio


class Shaky(Provider):
    """A way to a real provider that can break: with an error at once, or with silence until the time-out."""

    def __init__(self, inner: Provider) -> None:
        super().__init__(backend_timeout=inner.backend_timeout)
        self.inner = inner
        self.error: Exception | None = None
        self.hangs = False
        self.asked = 0

    async def _open(self) -> None:
        await self.inner.__aenter__()

    async def _close(self) -> None:
        self.error, self.hangs = None, False
        await self.inner.__aexit__()

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        self.asked += 1
        if self.hangs:
            async with asyncio.timeout(self.backend_timeout):
                await eventually(lambda: not self.hangs, within=60)
        if self.error is not None:
            raise self.error
        return await self.inner.apply(key, rule)

    def asked_more_than(self, times: int) -> Callable[[], bool]:
        """Whether so many rules were tried."""
        return lambda: self.asked > times

    async def listen(self) -> bool:
        return await self.inner.listen()

    def watch(self, key: Key, pace: float = 0) -> Watch:
        return self.inner.watch(key)


@pytest.fixture
async def shaky(harness: Harness) -> AsyncIterator[Shaky]:
    async with Shaky(harness.provider()) as provider:
        yield provider


async def test_who_waits_while_the_backend_is_down_comes_in_when_it_is_back(shaky: Shaky) -> None:
    for timeout in (10, None):
        shaky.error = ConnectionError("down")
        waiting = asyncio.create_task(Lock("cart", backend=shaky.lock(), retry_interval=0.01).acquire(timeout=timeout))
        asked = shaky.asked
        await eventually(shaky.asked_more_than(asked + 2))
        assert not waiting.done()
        shaky.error = None
        handle = await asyncio.wait_for(waiting, 5)
        assert shaky.failing_since is None
        await handle.release()


async def test_the_error_tells_a_backend_that_is_down_from_a_lock_that_is_held(shaky: Shaky) -> None:
    lock = Lock("cart", backend=shaky.lock(), retry_interval=0.01)
    shaky.error = ConnectionError("down")
    with pytest.raises(LockAcquireError) as caught:
        await lock.acquire(timeout=0.1)
    assert caught.value.__cause__ is shaky.error
    with pytest.raises(LockAcquireError):
        await lock.acquire_nowait()
    shaky.error = None
    async with lock:
        with pytest.raises(LockTimeoutError):
            await asyncio.create_task(lock.acquire(timeout=0.1))


async def test_without_a_timeout_a_waiter_gives_up_after_one_lease(shaky: Shaky) -> None:
    lock = Lock("cart", backend=shaky.lock(), lease_duration=0.3, retry_interval=0.01)
    shaky.error = ConnectionError("down")
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(LockAcquireError):
        await lock.acquire()
    assert 0.25 < loop.time() - began < 1


async def test_an_error_that_will_not_pass_is_raised_at_once(shaky: Shaky) -> None:
    for error in (ValueError("wrong type"), CoordinationBackendError("a newer format")):
        shaky.error = error
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises((LockAcquireError, CoordinationBackendError)) as caught:
            await Lock("cart", backend=shaky.lock()).acquire(timeout=30)
        assert error in {caught.value, caught.value.__cause__}
        assert loop.time() - began < 1


async def test_a_timeout_bounds_the_call_also_when_the_backend_hangs(shaky: Shaky) -> None:
    shaky.hangs = True
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(LockAcquireError, match="no answer"):
        await Lock("cart", backend=shaky.lock()).acquire(timeout=0.2)
    assert 0.15 < loop.time() - began < 1
    shaky.hangs = False
    await eventually(lambda: free(shaky))


async def free(provider: Provider) -> bool:
    record, _ = await provider.peek(Key(LOCK, "cart"))
    return record.holder is None and not record.waiters


async def test_every_question_says_which_one_failed(shaky: Shaky) -> None:
    lock = Lock("cart", backend=shaky.lock())
    async with lock:
        shaky.error = ConnectionError("down")
        with pytest.raises(LockLockedCheckError):
            await lock.locked()
        with pytest.raises(LockOwnedCheckError):
            await lock.owned()
        shaky.error = None
        assert await lock.owned()


async def test_a_release_or_an_extend_that_failed_can_be_tried_again(shaky: Shaky) -> None:
    lock = Lock("cart", backend=shaky.lock())
    handle = await lock.acquire()
    shaky.error = ConnectionError("down")
    with pytest.raises(LockAcquireError):
        await lock.extend()
    handle.ensure()
    with pytest.raises(LockReleaseError):
        await lock.release()
    shaky.error = None
    assert (await lock.extend()).fencing_token == handle.fencing_token
    assert await lock.owned()
    await lock.release()
    assert not await lock.locked()


async def test_hold_survives_an_outage_that_is_shorter_than_the_lease(shaky: Shaky) -> None:
    async with Lock("cart", backend=shaky.lock(), lease_duration=1.5).hold() as handle:
        shaky.error = ConnectionError("down")
        asked = shaky.asked
        await eventually(shaky.asked_more_than(asked + 1))  # a renewal failed, and so did the next one
        shaky.error, deadline = None, handle.deadline
        await eventually(lambda: handle.deadline > deadline)
        handle.ensure()


async def test_hold_ends_at_the_deadline_though_the_renewal_hangs(shaky: Shaky) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(LockLostError):
        async with Lock("cart", backend=shaky.lock(), lease_duration=0.4).hold():
            shaky.hangs = True
            loop.call_later(1, lambda: setattr(shaky, "hangs", False))  # so that the release gets an answer
            try:
                await asyncio.Event().wait()
            finally:
                assert 0.3 < loop.time() - began < 0.9
    assert await free(shaky)


async def test_a_leader_survives_a_short_outage_and_yields_in_a_long_one(shaky: Shaky) -> None:
    election = LeaderElection(
        "jobs", backend=shaky.leaderelection(), lease_duration=1.5, renew_deadline=1.0, retry_interval=0.1
    )
    task = asyncio.create_task(election.run())
    await election.wait_for_leader()
    token, loop = election.fencing_token, asyncio.get_running_loop()
    shaky.error = ConnectionError("down")
    asked = shaky.asked
    await eventually(shaky.asked_more_than(asked + 2))
    assert election.is_leader()
    assert not election.is_leader_confirmed_within(0.01)
    shaky.error = None
    await eventually(lambda: election.is_leader_confirmed_within(0.1))
    assert election.fencing_token == token
    shaky.hangs = True
    began = loop.time()
    await election.wait_lose_leader()
    assert loop.time() - began < 1.3
    assert election.last_confirmation_age() is None
    shaky.hangs = False
    await asyncio.wait_for(election.wait_for_leader(), 5)
    assert token is not None
    assert election.fencing_token is not None
    assert election.fencing_token > token
    task.cancel()
    await asyncio.wait([task])
