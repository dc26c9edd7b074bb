"""Elections under slow answers, stalls and wrong use: two never lead at once, and nobody waits for ever."""

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest

from grel_core import Grelmicro, NotStartedError
from grel_core.coordination import (
    Coordination,
    CoordinationBackendError,
    LeaderElection,
    NotLeaderError,
    WouldBlock,
    WouldBlockError,
)
from grel_core.lease.backend import T
from grel_core.lease.names import Key
from grel_core.lease.queue import Watch
from grel_core.lease.rules import Rule
from grel_core.providers.base import Provider
from tests.harness import eventually
from tests.unit.fakes import Place
from tests.unit.test_drain import passing
from tests.virtual_loop import VirtualLoop

pytestmark = pytest.mark.anyio


class Way(Provider):
    """One worker's way to a place: answers may be late, and it may be cut."""

    lazy = True

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.late = 0.0
        self.whole = asyncio.Event()
        self.whole.set()

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        async with asyncio.timeout(self.backend_timeout):
            await self.whole.wait()
            answer = await self.place.apply(key, rule)
            await passing(self.late)
            await self.whole.wait()
            return answer

    async def listen(self) -> bool:
        return await self.place.listen()

    def watch(self, key: Key, pace: float = 0) -> Watch:
        return self.place.watch(key)


class Watched:
    """Two workers, each with a way of its own, and a look at who leads and works every tenth of a second."""

    def __init__(self, place: Place, timing: dict[str, float], late: float) -> None:
        self.ways = [Way(place), Way(place)]
        self.elections = [LeaderElection("jobs", backend=way.leaderelection(), **timing) for way in self.ways]  # type: ignore[arg-type]  # mypy cannot tell the keywords apart
        self.working: list[LeaderElection] = []
        self.led: set[LeaderElection] = set()
        self.tasks = [asyncio.create_task(election.run()) for election in self.elections]
        self.tasks += [asyncio.create_task(each.lead(self.work, each, repeat=True)) for each in self.elections]
        for way in self.ways:
            way.late = late

    async def work(self, election: LeaderElection) -> None:
        self.working.append(election)
        self.led.add(election)
        try:
            await asyncio.Event().wait()
        finally:
            self.working.remove(election)

    async def look(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            await passing(0.1)
            assert len(self.working) <= 1
            assert sum(election.is_leader() for election in self.elections) <= 1

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)


@pytest.mark.parametrize("late", [0.0, 0.5, 0.9, 2.4])
@pytest.mark.parametrize(
    "timing",
    [
        {},
        {"renew_deadline": 14.9, "backend_timeout": 14},
        {"lease_duration": 6, "renew_deadline": 5.9, "retry_interval": 1, "backend_timeout": 5.8},
    ],
)
async def test_with_late_answers_and_partitions_two_never_lead_and_no_work_overlaps(
    late: float, timing: dict[str, float]
) -> None:
    place = Place()
    async with place:
        two = Watched(place, timing, late)
        await two.look(20)
        for way in two.ways * 3:
            way.whole.clear()
            await two.look(25)
            way.whole.set()
            await two.look(12)
        await two.end()
    assert two.led == set(two.elections)


async def test_a_leader_that_was_stalled_past_its_deadline_does_not_believe_for_a_moment() -> None:
    election = LeaderElection("jobs")
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    async with Grelmicro(uses=[Place(), election]):
        await election.wait_for_leader()
        assert election.is_leader_confirmed_within(1)
        loop.virtual.now += 11  # a sync job, a SIGSTOP: nothing of ours ran meanwhile
        assert not election.is_leader()
        assert election.fencing_token is None
        assert election.last_confirmation_age() is None
        assert not election.is_leader_confirmed_within(1000)
        with pytest.raises(WouldBlockError):
            await election.guard().__aenter__()
        await election.wait_for_leader()


async def test_the_age_of_a_confirmation_counts_from_the_request_and_not_from_the_answer() -> None:
    place, loop = Place(), asyncio.get_running_loop()
    way = Way(place)
    way.late = 2
    election = LeaderElection("jobs", backend=way.leaderelection())
    async with place:
        task = asyncio.create_task(election.run())
        await election.wait_for_leader()
        assert 2 <= loop.time() < 5
        assert election.last_confirmation_age() == pytest.approx(loop.time(), abs=0.01)
        for _ in range(300):
            await passing(0.1)
            age = election.last_confirmation_age()
            assert age is not None
            assert age >= 2  # also right after a renewal
        task.cancel()
        await asyncio.wait([task])


async def test_an_election_that_runs_already_is_refused_and_goes_on() -> None:
    election = LeaderElection("jobs")
    async with Grelmicro(uses=[Place(), election]):
        await election.wait_for_leader()
        with pytest.raises(RuntimeError, match="runs already"):
            await election.run()
        assert election.is_running()
        assert election.is_leader()


