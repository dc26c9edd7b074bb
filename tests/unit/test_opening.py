"""Opening and closing an app and its backends: order, sharing, failure, cancellation, one event loop after another."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from grel_core import Grelmicro, NotStartedError
from grel_core.coordination import Coordination, CoordinationBackendError, LeaderElection, Lock, MemoryLockAdapter
from grel_core.lease.adapters import Adapter
from grel_core.providers.memory import MemoryProvider
from tests.harness import eventually
from tests.unit.fakes import Other, Place, StrangeLocks
from tests.virtual_loop import VirtualLoop

pytestmark = pytest.mark.anyio


async def test_equal_providers_are_one_and_opened_once_wherever_they_stand() -> None:
    log: list[str] = []
    made = [Place("here", log) for _ in range(5)]
    uses = [Coordination(made[0]), made[1], Coordination(made[2], lock=made[3], name="b"), made[4]]
    async with Grelmicro(uses=uses) as micro:
        assert log == ["open here"]
        assert len(micro.stores) == 1
        backends = [micro.coordination.lock_backend, micro.get("coordination", "b").lock_backend]
        assert all(isinstance(backend, Adapter) and backend.store is micro.stores[0] for backend in backends)
    assert log == ["open here", "close here"]


async def test_providers_of_different_places_are_opened_each() -> None:
    log: list[str] = []
    async with Grelmicro(uses=[Coordination(Place("a", log), lock=Place("b", log))]):
        assert sorted(log) == ["open a", "open b"]
    assert len(log) == 4


async def test_a_provider_may_be_listed_after_its_component() -> None:
    log: list[str] = []
    place = Place("here", log)
    async with Grelmicro(uses=[Coordination(place), Coordination(name="b"), place]), Lock("x"), Lock("y", backend="b"):
        assert log == ["open here"]
    assert log == ["open here", "close here"]


@pytest.mark.parametrize("kind", ["lock", "rwlock", "election", "schedule"])
async def test_a_provider_that_only_one_kind_uses_is_opened(kind: str) -> None:
    place = Place()
    async with Grelmicro(uses=[Coordination(**{kind: place})]) as micro:  # type: ignore[arg-type]  # a provider fits all
        assert place.log == ["open here"]
        assert micro.stores == [place]
    assert place.log == ["open here", "close here"]


async def test_when_a_later_part_fails_to_open_the_earlier_ones_are_closed() -> None:
    log: list[str] = []
    bad = Place("bad", log, broken="open")
    micro = Grelmicro(uses=[Place("good", log), Other("fine", log), bad])
    with pytest.raises(ConnectionError, match="bad is down"):
        async with micro:
            pytest.fail("it opened")
    assert log == ["open good", "open fine", "close fine", "close good"]
    assert not micro.started
    with pytest.raises(NotStartedError):
        bad.loop  # noqa: B018 - the access is the test
    bad.broken = ""
    async with micro:
        assert micro.started


async def test_closing_goes_on_when_one_part_fails_to_close() -> None:
    log: list[str] = []
    micro = Grelmicro(uses=[Place("a", log), Other("b", log, broken="close"), Other("c", log)])
    with pytest.raises(ConnectionError, match="b went away"):
        async with micro:
            pass
    assert log[3:] == ["close c", "close b", "close a"]
    assert not micro.started
    async with Grelmicro(uses=[Place("a", log)]):
        pass


async def test_the_error_of_the_body_passes_through_the_closing() -> None:
    place = Place()
    with pytest.raises(KeyError):
        async with Grelmicro(uses=[place]):
            raise KeyError
    assert place.log == ["open here", "close here"]


async def test_what_is_entered_twice_is_opened_once_and_closed_with_the_last() -> None:
    place = Place()
    for thing in (Grelmicro(uses=[place]), Coordination(place), place):
        place.log.clear()
        async with thing:
            async with thing:
                pass
            assert place.log == ["open here"]
        assert place.log == ["open here", "close here"]


async def test_one_component_in_two_apps_is_closed_with_the_last_one() -> None:
    place = Place()
    shared = Coordination(place)
    one, two = Grelmicro(uses=[shared]), Grelmicro(uses=[shared])
    await one.__aenter__()
    await two.__aenter__()
    await one.__aexit__()
    async with shared.lock("cart"):
        assert place.log == ["open here"]
    await two.__aexit__()
    assert place.log == ["open here", "close here"]


async def test_a_stranger_that_fills_two_kinds_in_two_components_is_opened_once() -> None:
    class Both(StrangeLocks):
        async def acquire_or_renew(self) -> None: ...

        async def get(self) -> None: ...

    stranger = Both()
    uses = [
        Coordination(lock=stranger, election=stranger),  # type: ignore[arg-type]  # only its shape counts here
        Coordination(lock=stranger, name="b"),
    ]
    async with Grelmicro(uses=uses):
        assert stranger.opened == 1
        async with Lock("cart"):
            pass
    assert stranger.opened == 0


# Several at once.


async def test_two_that_open_at_once_open_it_once_and_both_wait_until_it_is_open() -> None:
    place, opened = Place(), list[bool]()

    async def use() -> None:
        async with micro:
            opened.append(micro.started)
            async with Lock("cart"):
                pass

    micro = Grelmicro(uses=[place])
    await asyncio.gather(use(), use(), use())
    assert opened == [True] * 3
    assert place.log == ["open here", "close here"]


class Shaky(Place):
    """Opens at the second try."""

    tries = 0

    async def _open(self) -> None:
        self.tries += 1
        self.broken = "open" if self.tries == 1 else ""
        await super()._open()


@pytest.mark.parametrize("kind", [Place, Shaky])
async def test_whoever_waits_for_an_opening_that_fails_tries_it_himself_and_nobody_hangs(kind: type[Place]) -> None:
    for app in (True, False):
        place = kind(broken="open")
        thing = Grelmicro(uses=[place]) if app else place
        async with asyncio.timeout(5):
            answers = await asyncio.gather(thing.__aenter__(), thing.__aenter__(), return_exceptions=True)
        expected = [ConnectionError, ConnectionError] if kind is Place else [ConnectionError, type(thing)]
        assert [type(answer) for answer in answers] == expected
        if kind is Shaky:
            await thing.__aexit__()
        with pytest.raises(NotStartedError):
            place.loop  # noqa: B018 - the access is the test


async def test_an_opener_that_is_cancelled_lets_the_next_one_open() -> None:
    place = Place()
    for thing in (place, Grelmicro(uses=[place])):
        first, second = asyncio.create_task(thing.__aenter__()), asyncio.create_task(thing.__aenter__())
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert first.cancelled()
        await thing.__aexit__()
        with pytest.raises(NotStartedError):
            place.loop  # noqa: B018 - the access is the test


async def test_a_waiter_for_the_opening_that_is_cancelled_is_not_counted_as_a_user() -> None:
    place = Place()
    for thing in (place, Grelmicro(uses=[place])):
        first, second = asyncio.create_task(thing.__aenter__()), asyncio.create_task(thing.__aenter__())
        await asyncio.sleep(0)
        second.cancel()
        await first
        await thing.__aexit__()
        assert place.log.pop() == "close here"


async def test_wherever_an_opening_is_cancelled_nothing_stays_open_and_no_task_runs_on() -> None:
    for steps in range(12):
        place = Place()
        micro = Grelmicro(uses=[place, LeaderElection("jobs")])
        opening = asyncio.create_task(micro.__aenter__())
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():
            await micro.__aexit__()
        assert not micro.started
        assert place.log.count("open here") == place.log.count("close here")
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("grel")]
        assert not micro.supervised


async def test_who_comes_while_it_closes_waits_and_opens_it_again() -> None:
    place = Place()
    micro = Grelmicro(uses=[place], drain_timeout=1)
    await micro.__aenter__()
    holder = asyncio.create_task(hold("cart"))
    await eventually(place_holds(place))
    closing = asyncio.create_task(micro.__aexit__())
    await eventually(lambda: micro.draining)
    async with micro:
        assert closing.done()
        assert micro.started
        assert not micro.draining
        assert place.log == ["open here", "close here", "open here"]
    await asyncio.wait([holder])


async def hold(name: str) -> None:
    async with Lock(name):
        await asyncio.Event().wait()


def place_holds(place: Place) -> Callable[[], bool]:
    return lambda: any(record.holder for record in place._records.values())


async def test_closing_that_is_cancelled_still_ends_the_tasks_and_closes() -> None:
    place, ended = Place(), []

    class Work:
        name = "work"

        async def run(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

    micro = Grelmicro(uses=[place, Work()])

    async def use() -> None:
        async with micro:
            asyncio.create_task(hold("cart"), name="holder")  # noqa: RUF006 - the app's drain waits for it
            await eventually(place_holds(place))

    task = asyncio.create_task(use())
    await eventually(lambda: micro.draining)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert ended
    assert place.log == ["open here", "close here"]
    assert not micro.started


# One event loop after another.


def run(main: Coroutine[object, object, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


def test_the_same_app_and_its_locks_work_on_one_loop_after_another() -> None:
    place, lock, election = Place(), Lock("cart"), LeaderElection("jobs")
    micro = Grelmicro(uses=[place, election])
    fences = []

    async def main() -> None:
        async with micro, lock as handle:
            fences.append(handle.fencing_token)
            await election.wait_for_leader()
            waiting = asyncio.create_task(lock.acquire(timeout=1))
            await asyncio.wait([waiting])
            assert waiting.exception()

    for _ in range(3):
        run(main())
    assert fences == sorted(set(fences))
    assert place.log == ["open here", "close here"] * 3


@pytest.mark.parametrize("make", [Place, MemoryProvider])
def test_an_app_that_was_never_closed_opens_again_on_the_next_loop(make: type[MemoryProvider]) -> None:
    micro = Grelmicro(uses=[make()])

    async def left_open() -> None:
        await micro.__aenter__()
        async with Lock("cart"):
            pass

    async def opened_again() -> None:
        async with micro, Lock("cart"):
            assert micro.started
        assert not micro.started

    run(left_open())
    run(opened_again())


def test_what_is_open_on_one_loop_says_so_on_another() -> None:
    place = Place()
    micro = Grelmicro(uses=[place])
    lock = Lock("cart", backend=place.lock())

    async def elsewhere() -> None:
        for attempt in (micro.__aenter__, place.__aenter__, lock.acquire, lock.locked, lock.owned):
            with pytest.raises(CoordinationBackendError, match="another event loop"):
                await attempt()

    async def main() -> None:
        async with micro:
            await asyncio.to_thread(run, elsewhere())
            async with lock:
                pass

    run(main())
    assert place.log == ["open here", "close here"]


async def test_leases_in_memory_outlast_their_app_until_they_run_out() -> None:
    memory = MemoryProvider()
    adapter = memory.lock()
    async with Grelmicro(uses=[memory]):
        assert await adapter.acquire(name="cart", token="w.1", duration=60)
    async with Grelmicro(uses=[memory]):
        assert await adapter.owned(name="cart", token="w.1")
        await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=61)
        assert not await adapter.locked(name="cart")


def test_leases_of_a_loop_whose_clock_is_gone_are_forgotten() -> None:
    adapter = MemoryLockAdapter()

    async def first() -> None:
        await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=1000)
        assert await adapter.acquire(name="cart", token="w.1", duration=60)

    async def second() -> None:
        assert not await adapter.locked(name="cart")

    run(first())
    run(second())


# What may be open where.


@pytest.mark.parametrize("environment", ["staging", "production"])
async def test_memory_is_refused_at_start_where_it_would_not_coordinate(environment: str) -> None:
    for uses in ([MemoryProvider()], [Coordination(lock=MemoryLockAdapter())], [Place(), Coordination(MemoryProvider)]):
        micro = Grelmicro(uses=uses, environment=environment)
        with pytest.raises(CoordinationBackendError, match=f"the environment is {environment}"):
            async with micro:
                pytest.fail("it opened")
    async with Grelmicro(uses=[MemoryProvider()], environment=environment, single_process=True):
        pass
    async with Grelmicro(uses=[Place()], environment=environment):
        pass


async def test_the_environment_comes_from_its_variable_and_an_argument_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Grelmicro().environment == "development"
    monkeypatch.setenv("GREL_ENVIRONMENT", "production")
    with pytest.raises(CoordinationBackendError, match="production"):
        async with Grelmicro(uses=[MemoryProvider()]):
            pytest.fail("it opened")
    async with Grelmicro(uses=[MemoryProvider()], environment="test"):
        pass
    monkeypatch.setenv("GREL_ENVIRONMENT", "prod")
    with pytest.raises(ValueError, match="GREL_ENVIRONMENT is 'prod'; use one of development, test, staging, prod"):
        Grelmicro()
    with pytest.raises(ValueError, match="environment is 'live'"):
        Grelmicro(environment="live")


@pytest.mark.parametrize(("workers", "warns"), [("3", True), ("1", False), ("", False), ("many", False)])
async def test_memory_with_several_workers_is_warned_of(
    workers: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", workers)
    async with Grelmicro(uses=[MemoryProvider()]):
        pass
    assert ("several workers" in caplog.text) is warns
    async with Grelmicro(uses=[Place()]):
        pass
    assert caplog.text.count("several workers") == warns


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan")])
async def test_an_impossible_drain_timeout_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="drain_timeout is"):
        Grelmicro(drain_timeout=wrong)
    with pytest.raises(TypeError, match="drain_timeout is a number"):
        Grelmicro(drain_timeout="3")  # type: ignore[arg-type]  # that is the point
