"""Somebody else's backend: it is polled, opened with the app, never trusted blindly, and never kept alive."""

import asyncio
import gc
import weakref
from dataclasses import dataclass
from typing import Any, Self

import pytest

from grel_core import Grelmicro, NotStartedError
from grel_core.coordination import (
    Coordination,
    LeaderElection,
    Lock,
    LockAcquireError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    TaskLock,
    WouldBlockError,
)
from grel_core.lease.foreign import _wrapped, lease_backend, name_of
from grel_core.lease.names import LOCK, TASKLOCK, Key
from tests.harness import eventually
from tests.unit.fakes import StrangeElections, StrangeLocks
from tests.unit.test_drain import passing
from tests.unit.test_opening import run

pytestmark = pytest.mark.anyio


async def test_a_stranger_s_lock_excludes_and_gives_rising_fences() -> None:
    stranger = StrangeLocks()
    lock, fences = Lock("cart", backend=stranger), []
    for _ in range(3):
        async with lock as handle:
            fences.append(handle.fencing_token)
            assert await lock.owned()
            assert stranger.held["cart"][0] == handle.token
            with pytest.raises(WouldBlockError):
                await asyncio.create_task(lock.acquire_nowait())
            with pytest.raises(LockReentrantError):
                await Lock("cart", backend=stranger).acquire()
            assert (await lock.extend()).fencing_token == handle.fencing_token
    assert fences == [1, 2, 3]
    assert not await lock.locked()
    with pytest.raises(LockNotOwnedError):
        await lock.release()


async def test_a_stranger_s_lock_is_polled_at_the_retry_interval() -> None:
    stranger, loop = StrangeLocks(), asyncio.get_running_loop()
    lock = Lock("cart", backend=stranger, retry_interval=2, retry_jitter=0)
    held = await asyncio.create_task(lock.acquire())
    waiting = asyncio.create_task(lock.acquire())
    await passing(0.5)
    await held.release()
    await (await waiting).release()
    assert loop.time() == pytest.approx(2, abs=0.1)
    async with lock:
        with pytest.raises(LockTimeoutError):
            await asyncio.create_task(lock.acquire(timeout=0.5))


async def test_an_extend_that_in_truth_acquired_again_is_given_back_and_reported() -> None:
    stranger = StrangeLocks()
    handle = await Lock("cart", backend=stranger, lease_duration=5).acquire()
    await passing(6)
    with pytest.raises(LockNotOwnedError, match="overlapped"):
        await handle.extend()
    assert stranger.fence == 2  # the stranger did take it anew
    await eventually(lambda: not stranger.held)
    assert handle.lost.is_set()


async def test_hold_renews_a_stranger_s_lease() -> None:
    stranger = StrangeLocks()
    async with Lock("cart", backend=stranger, lease_duration=5).hold() as handle:
        await passing(60)
        handle.ensure()
        assert await stranger.owned(name="cart", token=handle.token)
    assert not stranger.held


class Slow(StrangeLocks):
    """Answers after a second, and is not to be cancelled meanwhile: its connection would be ruined."""

    ruined = False

    async def acquire(self, *, name: str, token: str, duration: float) -> int | None:
        try:
            await passing(1)
        except asyncio.CancelledError:
            self.ruined = True
            raise
        return await super().acquire(name=name, token=token, duration=duration)


async def test_a_cancelled_caller_ruins_no_connection_of_a_stranger_and_leaves_nothing_held() -> None:
    stranger = Slow()
    lock = Lock("cart", backend=stranger)
    for _ in range(3):
        task = asyncio.create_task(lock.acquire())
        await passing(0.5)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    await passing(3)
    assert stranger.fence == 3  # each of the calls went through, and was given back after it
    assert not stranger.held
    assert not stranger.ruined


async def test_a_stranger_that_hangs_is_not_waited_for_longer_than_the_timeout() -> None:
    class Hanging(StrangeLocks):
        async def acquire(self, **asked: Any) -> int | None:
            await asyncio.get_running_loop().create_future()
            return None

    loop, lock = asyncio.get_running_loop(), Lock("cart", backend=Hanging(), lease_duration=6)
    with pytest.raises(LockAcquireError):
        await lock.acquire(timeout=1)
    assert loop.time() == pytest.approx(1, abs=0.1)
    with pytest.raises(LockAcquireError) as caught:
        await lock.acquire_nowait()
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert loop.time() == pytest.approx(1 + 5, abs=0.1)
    with pytest.raises(LockAcquireError):
        await lock.acquire()


async def test_a_stranger_without_a_loop_works_and_threads_are_told_what_is_missing() -> None:
    class Loopless(StrangeLocks):
        def __init__(self) -> None:
            super().__init__()
            del self._loop

    class Plain(StrangeLocks):
        async def __aenter__(self) -> Self:
            return self  # it forgets to capture the loop

    for stranger in (Loopless(), Plain(), StrangeLocks()):
        lock = Lock("cart", backend=stranger)
        with pytest.raises(NotStartedError, match=r"keeps no event loop in `_loop`, .*`__aenter__` set `_loop`"):
            await asyncio.to_thread(lock.from_thread.acquire)
        async with lock:
            pass


async def test_threads_use_the_loop_that_the_stranger_captured() -> None:
    stranger = StrangeLocks()
    async with stranger:
        lock = Lock("cart", backend=stranger)

        def work() -> int:
            with lock.from_thread as handle:
                assert lock.from_thread.owned()
                return handle.fencing_token

        assert await asyncio.to_thread(work) == 1
        assert not await lock.locked()


