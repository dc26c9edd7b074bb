"""Faults that a hostile engineer found in what is above the stores: each one here so that it stays away."""

import asyncio
import contextvars
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from grel_core import Grelmicro
from grel_core.component import bound
from grel_core.coordination import (
    Coordination,
    LeaderElection,
    Lock,
    LockAcquireError,
    LockConfig,
    LockQueueFullError,
    LockTimeoutError,
    ReadWriteLock,
    ReadWriteLockConfig,
    TaskLock,
)
from grel_core.errors import GrelmicroError
from grel_core.lease.names import LOCK, Key
from grel_core.lease.rules import Release, Renew
from tests.conformance.test_faults import Late
from tests.harness import eventually
from tests.unit.fakes import Other, Place
from tests.unit.test_app import led
from tests.unit.test_drain import passing
from tests.unit.test_threads import in_thread

pytestmark = pytest.mark.anyio


# Elections.


async def test_a_leader_loop_that_swallows_its_cancellation_ends_with_the_lead() -> None:
    election, ran = LeaderElection("default"), list[bool]()
    micro = Grelmicro(uses=[Place(), election])

    @micro.leader_loop(every=0.1)
    async def job() -> None:
        ran.append(election.is_leader())
        with suppress(asyncio.CancelledError):
            await passing(0.5)

    async with micro:
        await eventually(lambda: bool(ran))
        await election.step_down(stay_out=60)
        ran.clear()
        await passing(5)
        assert not ran


async def test_an_election_that_is_cancelled_while_it_changes_backends_ends() -> None:
    late, election = Late(Other()), LeaderElection("jobs")
    async with late, Grelmicro(uses=[Place()]) as micro:
        async with micro.override(Coordination(late)):
            running = asyncio.create_task(election.run())
            await eventually(election.is_running)
            await election.wait_for_leader()
            late.withholds = Release
        election.hint()
        await late.withheld.wait()
        running.cancel()
        await asyncio.sleep(0)
        late.go.set()
        await asyncio.wait([running], timeout=10)
        ended = running.cancelled()
        running.cancel()
        await asyncio.wait([running])
        assert ended


async def test_an_override_closes_its_store_only_after_the_election_has_resigned_there() -> None:
    fake, election, at_work = Other(), LeaderElection("jobs"), asyncio.Event()

    async def work() -> None:
        try:
            at_work.set()
            await passing(60)
        finally:
            await passing(0.3)

    async with Grelmicro(uses=[Place(), election]) as micro:
        await election.wait_for_leader()
        async with micro.override(Coordination(fake)):
            await eventually(lambda: led(fake))
            leading = asyncio.create_task(election.lead(work))
            await at_work.wait()
        async with fake:
            assert not await led(fake)
        await leading


@pytest.mark.parametrize("metadata", [{"since": time}, {"since": 5}, {5: "since"}])
def test_metadata_that_is_not_text_is_refused_before_it_is_stored(metadata: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="metadata"):
        LeaderElection("jobs", metadata=metadata)


# Configuration.


@pytest.mark.parametrize("duration", [1e16, 1e300])
@pytest.mark.parametrize("kind", [Lock, ReadWriteLock, TaskLock, LeaderElection])
def test_a_lease_that_is_longer_than_a_store_can_count_is_refused(kind: Callable[..., Any], duration: float) -> None:
    with pytest.raises(ValueError, match="lease_duration"):
        kind("cart", lease_duration=duration)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False)])
def test_a_switch_may_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("GREL_TASKLOCK_KEEP_ALIVE", text)
    assert TaskLock("digest", env_load=True).config.keep_alive is value


def test_a_read_write_lock_that_is_reconfigured_keeps_its_worker_on_both_sides() -> None:
    lock = ReadWriteLock("book", worker="me")
    lock.reconfigure(ReadWriteLockConfig(lease_duration=5))
    configs = [lock.config, lock.read.config, lock.write.config]
    assert [(config.worker, config.lease_duration) for config in configs] == [("me", 5)] * 3


