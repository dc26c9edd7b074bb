"""Background work that crashes comes back, and shows; health answers from memory."""

import asyncio
import itertools

import pytest

from grel_core import Grelmicro
from grel_core.coordination import Coordination, LeaderElection, Lock, LockAcquireError
from grel_core.health import alive, report
from tests.harness import eventually
from tests.unit.fakes import Other, Place
from tests.unit.test_drain import passing

pytestmark = pytest.mark.anyio


class Work:
    """A background task that crashes the first few times; every error in its own way."""

    name = "work"

    def __init__(self, crashes: int, error: BaseException | None = None) -> None:
        self.crashes = crashes
        self.error = error or ValueError("password=hunter2")
        self.began: list[float] = []

    async def run(self) -> None:
        self.began.append(asyncio.get_running_loop().time())
        if len(self.began) <= self.crashes:
            raise self.error
        await asyncio.Event().wait()


async def test_a_crashed_task_starts_again_with_back_off() -> None:
    work = Work(5)
    async with Grelmicro(uses=[Place(), work]):
        await eventually(lambda: len(work.began) == 6, within=120)
    pauses = [later - earlier for earlier, later in itertools.pairwise(work.began)]
    assert pauses == pytest.approx([0.1, 0.4, 1.6, 6.4, 15.0])


async def test_a_task_that_dies_of_a_stray_cancellation_starts_again() -> None:
    work = Work(1, asyncio.CancelledError())
    async with Grelmicro(uses=[Place(), work]) as micro:
        await eventually(lambda: len(work.began) == 2)
        assert micro.supervised[0].crashes == 1


async def test_a_task_that_ends_by_itself_is_not_started_again() -> None:
    class Once(Work):
        async def run(self) -> None:
            self.began.append(0)

    work = Once(0)
    async with Grelmicro(uses=[Place(), work]) as micro:
        await passing(60)
        assert work.began == [0]
        assert report(micro).status == "ok"


async def test_one_crash_leaves_everything_else_running() -> None:
    work, election = Work(1000), LeaderElection("jobs")
    async with Grelmicro(uses=[Place(), work, election]):
        await election.wait_for_leader()
        await passing(120)
        assert election.is_leader()
        async with Lock("cart"):
            pass


async def test_a_crash_degrades_health_and_is_forgotten_after_a_minute() -> None:
    async with Grelmicro(uses=[Place(), Work(1)]) as micro:
        await passing(1)
        seen = report(micro)
        assert (seen.status, seen.ready) == ("degraded", True)
        assert seen.checks["task:work"].detail == "crashed 1 times in a minute"
        await passing(61)
        assert report(micro).status == "ok"


async def test_more_than_three_crashes_in_a_minute_make_the_app_not_ready() -> None:
    async with Grelmicro(uses=[Place(), Work(1000)]) as micro:
        await eventually(lambda: micro.supervised[0].crashes == 3)
        assert report(micro).ready
        await eventually(lambda: micro.supervised[0].crashes == 4, within=10)
        seen = report(micro)
        assert (seen.status, seen.ready) == ("error", False)
        assert seen.checks["task:work"].critical


async def test_of_two_tasks_of_one_name_the_worse_one_shows() -> None:
    for works in ([Work(1000), Work(1)], [Work(1), Work(1000)]):
        async with Grelmicro(uses=[Place(), *works]) as micro:
            await passing(10)
            assert not report(micro).ready


async def test_health_says_no_more_than_fixed_words_and_numbers() -> None:
    async with Grelmicro(uses=[Place(), Work(2)]) as micro:
        await passing(1)
        assert "hunter2" not in repr(report(micro))


async def test_a_follower_is_ready_and_an_election_that_does_not_run_only_degrades() -> None:
    place = Place()
    election = LeaderElection("jobs")
    async with place:
        await place.leaderelection().acquire_or_renew(name="jobs", token="other.1", duration=60)
        async with Grelmicro(uses=[place, election]) as micro:
            await election.wait_for_record()
            seen = report(micro)
            assert (seen.status, seen.ready) == ("ok", True)
            assert seen.checks["election:jobs"].detail == "following"
            await place.leaderelection().release(name="jobs", token="other.1")
            await election.wait_for_leader()
            assert report(micro).checks["election:jobs"].detail == "leading"
            micro.supervised[0].task.cancel()
            await passing(1)
            seen = report(micro)
            assert (seen.status, seen.ready) == ("degraded", True)
            assert seen.checks["election:jobs"].status == "error"


async def test_an_app_that_is_not_open_or_closing_is_not_ready() -> None:
    micro = Grelmicro(uses=[Place()])
    assert not report(micro).ready
    async with micro:
        assert report(micro).ready
        micro.begin_shutdown()
        assert report(micro).draining
        assert not report(micro).ready