async def test_a_stranger_is_opened_and_closed_with_the_app_and_its_holders_are_drained() -> None:
    stranger = StrangeLocks()
    holding = asyncio.Event()

    async def hold() -> None:
        async with Lock("cart"):
            holding.set()
            await passing(1)

    async with Grelmicro(uses=[Coordination(lock=stranger)], drain_timeout=3):
        assert stranger.opened == 1

        def in_thread() -> None:
            with Lock("sync").from_thread:
                pass

        await asyncio.to_thread(in_thread)
        task = asyncio.create_task(hold())
        await holding.wait()
    assert task.done()
    assert task.exception() is None
    assert stranger.opened == 0
    assert not stranger.held


async def test_a_stranger_with_nothing_to_open_may_be_in_an_app() -> None:
    stranger = StrangeElections()
    election = LeaderElection("jobs")
    async with Grelmicro(uses=[Coordination(election=stranger), election]):
        await election.wait_for_leader()
    assert await stranger.get(name="jobs") is None


# Elections.


async def test_a_stranger_s_election_leads_follows_and_hands_over() -> None:
    stranger = StrangeElections()
    first, second = (LeaderElection("jobs", backend=stranger, worker=name) for name in ("first", "second"))
    tasks = [asyncio.create_task(first.run())]
    await first.wait_for_leader()
    tasks.append(asyncio.create_task(second.run()))
    await eventually(lambda: second.record is not None and second.record.holder == "first")
    token = first.fencing_token
    assert await first.step_down(stay_out=100)
    await asyncio.wait_for(second.wait_for_leader(), 5)  # polled: at most a retry interval and a bit
    assert token is not None
    assert second.fencing_token is not None
    assert second.fencing_token > token
    await eventually(lambda: second.record is not None and second.record.transitions == 1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert await stranger.get(name="jobs") is None


async def test_a_stranger_s_election_keeps_the_metadata_across_renewals() -> None:
    stranger = StrangeElections()
    election = LeaderElection("jobs", backend=stranger, metadata={"zone": "b"})
    task = asyncio.create_task(election.run())
    await election.wait_for_leader()
    asked = stranger.asked
    await eventually(lambda: stranger.asked >= asked + 3, within=30)
    assert stranger.records["jobs"].metadata == {"zone": "b"}
    task.cancel()
    await asyncio.wait([task])


async def test_a_renewal_that_in_truth_acquired_again_ends_the_term() -> None:
    stranger = StrangeElections()
    election = LeaderElection("jobs", backend=stranger)
    task = asyncio.create_task(election.run())
    await election.wait_for_leader()
    before = election.fencing_token
    stranger.until["jobs"] = 0  # its lease ran out unnoticed, and the renewal will take a new one
    await eventually(lambda: election.fencing_token not in {None, before}, within=30)
    assert stranger.records["jobs"].transitions >= 1
    task.cancel()
    await asyncio.wait([task])


async def test_one_stranger_may_be_lock_and_election_at_once() -> None:
    class Both(StrangeLocks, StrangeElections):
        def __init__(self) -> None:
            StrangeElections.__init__(self)
            StrangeLocks.__init__(self)

        async def release(self, *, name: str, token: str) -> bool:
            if name in self.held:
                return await StrangeLocks.release(self, name=name, token=token)
            return await StrangeElections.release(self, name=name, token=token)

    stranger = Both()
    election = LeaderElection("jobs", backend=stranger)
    task = asyncio.create_task(election.run())
    await election.wait_for_leader()
    async with Lock("cart", backend=stranger):
        assert set(stranger.held) == {"cart"}
        assert set(stranger.records) == {"jobs"}
    task.cancel()
    await asyncio.wait([task])


# Wrapping.


async def test_a_wrapper_keeps_no_stranger_alive() -> None:
    stranger = StrangeLocks()
    lock = Lock("cart", backend=stranger)
    async with lock:
        pass
    gone, number = weakref.ref(stranger), id(stranger)
    del stranger, lock
    gc.collect()
    assert gone() is None
    assert number not in _wrapped


async def test_a_stranger_has_one_wrapper_while_anyone_uses_it() -> None:
    stranger = StrangeLocks()
    lock = Lock("cart", backend=stranger)
    handle = await lock.acquire()
    assert lease_backend(stranger) is handle.store is lease_backend(stranger)
    await handle.release()


async def test_a_stranger_needs_neither_a_hash_nor_weak_references() -> None:
    @dataclass(eq=True, slots=True)
    class Unhashable:
        held: dict[str, str]

        async def acquire(self, *, name: str, token: str, duration: float) -> int | None:
            return 1 if self.held.setdefault(name, token) == token else None

        async def release(self, *, name: str, token: str) -> bool:
            return self.held.pop(name, "") == token

        async def locked(self, *, name: str) -> bool:
            return name in self.held

        async def owned(self, *, name: str, token: str) -> bool:
            return self.held.get(name) == token

    one, equal = Unhashable({}), Unhashable({})
    async with Lock("cart", backend=one), Lock("cart", backend=equal):
        assert one.held["cart"] != equal.held["cart"]


async def test_kinds_do_not_meet_in_one_stranger() -> None:
    stranger = StrangeLocks()
    async with Lock("x", backend=stranger), Lock("tasklock:x", backend=stranger), TaskLock("x", backend=stranger):
        assert len(stranger.held) == 3
    names = [f"{front}x" for front in ("", "lock:", "tasklock:", "lock:tasklock:", "tasklock:lock:", "lock:lock:")]
    assert len({name_of(Key(kind, name)) for kind in (LOCK, TASKLOCK) for name in names}) == 12


def test_a_stranger_may_be_used_on_one_loop_after_another() -> None:
    stranger = StrangeLocks()
    lock, fences = Lock("cart", backend=stranger), []

    async def main() -> None:
        async with lock as handle:
            fences.append(handle.fencing_token)

    for _ in range(3):
        run(main())
    assert fences == [1, 2, 3]