async def test_a_lease_that_grows_while_its_caller_waits_is_renewed_as_it_was_granted() -> None:
    async with Place() as place:
        lock = Lock("cart", backend=place.lock(), lease_duration=1)
        first = await asyncio.create_task(Lock("cart", backend=place.lock()).acquire())

        async def hold() -> None:
            async with lock.hold():
                await passing(5)

        holding = asyncio.create_task(hold())
        await eventually(lambda: place.lines.waiting(Key(LOCK, "cart")) == 1)
        lock.reconfigure(LockConfig(lease_duration=60))
        await first.release()
        await holding


async def test_a_lease_that_grows_while_it_is_renewed_is_renewed_as_it_was_granted() -> None:
    async with Late(Place()) as late:
        lock = Lock("cart", backend=late.lock(), lease_duration=1)
        async with lock.hold() as handle:
            late.withholds = Renew
            await late.withheld.wait()
            lock.reconfigure(LockConfig(lease_duration=60))
            late.go.set()
            await passing(5)
            handle.ensure()


# Stores that do not answer.


async def test_a_store_that_gives_no_answer_has_failed_and_is_not_held_elsewhere() -> None:
    async with Place() as place:
        place.hangs = True
        with pytest.raises(LockAcquireError):
            await Lock("cart", backend=place.lock()).acquire(timeout=2)
        place.hangs = False


async def test_a_store_that_answers_again_is_known_to_without_anybody_asking_for_a_lock() -> None:
    async with Place() as place:
        place.error = ConnectionError("down")
        with pytest.raises(LockAcquireError):
            await Lock("cart", backend=place.lock()).acquire(timeout=0.5)
        assert place.failing_since is not None
        place.error = None
        await eventually(lambda: place.failing_since is None)


# Holding.


async def test_a_writer_that_became_a_reader_is_kept_alive_and_given_back() -> None:
    async with Place() as place:
        lock = ReadWriteLock("book", backend=place.readwritelock(), lease_duration=1)
        async with lock.write.hold() as writer:
            reader = await writer.downgrade()
            await passing(5)
            reader.ensure()
            assert (await lock.state()).readers == 1
        assert (await lock.state()).readers == 0


async def test_a_hold_refuses_a_second_body_and_goes_on_with_the_first() -> None:
    async with Place() as place:
        lock = ReadWriteLock("book", backend=place.readwritelock())
        hold = lock.read.hold()

        async def enter() -> None:
            async with hold:
                pytest.fail("two bodies in one hold")

        async with hold as handle:
            with pytest.raises((RuntimeError, GrelmicroError), match=r"hold\(\)"):
                await asyncio.create_task(enter())
            handle.ensure()
            assert (await lock.state()).readers == 1
        with pytest.raises((RuntimeError, GrelmicroError), match=r"hold\(\)"):
            await enter()  # whose loss nobody would hear of
        assert (await lock.state()).readers == 0


async def test_no_more_readers_wait_than_the_caller_allows() -> None:
    async with Place() as place:
        lock = ReadWriteLock("book", backend=place.readwritelock())
        async with lock.write:
            readers = (asyncio.create_task(lock.read.acquire(timeout=0.3, max_waiters=2)) for _ in range(6))
            outcomes = [type(outcome) for outcome in await asyncio.gather(*readers, return_exceptions=True)]
        assert (outcomes.count(LockTimeoutError), outcomes.count(LockQueueFullError)) == (2, 4)


async def test_a_request_may_enter_a_lock_in_one_thread_and_leave_it_in_another() -> None:
    async with Grelmicro(uses=[Place()]) as micro:
        lock = Lock("cart")
        with bound(micro, request=True):
            context = contextvars.copy_context()
        held = lock.from_thread
        await in_thread(lambda: context.run(held.__enter__))
        assert await lock.locked()
        await in_thread(lambda: context.run(held.__exit__, None, None, None))
        assert not await lock.locked()