async def test_a_store_that_fails_shows_until_it_answers_and_is_no_reason_to_restart() -> None:
    good, bad = Other(), Place()
    lock = Lock("cart", lease_duration=5)
    async with Grelmicro(uses=[Coordination(good, lock=bad)]) as micro:
        bad.error = ConnectionError("redis://:hunter2@there")
        with pytest.raises(LockAcquireError) as caught:
            await lock.acquire(timeout=1)
        assert "hunter2" not in str(caught.value)
        seen = report(micro)
        assert (seen.status, seen.ready) == ("degraded", True)
        assert seen.checks["coordination:Place"].detail == "unreachable"
        assert seen.checks["coordination:Other"].status == "ok"
        assert "hunter2" not in repr(seen)
        assert alive(micro)
        bad.error = None
        async with lock:
            assert report(micro).status == "ok"


async def test_of_two_stores_of_one_kind_the_failing_one_shows() -> None:
    for first_fails in (True, False):
        one, two = Place("one"), Place("two")
        async with Grelmicro(uses=[Coordination(one, lock=two)]) as micro:
            (one if first_fails else two).failing_since = 0.0
            assert report(micro).checks["coordination:Place"].status == "error"


async def test_an_election_that_cannot_reach_its_store_shows_it_too() -> None:
    place, election = Place(), LeaderElection("jobs")
    async with Grelmicro(uses=[place, election]) as micro:
        await election.wait_for_leader()
        place.error = ConnectionError()
        await eventually(lambda: report(micro).status == "degraded", within=10)
        await eventually(lambda: not election.is_leader(), within=20)
        place.error = None
        await election.wait_for_leader()
        assert report(micro).status == "ok"


async def test_an_old_failure_does_not_shorten_the_patience_of_a_newcomer() -> None:
    place, lock = Place(), Lock("cart", lease_duration=60)
    async with Grelmicro(uses=[place]):
        place.error = ConnectionError()
        with pytest.raises(LockAcquireError):
            await lock.acquire_nowait()
        with pytest.raises(LockAcquireError):
            await lock.acquire(timeout=0.01)
        await passing(600)
        waiting = asyncio.create_task(lock.acquire())
        await passing(30)
        place.error = None
        await (await waiting).release()


async def test_those_who_stood_in_line_give_up_together_when_the_store_stays_away() -> None:
    place, lock = Place(), Lock("cart", lease_duration=10)
    loop = asyncio.get_running_loop()
    async with Grelmicro(uses=[place]):
        place.error = ConnectionError()
        waiting = [asyncio.create_task(lock.acquire()) for _ in range(5)]
        await asyncio.wait(waiting)
        assert all(isinstance(task.exception(), LockAcquireError) for task in waiting)
        assert loop.time() < 15


async def test_a_stuck_election_loop_is_a_reason_to_restart() -> None:
    class Stuck(Place):
        async def listen(self) -> bool:
            while True:  # deaf to its time-out, as a blocked client would be
                try:
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    if over:
                        raise

    over: list[bool] = []
    election = LeaderElection("jobs")
    async with Grelmicro(uses=[Stuck(), election], drain_timeout=1) as micro:
        await passing(30)
        assert alive(micro)
        await passing(15 + 20 + 5)
        assert not alive(micro)
        over.append(True)
    assert alive(Grelmicro(uses=[election]))


# Loops of the leader.


async def test_a_leader_loop_runs_at_its_pace_on_the_leader_only_and_survives_errors() -> None:
    place = Place()
    one, two = (Grelmicro(uses=[place]) for _ in range(2))
    ran: list[tuple[str, float]] = []
    loop = asyncio.get_running_loop()

    @one.leader_loop("jobs", every=10)
    async def first() -> None:
        ran.append(("first", loop.time()))
        raise ValueError

    @two.leader_loop("jobs", every=10)
    async def second() -> None:
        ran.append(("second", loop.time()))

    async with two, one:
        await passing(35)
        assert {name for name, _ in ran} == {"second"}
        assert [later - earlier for (_, earlier), (_, later) in itertools.pairwise(ran)] == [10] * 3
        await two.election("jobs").step_down(stay_out=1000)
        ran.clear()
        await passing(35)
        assert {name for name, _ in ran} == {"first"}
        assert len(ran) >= 3
        assert report(one).status == "ok"
    assert first.__name__ == "first"


async def test_a_leader_loop_added_to_an_open_app_runs_at_once() -> None:
    ran = asyncio.Event()
    async with Grelmicro(uses=[Place()]) as micro:

        @micro.leader_loop(every=1)
        async def work() -> None:
            ran.set()

        async with asyncio.timeout(5):
            await ran.wait()
        assert micro.elections.keys() == {"default"}
    assert work.__name__ == "work"


async def test_a_leader_loop_takes_only_what_can_be_stopped() -> None:
    with pytest.raises(TypeError, match="no async function"):
        Grelmicro().leader_loop(every=1)(print)  # type: ignore[type-var]  # that is the point


@pytest.mark.parametrize("wrong", [0, -1, float("inf")])
async def test_an_impossible_pace_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="every is"):
        Grelmicro().leader_loop(every=wrong)
