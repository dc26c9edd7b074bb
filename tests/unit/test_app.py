"""What an app is made of: providers, components, names, and which app is current."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Self

import pytest

from grel_core import Grelmicro, NotStartedError, OutOfContextError
from grel_core.component import announce, bound, withdraw
from grel_core.coordination import (
    Coordination,
    CoordinationBackendError,
    LeaderElection,
    Lock,
    MemoryLeaderElectionAdapter,
    MemoryLockAdapter,
)
from grel_core.errors import CoordinationError
from grel_core.lease.adapters import Adapter
from grel_core.lease.foreign import lease_backend
from grel_core.providers.memory import MemoryProvider
from grel_core.providers.sqlite import SQLiteProvider
from tests.harness import eventually
from tests.unit.fakes import Other, Place, StrangeElections, StrangeLocks

pytestmark = pytest.mark.anyio

KINDS = ("lock_backend", "rwlock_backend", "election_backend", "schedule_backend")


def store_of(coordination: Coordination, kind: str) -> object:
    backend = getattr(coordination, kind)
    assert isinstance(backend, Adapter)
    return backend.store


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lone_provider_fills_every_kind(kind: str) -> None:
    place = Place()
    async with Grelmicro(uses=[place]) as micro:
        assert store_of(micro.coordination, kind) is place


@pytest.mark.parametrize("kind", KINDS)
async def test_an_empty_coordination_takes_everything_from_the_lone_provider(kind: str) -> None:
    place = Place()
    async with Grelmicro(uses=[Coordination(), place]) as micro:
        assert store_of(micro.coordination, kind) is place


async def test_a_coordination_for_locks_takes_the_rest_from_a_lone_provider() -> None:
    locks, rest = Other(), Place()
    micro = Grelmicro(uses=[rest, Coordination(lock=locks)])
    assert [store_of(micro.coordination, kind) for kind in KINDS] == [locks, rest, rest, rest]


async def test_a_coordination_for_locks_alone_leaves_the_rest_unwired() -> None:
    micro = Grelmicro(uses=[Coordination(lock=Place())])
    assert isinstance(store_of(micro.coordination, "lock_backend"), Place)
    for kind, argument in zip(KINDS[1:], ("rwlock=", "election=", "schedule="), strict=True):
        with pytest.raises(CoordinationBackendError, match=argument):
            getattr(micro.coordination, kind)
    with pytest.raises(CoordinationBackendError, match="'default' has no leaderelection"):
        micro.coordination.leaderelection("jobs")


async def test_an_empty_coordination_without_a_provider_says_so_at_use_and_not_before() -> None:
    async with Grelmicro(uses=[Coordination()]) as micro:
        with pytest.raises(CoordinationBackendError, match="lock="):
            micro.coordination.lock("cart")


async def test_two_providers_fill_nothing_by_themselves() -> None:
    micro = Grelmicro(uses=[Place(), Other()])
    with pytest.raises(CoordinationBackendError, match="no coordination named 'default'"):
        micro.coordination  # noqa: B018 - the access is the test


async def test_a_component_that_has_nothing_to_do_with_it_takes_no_provider_away() -> None:
    async with Grelmicro(uses=[Place(), Unrelated()]) as micro:
        assert micro.get("cache") is not None
        async with Lock("cart"):
            pass


class Unrelated:
    kind = "cache"
    name = "default"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass


async def test_classes_without_arguments_are_made() -> None:
    micro = Grelmicro(uses=[MemoryProvider])
    assert isinstance(store_of(micro.coordination, "lock_backend"), MemoryProvider)
    mixed = Coordination(MemoryProvider, lock=Place, election=MemoryLeaderElectionAdapter)
    assert isinstance(store_of(mixed, "lock_backend"), Place)
    assert isinstance(store_of(mixed, "schedule_backend"), MemoryProvider)
    assert isinstance(mixed.election_backend, MemoryLeaderElectionAdapter)
    assert isinstance(Coordination(lock=StrangeLocks).lock_backend, StrangeLocks)


async def test_vendors_may_be_mixed_and_each_kind_is_kept_where_it_was_said() -> None:
    one, other = Place("one"), Other("other")
    async with Grelmicro(uses=[Coordination(one, election=other)]) as micro:
        async with micro.coordination.lock("x"):
            assert (len(one._records), len(other._records)) == (1, 0)
        await micro.coordination.election_backend.acquire_or_renew(name="x", token="w.1", duration=5)
        assert (len(one._records), len(other._records)) == (1, 1)


async def test_a_provider_that_lacks_a_kind_leaves_it_unwired() -> None:
    class Partial(Place):
        def schedule(self) -> None:  # type: ignore[override]  # that is how a provider says so
            return None

    coordination = Coordination(Partial())
    assert isinstance(store_of(coordination, "lock_backend"), Partial)
    with pytest.raises(CoordinationBackendError, match="schedule="):
        coordination.schedule_backend  # noqa: B018 - the access is the test


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("lock", MemoryLeaderElectionAdapter()),
        ("lock", StrangeElections()),
        ("election", StrangeLocks()),
        ("rwlock", StrangeLocks()),
        ("schedule", 5),
        ("lock", object),
    ],
)
async def test_a_backend_of_another_kind_is_refused_at_construction(argument: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=f"{argument}= takes a provider or a "):
        Coordination(**{argument: wrong})  # type: ignore[arg-type]  # that is the point


async def test_only_a_provider_is_taken_without_its_kind() -> None:
    with pytest.raises(TypeError, match="name its kind"):
        Coordination(MemoryLockAdapter())  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    "thing", [MemoryLockAdapter(), MemoryProvider().readwritelock(), MemoryProvider().schedule(), StrangeLocks(), 5]
)
async def test_a_bare_backend_in_uses_is_refused_and_never_ignored(thing: object) -> None:
    with pytest.raises(TypeError, match="Coordination"):
        Grelmicro(uses=[thing])


async def test_a_lock_is_no_part_of_an_app() -> None:
    with pytest.raises(TypeError, match="finds the current app"):
        Grelmicro(uses=[Lock("cart")])


async def test_a_backend_of_another_kind_is_refused_by_a_lock_at_construction() -> None:
    for wrong in (MemoryProvider(), StrangeElections(), 5):
        with pytest.raises(TypeError, match=r"is no LockBackend; .*provider\.lock\(\)"):
            Lock("cart", backend=wrong)  # type: ignore[arg-type]  # that is the point
        with pytest.raises(TypeError, match="is no L"):
            Lock.from_config("cart", Lock("x").config, backend=wrong)  # type: ignore[arg-type]  # as above
    with pytest.raises(TypeError, match="is no LeaderElectionBackend"):
        LeaderElection("jobs", backend=StrangeLocks())  # type: ignore[arg-type]  # as above


# Names.


async def test_named_coordinations_coexist_and_locks_find_theirs() -> None:
    one, two = Place("one"), Other("two")
    analytics = Lock("cart", backend="analytics")
    async with Grelmicro(uses=[Coordination(one), Coordination(two, name="analytics")]) as micro:
        async with Lock("cart"), analytics:
            assert lease_backend(analytics.backend) is two
        assert (len(one._records), len(two._records)) == (1, 1)
        assert micro.get("coordination", "analytics").name == "analytics"
        election = LeaderElection("jobs", backend="analytics")
        assert lease_backend(election.backend) is two
        with pytest.raises(CoordinationBackendError, match="no coordination named 'nowhere'"):
            await Lock("cart", backend="nowhere").acquire()


async def test_a_lone_provider_fills_the_named_ones_too_unless_they_are_full() -> None:
    lone, other = Place(), Other()
    micro = Grelmicro(uses=[lone, Coordination(name="a"), Coordination(other, name="b")])
    assert store_of(micro.get("coordination", "a"), "lock_backend") is lone
    assert store_of(micro.get("coordination", "b"), "lock_backend") is other
    assert store_of(micro.coordination, "lock_backend") is lone


async def test_two_of_one_kind_and_name_are_refused() -> None:
    with pytest.raises(ValueError, match="another name="):
        Grelmicro(uses=[Coordination(Place()), Coordination(Other())])
    with pytest.raises(ValueError, match="there is an election named 'jobs' already"):
        Grelmicro(uses=[LeaderElection("jobs"), LeaderElection("jobs")])
    election = LeaderElection("jobs")
    assert Grelmicro(uses=[election, election]).election("jobs") is election


async def test_coordination_says_what_it_is() -> None:
    coordination = Coordination(Place(), name="analytics")
    assert Coordination.kind == "coordination"
    assert coordination.name == "analytics"
    assert "Place" in repr(coordination)
    with pytest.raises(ValueError, match="empty"):
        Coordination(name="")


async def test_the_factories_bind_to_their_component() -> None:
    one, two = Place("one"), Other("two")
    async with Grelmicro(uses=[Coordination(one), Coordination(two, name="b")]) as micro:
        lock = micro.get("coordination", "b").lock("cart", lease_duration=7)
        assert (lock.name, lock.lease_duration) == ("cart", 7)
        async with lock:
            assert len(two._records) == 1
        election = micro.get("coordination", "b").leaderelection("jobs", lease_duration=30)
        assert (election.name, election.config.lease_duration) == ("jobs", 30)


# Which app is current.


async def test_a_lock_made_before_the_app_finds_it_and_nothing_outside_of_it() -> None:
    lock, election = Lock("cart"), LeaderElection("jobs")
    for use in (lock.acquire, lock.acquire_nowait, lock.locked, lock.owned):
        with pytest.raises(OutOfContextError, match="async with micro"):
            await use()
    with pytest.raises(OutOfContextError, match="backend="):
        election.backend  # noqa: B018 - the access is the test
    async with Grelmicro(uses=[Place()]), lock:
        assert await lock.owned()
    with pytest.raises(OutOfContextError):
        await lock.acquire()


async def test_current_is_the_innermost_app_and_ends_with_it() -> None:
    outer, inner, third = (Grelmicro(uses=[Place()]) for _ in range(3))
    async with outer:
        assert Grelmicro.current() is outer
        async with inner:
            assert Grelmicro.current() is inner
            for again in (outer, third):
                async with again:
                    assert Grelmicro.current() is again
                assert Grelmicro.current() is inner
        assert Grelmicro.current() is outer
    with pytest.raises(OutOfContextError):
        Grelmicro.current()


async def test_an_app_that_is_closed_before_the_one_inside_of_it_leaves_that_one_current() -> None:
    outer, inner = Grelmicro(uses=[Place()]), Grelmicro(uses=[Other()])
    await outer.__aenter__()
    await inner.__aenter__()
    await outer.__aexit__()
    assert Grelmicro.current() is inner
    await inner.__aexit__()
    with pytest.raises(OutOfContextError):
        Grelmicro.current()


async def test_two_apps_at_once_each_serve_their_own_task() -> None:
    both = asyncio.Barrier(2)

    async def run(place: Place) -> None:
        async with Grelmicro(uses=[place]) as micro:
            await both.wait()
            assert Grelmicro.current() is micro
            async with Lock("cart"):
                await both.wait()  # both hold it: they do not meet
            await both.wait()
        with pytest.raises(OutOfContextError):
            Grelmicro.current()

    await asyncio.gather(run(Place("one")), run(Place("two")))


async def test_one_app_open_in_two_tasks_is_current_in_both_whoever_leaves_first() -> None:
    micro, both = Grelmicro(uses=[Place()]), asyncio.Barrier(2)

    async def first() -> None:
        async with micro:
            await both.wait()

    async def second() -> None:
        async with micro:
            await both.wait()
            await left
            assert Grelmicro.current() is micro
            async with Lock("cart"):
                pass

    left = asyncio.create_task(first())
    await asyncio.gather(left, second())
    assert not micro.started


async def test_an_app_may_be_closed_in_another_task_than_opened_it() -> None:
    micro = Grelmicro(uses=[Place()])
    await asyncio.create_task(micro.__aenter__())
    assert micro.started
    await asyncio.create_task(micro.__aexit__())
    assert not micro.started


async def test_an_installed_app_is_found_from_outside_while_it_is_the_only_one() -> None:
    one, two = Grelmicro(uses=[Place()]), Grelmicro(uses=[Other()])
    announce(one)
    announce(one)
    assert Grelmicro.current() is one
    announce(two)
    with pytest.raises(OutOfContextError, match="several installed apps"):
        Grelmicro.current()
    withdraw(one)
    withdraw(one)
    assert Grelmicro.current() is two
    withdraw(two)
    with pytest.raises(OutOfContextError):
        Grelmicro.current()


async def test_a_closed_app_is_not_asked_by_work_that_outlives_it() -> None:
    over = asyncio.Event()

    async def work() -> None:
        await over.wait()
        await Lock("cart").acquire()

    async with Grelmicro(uses=[Place()]):
        task = asyncio.create_task(work())
    over.set()
    with pytest.raises(NotStartedError, match="is not open"):
        await task


async def test_something_else_may_stand_for_the_app_and_current_says_that_it_is_none() -> None:
    class Stub:
        draining = False

        def get(self, kind: str, name: str = "default") -> object:
            raise NotImplementedError

    with bound(Stub()), pytest.raises(OutOfContextError, match="no Grelmicro"):
        Grelmicro.current()


# Overriding.


async def test_an_override_counts_for_what_was_built_before_and_only_meanwhile() -> None:
    real, fake, lock = Place("real"), Other("fake"), Lock("cart")
    async with Grelmicro(uses=[real]) as micro:
        async with micro.override(Coordination(fake)) as same:
            assert same is micro
            assert fake.log == ["open fake"]
            assert lease_backend(lock.backend) is fake
            async with micro.override(Coordination(Place("inner"))):
                assert lease_backend(lock.backend) is not fake
            assert await asyncio.create_task(where(lock)) is fake
        assert fake.log == ["open fake", "close fake"]
        assert lease_backend(lock.backend) is real


async def where(lock: Lock) -> object:
    return lease_backend(lock.backend)


async def test_an_override_leaves_other_names_alone() -> None:
    one, two = Place("one"), Place("two")
    micro = Grelmicro(uses=[Coordination(one), Coordination(two, name="b")])
    async with micro, micro.override(Coordination(Other(), name="b")):
        assert lease_backend(Lock("x").backend) is one
        assert lease_backend(Lock("x", backend="b").backend) is not two


async def test_an_override_that_fails_to_open_changes_nothing() -> None:
    real, good = Place("real"), Other("good")
    async with Grelmicro(uses=[real]) as micro:
        override: AbstractAsyncContextManager[Grelmicro] = micro.override(
            Coordination(good), Coordination(Other("bad", broken="open"), name="b")
        )
        with pytest.raises(ConnectionError):
            async with override:
                pytest.fail("it opened")
        assert good.log == ["open good", "close good"]
        assert lease_backend(Lock("cart").backend) is real


async def test_an_election_moves_to_an_override_and_back_without_a_crash() -> None:
    real, fake = Place("real"), Other("fake")
    election = LeaderElection("jobs")
    async with Grelmicro(uses=[real, election]) as micro:
        await election.wait_for_leader()
        assert await led(real)
        async with micro.override(Coordination(fake)):
            await eventually(lambda: led(fake), within=0.1)
            assert not await led(real)
            assert election.is_leader()
        await eventually(lambda: led(real), within=0.1)
        async with micro.override(Coordination(fake)):
            assert await election.step_down(stay_out=10)  # before it noticed: it is the old lead that is given back
            assert not await led(real)
        assert not any(supervised.crashes for supervised in micro.supervised)


async def led(place: Place) -> bool:
    return await place.leaderelection().get(name="jobs") is not None


# Saying what there is.


async def test_describe_tells_what_there_is_and_no_secret() -> None:
    micro = Grelmicro(uses=[SQLiteProvider("/tmp/leases.db"), LeaderElection("jobs")], environment="test")
    told = micro.describe()
    assert told["environment"] == "test"
    assert told["elections"] == ["jobs"]
    assert not told["started"]
    assert "leases.db" in told["components"][0]


async def test_what_has_to_be_opened_cannot_be_added_to_an_open_app() -> None:
    async with Grelmicro(uses=[Place()]) as micro:
        for part in (Other(), Coordination(name="late"), Coordination):
            with pytest.raises(CoordinationError, match="open already"):
                micro.use(part)
        late = LeaderElection("late")
        micro.use(late).use(late)
        await micro.election("late").wait_for_leader()
        assert len(micro.supervised) == 1


async def test_a_framework_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="no plugin can install on int"):
        Grelmicro(uses=[Place()]).install(5)