async def test_an_election_that_is_kept_nowhere_keeps_the_app_from_opening() -> None:
    place = Place()
    with pytest.raises(CoordinationBackendError, match="election="):
        async with Grelmicro(uses=[Coordination(lock=place), LeaderElection("jobs")]):
            pytest.fail("it opened")
    assert place.log == ["open here", "close here"]


async def test_whoever_waits_is_told_when_the_election_stops() -> None:
    place = Place()
    async with place:
        await place.leaderelection().acquire_or_renew(name="jobs", token="other.1", duration=600)
        election = LeaderElection("jobs", backend=place.leaderelection())
        task = asyncio.create_task(election.run())
        waiting = [asyncio.create_task(election.wait_for_leader()), asyncio.create_task(election.lead(passing, 1))]
        await passing(1)
        task.cancel()
        await asyncio.wait(waiting)
        assert [type(each.exception()) for each in waiting] == [NotStartedError] * 2


async def test_a_guard_may_stand_in_a_led_body_and_serve_many_tasks_at_once() -> None:
    election = LeaderElection("jobs")
    async with Grelmicro(uses=[Place(), election]):
        guard, both = election.guard(), asyncio.Barrier(2)

        async def tick(seconds: float) -> None:
            async with guard:
                await both.wait()
                await passing(seconds)

        async with election:
            await asyncio.gather(tick(1), tick(2))
            async with guard, election:
                pass
        async with guard, AsyncExitStack() as stack:
            await stack.enter_async_context(election)


async def test_the_loss_of_the_lead_ends_every_body_at_once() -> None:
    election, ended = LeaderElection("jobs"), list[str]()
    inside = asyncio.Barrier(4)

    async def plain() -> None:
        async with election:
            await hold("plain")

    async def guarded() -> None:
        async with election.guard():
            await hold("guarded")

    async def hold(name: str) -> None:
        try:
            await inside.wait()
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async with Grelmicro(uses=[Place(), election]):
        await election.wait_for_leader()
        tasks = [asyncio.create_task(each) for each in (plain(), guarded(), election.lead(hold, "led"))]
        await inside.wait()
        lost = asyncio.create_task(election.wait_lose_leader())
        assert await election.step_down()
        assert sorted(ended) == ["guarded", "led", "plain"]
        await asyncio.wait([*tasks, lost])
        assert [type(task.exception()) for task in tasks[:2]] == [NotLeaderError] * 2
        assert tasks[2].result() is None
        await election.wait_for_leader()  # after one retry interval it takes part again


async def test_lead_repeats_within_a_term_and_over_terms_until_its_caller_is_cancelled() -> None:
    election, ran = LeaderElection("jobs"), list[int | None]()

    async def work() -> None:
        ran.append(election.fencing_token)
        await passing(1)

    async with Grelmicro(uses=[Place(), election]):
        leading = asyncio.create_task(election.lead(work, repeat=True))
        await passing(3.5)
        assert len(ran) == 4
        await election.step_down()
        await passing(10)
        assert len(set(ran)) == 2
        leading.cancel()
        await asyncio.wait([leading])
        assert leading.cancelled()


async def test_a_body_that_is_cancelled_from_elsewhere_does_not_count_as_a_lost_lead() -> None:
    election = LeaderElection("jobs")

    async def dies() -> None:
        raise asyncio.CancelledError

    async with Grelmicro(uses=[Place(), election]):
        for repeat in (True, False):
            leading = asyncio.create_task(election.lead(dies, repeat=repeat))
            await asyncio.wait([leading], timeout=5)
            assert leading.cancelled()


@pytest.mark.parametrize(("error_interval", "lines"), [(30.0, 4), (0.1, 59)])
async def test_errors_are_logged_at_most_once_per_error_interval(
    error_interval: float, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place()
    election = LeaderElection("jobs", error_interval=error_interval, retry_jitter=0)
    async with Grelmicro(uses=[place, election]):
        await election.wait_for_leader()
        place.error = ConnectionError("redis://:hunter2@there")
        await passing(119)
        assert len(caplog.records) == pytest.approx(lines, abs=1)
        assert "ConnectionError" in caplog.text
        assert "hunter2" not in caplog.text
        place.error = None
        await passing(60)
        caplog.clear()
        place.error = ConnectionError()
        await passing(5)
        assert caplog.records  # a new outage is said at once
        place.error = None
    assert logging.getLogger("grel").level <= logging.WARNING


def test_both_spellings_of_would_block_are_one() -> None:
    assert WouldBlock is WouldBlockError


async def test_followers_refresh_the_record_at_least_every_half_lease() -> None:
    place = Place()
    first, second = (LeaderElection("jobs", worker=name) for name in ("first", "second"))
    async with place, Grelmicro(uses=[place, first]), Grelmicro(uses=[place, second]):
        await first.wait_for_leader()
        await second.wait_for_record()
        for _ in range(100):
            await passing(1)
            age = second.record_age()
            assert age is not None
            assert age <= 7.6
            assert second.record is not None
            assert second.record.holder == "first"
        await eventually(lambda: first.record is not None and first.record.transitions == 0)
