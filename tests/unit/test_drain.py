"""Closing an app: new work is refused, work under way may end, and nothing takes longer than it was given."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from grel_core import Grelmicro, ShuttingDownError
from grel_core.component import bound
from grel_core.coordination import LeaderElection, Lock
from grel_core.errors import NotStartedError
from grel_core.lease.names import LOCK, Key
from tests.harness import eventually
from tests.unit.fakes import Place

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def timed(micro: Grelmicro) -> AsyncIterator[list[float]]:
    """An open app; the list gets the seconds that its closing took."""
    loop, took = asyncio.get_running_loop(), list[float]()
    await micro.__aenter__()
    try:
        yield took
    finally:
        began = loop.time()
        await micro.__aexit__()
        took.append(loop.time() - began)


async def passing(seconds: float) -> None:
    """Let time pass."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


async def stubborn(entered: asyncio.Event, end: asyncio.Event) -> None:
    """Go on until `end`, whoever cancels."""
    entered.set()
    while not end.is_set():
        try:
            await end.wait()
        except asyncio.CancelledError:
            continue


class Holder:
    """Holds `cart` for so many seconds in a task of its own."""

    def __init__(self, seconds: float) -> None:
        self.entered = asyncio.Event()
        self.ended = ""
        self.task = asyncio.create_task(self.hold(seconds))

    async def hold(self, seconds: float) -> None:
        async with Lock("cart"):
            self.entered.set()
            try:
                await passing(seconds)
                self.ended = "by itself"
            except asyncio.CancelledError:
                self.ended = "cancelled"
                raise


@pytest.mark.parametrize(("seconds", "ended"), [(2.0, "by itself"), (60.0, "cancelled")])
async def test_a_holder_has_most_of_the_drain_timeout_and_is_cancelled_then(seconds: float, ended: str) -> None:
    place = Place()
    async with timed(Grelmicro(uses=[place], drain_timeout=3)) as took:
        holder = Holder(seconds)
        await holder.entered.wait()
    assert holder.ended == ended
    assert took[0] == pytest.approx(2.0 if ended == "by itself" else 2.4, abs=0.01)
    assert place._records[Key(LOCK, "cart")].holder is None


async def test_nothing_to_wait_for_takes_no_time() -> None:
    async with timed(Grelmicro(uses=[Place(), LeaderElection("jobs")])) as took, Lock("cart"):
        pass
    assert took[0] < 0.01


async def test_the_lock_of_the_closing_task_itself_is_not_waited_for() -> None:
    lock = Lock("cart")
    async with timed(Grelmicro(uses=[Place()])) as took:
        await lock.acquire()
    assert took[0] < 0.01


async def test_a_request_that_comes_during_the_drain_is_refused_and_other_work_is_not() -> None:
    micro = Grelmicro(uses=[Place()])
    async with micro:
        lock = Lock("cart")
        with bound(micro, request=True):
            async with lock:
                micro.begin_shutdown()
                await lock.extend()  # who is inside may finish
            with pytest.raises(ShuttingDownError, match="another replica"):
                await lock.acquire()
            with pytest.raises(ShuttingDownError):
                await lock.acquire_nowait()
        async with lock:
            pass


async def test_requests_that_wait_when_the_drain_begins_are_refused_at_once() -> None:
    place = Place()
    micro = Grelmicro(uses=[place])
    loop = asyncio.get_running_loop()
    async with micro:
        async with Lock("cart"):
            with bound(micro, request=True):
                waiting = [asyncio.create_task(Lock("cart").acquire(timeout=30)) for _ in range(3)]
            await eventually(lambda: place.lines.waiting(Key(LOCK, "cart")) == 3)
            began = loop.time()
            micro.begin_shutdown()
            await asyncio.wait(waiting)
            assert [type(task.exception()) for task in waiting] == [ShuttingDownError] * 3
            assert loop.time() - began < 0.1
        await eventually(lambda: not place._records[Key(LOCK, "cart")].waiters)


async def test_a_request_behind_a_waiter_that_is_none_is_refused_at_once_too() -> None:
    place = Place()
    micro = Grelmicro(uses=[place])
    async with micro:
        async with Lock("cart"):
            first = asyncio.create_task(Lock("cart").acquire())
            await eventually(lambda: place.lines.waiting(Key(LOCK, "cart")) == 1)
            with bound(micro, request=True):
                request = asyncio.create_task(Lock("cart").acquire(timeout=30))
            await eventually(lambda: place.lines.waiting(Key(LOCK, "cart")) == 2)
            micro.begin_shutdown()
            with pytest.raises(ShuttingDownError):
                async with asyncio.timeout(5):
                    await request
        await (await first).release()


async def test_work_whose_lease_ran_out_is_not_waited_for_any_more() -> None:
    async with timed(Grelmicro(uses=[Place()], drain_timeout=3)) as took:
        task = asyncio.create_task(lapsing())
        await passing(6)
    assert took[0] < 0.01
    task.cancel()
    await asyncio.wait([task])


async def lapsing() -> None:
    await Lock("cart", lease_duration=5).acquire()
    await passing(60)


async def test_a_thread_keeps_its_lease_when_the_app_closes_without_it(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    entered, end = threading.Event(), threading.Event()
    seen: list[object] = []

    def work() -> None:
        try:
            with Lock("cart", lease_duration=60).from_thread.hold() as handle:
                seen.append(handle)
                entered.set()
                end.wait()
                seen.append(handle.lost.is_set())
        except NotStartedError as error:
            seen.append(error)

    async with timed(Grelmicro(uses=[place], drain_timeout=1)) as took:
        thread = asyncio.create_task(asyncio.to_thread(work))
        await eventually(entered.is_set)
    assert took[0] <= 1.0
    assert place._records[Key(LOCK, "cart")].holder is not None
    await passing(25)  # past the time of a renewal
    assert caplog.text.count("its backend is closed; the lease is left to run out") == 1
    end.set()
    await thread
    assert seen[1] is False
    assert "is not open" in str(seen[2])


async def test_a_holder_that_ignores_its_cancellation_keeps_its_lease() -> None:
    place = Place()
    entered, end = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        await Lock("cart").acquire()
        await stubborn(entered, end)

    async with timed(Grelmicro(uses=[place], drain_timeout=1)) as took:
        task = asyncio.create_task(hold())
        await entered.wait()
    assert took[0] <= 1.0
    assert place._records[Key(LOCK, "cart")].holder is not None
    end.set()
    await task


@pytest.mark.parametrize("drain_timeout", [0.5, 3.0, 10.0])
async def test_closing_never_takes_longer_than_the_drain_timeout_whatever_will_not_end(drain_timeout: float) -> None:
    place, end = Place(), asyncio.Event()
    entered = [asyncio.Event() for _ in range(3)]

    class Work:
        name = "stubborn work"

        async def run(self) -> None:
            await stubborn(entered[0], end)

    async def hold() -> None:
        await Lock("cart").acquire()
        await stubborn(entered[1], end)

    election = LeaderElection("jobs", lease_duration=600, renew_deadline=500)
    async with timed(Grelmicro(uses=[place, Work(), election], drain_timeout=drain_timeout)) as took:
        tasks = [asyncio.create_task(hold()), asyncio.create_task(election.lead(stubborn, entered[2], end))]
        for event in entered:
            await event.wait()
    assert took[0] <= drain_timeout
    assert place._records[election._campaign._key].holder is not None  # its body goes on: the lease is left
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("grel: resign")]
    end.set()
    await asyncio.wait(tasks)


async def test_a_leader_body_ends_its_cleaning_up_before_the_lead_is_given_back() -> None:
    place, cleaned = Place(), []
    election = LeaderElection("jobs")
    at_work = asyncio.Event()

    async def body() -> str:
        try:
            at_work.set()
            await asyncio.Event().wait()
            return "the end"
        finally:
            await passing(1)
            record = await place.leaderelection().get(name="jobs")
            cleaned.append(record is not None)

    async with timed(Grelmicro(uses=[place, election], drain_timeout=3)) as took:
        leading = asyncio.create_task(election.lead(body))
        await at_work.wait()
    assert cleaned == [True]
    assert 1.0 <= took[0] < 1.2
    assert place._records[election._campaign._key].holder is None
    assert await leading is None


async def test_begin_shutdown_gives_leads_away_for_good_long_before_the_close() -> None:
    place, election = Place(), LeaderElection("jobs")
    micro = Grelmicro(uses=[place, election])
    micro.begin_shutdown()  # of an app that is not open: nothing
    async with micro:
        await election.wait_for_leader()
        micro.begin_shutdown()
        micro.begin_shutdown()
        await eventually(lambda: not election.is_leader())
        await eventually(lambda: place._records[election._campaign._key].holder is None)
        await passing(120)
        assert not election.is_leader()
        assert election.is_running()
        assert micro.started
        assert micro.draining
    async with micro:
        assert micro.describe()["draining"] is False


async def test_a_task_added_during_the_drain_is_not_started() -> None:
    micro = Grelmicro(uses=[Place()])
    async with micro:
        micro.begin_shutdown()
        election = micro.election("late")
        await passing(1)
        assert not election.is_running()


async def test_background_tasks_are_cancelled_and_awaited() -> None:
    ended = []

    class Work:
        name = "work"

        async def run(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await passing(0.2)
                ended.append(True)

    async with timed(Grelmicro(uses=[Place(), Work()], drain_timeout=1)) as took:
        await passing(1)
    assert ended
    assert took[0] == pytest.approx(0.2, abs=0.01)


async def test_a_store_that_hangs_costs_its_time_out_and_no_more() -> None:
    place, election = Place(), LeaderElection("jobs", backend_timeout=2)
    async with timed(Grelmicro(uses=[place, election], drain_timeout=1)) as took:
        await election.wait_for_leader()
        place.hangs = True
    assert took[0] <= 1 + place.backend_timeout
    await eventually(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("grel")])
