"""Configuration: argument, else the environment, else the default; impossible values are refused with their name."""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from grel_core import Grelmicro
from grel_core.component import worker_identity
from grel_core.coordination import LeaderElection, LeaderElectionConfig, Lock, LockConfig
from tests.harness import eventually
from tests.unit.fakes import Place

pytestmark = pytest.mark.anyio

Set = Callable[..., None]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets variables, and lets them be read."""

    def set_variables(**variables: str) -> None:
        for variable, value in {"GREL_ENV_LOAD": "1", **variables}.items():
            monkeypatch.setenv(variable, value)

    return set_variables


def test_the_defaults_are_those_of_the_reference() -> None:
    lock, election = Lock("cart").config, LeaderElection("jobs").config
    assert (lock.lease_duration, lock.retry_interval, lock.retry_jitter) == (60, 0.1, 0.1)
    assert (election.lease_duration, election.renew_deadline, election.retry_interval) == (15, 10, 2)
    assert (election.backend_timeout, election.error_interval, election.retry_jitter) == (5, 30, 0.1)


# Where a value comes from.


def test_an_argument_goes_before_the_named_variable_before_the_one_for_the_kind_before_the_default(
    setting: Set,
) -> None:
    setting(GREL_LOCK_CART_LEASE_DURATION="7", GREL_LOCK_LEASE_DURATION="8", GREL_LOCK_RETRY_JITTER="0")
    assert Lock("cart", lease_duration=6).config.lease_duration == 6
    assert Lock("cart").config.lease_duration == 7
    assert Lock("other").config.lease_duration == 8
    assert Lock("cart").config.retry_jitter == 0
    assert Lock("cart").config.retry_interval == 0.1


def test_the_default_instance_reads_the_variable_for_its_kind(setting: Set) -> None:
    setting(GREL_LOCK_LEASE_DURATION="8", GREL_LOCK_DEFAULT_LEASE_DURATION="9")
    assert Lock("default").config.lease_duration == 8


def test_every_field_reads_its_variable(setting: Set) -> None:
    values = {
        "WORKER": "pod-7",
        "LEASE_DURATION": "90",
        "RENEW_DEADLINE": "80",
        "RETRY_INTERVAL": "7",
        "RETRY_JITTER": "0.2",
        "BACKEND_TIMEOUT": "6",
        "ERROR_INTERVAL": "5",
    }
    assert {field.upper() for field in LeaderElectionConfig.model_fields} == set(values)
    setting(**{f"GREL_LEADERELECTION_JOBS_{field}": value for field, value in values.items()})
    loaded = LeaderElection("jobs").config.model_dump()
    assert {field.upper(): str(value).removesuffix(".0") for field, value in loaded.items()} == values


def test_kinds_read_their_own_variables(setting: Set) -> None:
    setting(GREL_LOCK_LEASE_DURATION="70", GREL_LEADERELECTION_LEASE_DURATION="80")
    assert Lock("x").config.lease_duration == 70
    assert LeaderElection("x").config.lease_duration == 80


def test_a_worker_that_looks_like_a_number_is_text(setting: Set) -> None:
    setting(GREL_LOCK_WORKER="7")
    assert Lock("cart").config.worker == "7"


def test_env_prefix_replaces_both_prefixes(setting: Set) -> None:
    setting(MYAPP_CART_LEASE_DURATION="5", GREL_LOCK_CART_LEASE_DURATION="7", GREL_LOCK_RETRY_JITTER="0.5")
    config = Lock("cart", env_prefix="MYAPP_CART_").config
    assert (config.lease_duration, config.retry_jitter) == (5, 0.1)


@pytest.mark.parametrize("on", ["1", "true", "YES", " on "])
def test_the_environment_is_read_where_it_is_switched_on(on: str, setting: Set) -> None:
    setting(GREL_ENV_LOAD=on, GREL_LOCK_LEASE_DURATION="8")
    assert Lock("cart").config.lease_duration == 8
    assert Lock("cart", env_load=False).config.lease_duration == 60


@pytest.mark.parametrize("off", ["", "0", "false", "off", "maybe"])
def test_the_environment_is_not_read_otherwise(off: str, setting: Set) -> None:
    setting(GREL_ENV_LOAD=off, GREL_LOCK_LEASE_DURATION="8")
    assert Lock("cart").config.lease_duration == 60
    assert Lock("cart", env_load=True).config.lease_duration == 8


def test_the_environment_is_read_once_per_process_and_prefix(setting: Set) -> None:
    setting(GREL_LOCK_LEASE_DURATION="8")
    assert Lock("cart").config.lease_duration == 8
    setting(GREL_LOCK_LEASE_DURATION="9", GREL_LOCK_LATE_LEASE_DURATION="9", MYAPP_LEASE_DURATION="9")
    assert Lock("late").config.lease_duration == 8
    assert Lock("late", env_prefix="MYAPP_").config.lease_duration == 9


def test_variables_that_nobody_reads_are_named_once(setting: Set, caplog: pytest.LogCaptureFixture) -> None:
    setting(GREL_ENV_LOAD="", GREL_LOCK_LEASE_DURATION="8", GREL_TASKLOCK_A_LEASE_DURATION="8", GREL_OTHER="1")
    for _ in range(3):
        Lock("cart")
        LeaderElection("jobs")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "GREL_LOCK_LEASE_DURATION, GREL_TASKLOCK_A_LEASE_DURATION are set but not read" in messages[0]
    assert "GREL_OTHER" not in messages[0]


def test_nothing_is_said_of_variables_that_were_declined_or_do_not_exist(
    setting: Set, caplog: pytest.LogCaptureFixture
) -> None:
    Lock("cart", env_load=False)
    setting(GREL_ENV_LOAD="")
    Lock("cart")
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "segment"),
    [("cart", "CART"), ("order:eu/fast", "ORDER_EU_FAST"), ("a.b-c_d", "A_B_C_D"), ("Cart2", "CART2")],
)
def test_the_punctuation_of_a_name_becomes_an_underscore(name: str, segment: str, setting: Set) -> None:
    setting(**{f"GREL_LOCK_{segment}_LEASE_DURATION": "7"})
    assert Lock(name).config.lease_duration == 7


@pytest.mark.parametrize(
    "name", ["42", "0b6ce2a1-9d2e-4a8f-8f57-000000000000", "2024-report", "a b", "ada@example.org", "Käse", "_x", "🧀"]
)
def test_a_name_that_cannot_be_spelled_as_a_variable_reads_the_ones_of_its_kind(name: str, setting: Set) -> None:
    setting(GREL_LOCK_LEASE_DURATION="8", GREL_LOCK__LEASE_DURATION="9", GREL_LOCK_42_LEASE_DURATION="9")
    for env_load in (True, False):
        assert Lock(name, env_load=env_load).name == name
    assert Lock(name).config.lease_duration == 8


def test_a_ready_configuration_is_taken_as_it_is(setting: Set) -> None:
    setting(GREL_LOCK_LEASE_DURATION="8", GREL_LEADERELECTION_LEASE_DURATION="80")
    lock = Lock.from_config("cart", LockConfig(lease_duration=5))
    assert (lock.name, lock.config) == ("cart", LockConfig(lease_duration=5))
    config = LeaderElectionConfig(lease_duration=40)
    election = LeaderElection.from_config("jobs", config, metadata={"zone": "b"})
    assert (election.name, election.config, election.metadata) == ("jobs", config, {"zone": "b"})


# What is impossible.


@pytest.mark.parametrize("field", ["lease_duration", "retry_interval"])
@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan"), -0.0])
def test_an_impossible_duration_is_refused_at_construction(field: str, wrong: float) -> None:
    for make in (Lock, LeaderElection):
        with pytest.raises(ValueError, match=f"'x': {field}: "):
            make("x", **{field: wrong})  # type: ignore[arg-type]  # mypy cannot tell the keywords apart


@pytest.mark.parametrize("wrong", ["5", True, [1], "soon"])
def test_a_duration_of_the_wrong_type_is_a_type_error(wrong: Any, setting: Set) -> None:
    with pytest.raises(TypeError, match="lock 'x': lease_duration: "):
        Lock("x", lease_duration=wrong)
    setting(GREL_LOCK_RETRY_JITTER="0.2")
    with pytest.raises(TypeError, match="lease_duration: "):
        Lock("x", lease_duration=wrong)


@pytest.mark.parametrize("wrong", [-0.1, 1, 1.5, float("nan")])
def test_an_impossible_jitter_is_refused(wrong: float) -> None:
    for make in (Lock, LeaderElection):
        with pytest.raises(ValueError, match="retry_jitter"):
            make("x", retry_jitter=wrong)
        assert make("x", retry_jitter=0).config.retry_jitter == 0


def test_a_lock_does_not_flood_its_backend() -> None:
    with pytest.raises(ValueError, match="retry_interval"):
        Lock("x", retry_interval=0.0009)
    assert Lock("x", retry_interval=0.001).config.retry_interval == 0.001


@pytest.mark.parametrize("worker", ["", "x" * 129])
def test_an_impossible_worker_is_refused(worker: str) -> None:
    with pytest.raises(ValueError, match="worker"):
        Lock("x", worker=worker)


def test_a_worker_is_text_or_a_uuid() -> None:
    uuid = UUID(int=7)
    assert Lock("x", worker=uuid).config.worker == str(uuid)
    for wrong in (7, True, b"pod"):
        with pytest.raises(TypeError, match="worker"):
            Lock("x", worker=wrong)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("text", ["soon", "-1", "0", "inf", "nan", ""])
def test_an_impossible_value_from_the_environment_is_refused_with_its_variable(text: str, setting: Set) -> None:
    setting(GREL_LOCK_CART_LEASE_DURATION=text, GREL_LOCK_RETRY_JITTER="0.2")
    with pytest.raises(ValueError, match=r"lock 'cart': lease_duration \(from GREL_LOCK_CART_LEASE_DURATION\): "):
        Lock("cart")
    assert Lock("other").config.lease_duration == 60


def test_an_impossible_value_is_never_repeated_in_the_message(setting: Set) -> None:
    setting(GREL_LOCK_LEASE_DURATION="redis://:hunter2@there")
    with pytest.raises(ValueError, match="from GREL_LOCK_LEASE_DURATION") as caught:
        Lock("cart")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"renew_deadline": 15}, "renew_deadline .* must be shorter than lease_duration"),
        ({"lease_duration": 10}, "renew_deadline .* must be shorter than lease_duration"),
        ({"retry_interval": 10}, "retry_interval with jitter .* must be shorter than renew_deadline"),
        ({"retry_interval": 9.5}, r"retry_interval with jitter \(10.45\)"),
        ({"retry_interval": 9, "retry_jitter": 0.2}, "retry_interval with jitter"),
    ],
)
def test_an_election_that_could_not_work_is_refused_with_the_sentence_that_fixes_it(
    values: dict[str, float], sentence: str, setting: Set
) -> None:
    with pytest.raises(ValueError, match=sentence):
        LeaderElection("jobs", **values)  # type: ignore[arg-type]  # mypy cannot tell the keywords apart
    with pytest.raises(ValueError, match=sentence):
        LeaderElectionConfig(**values)  # type: ignore[arg-type]  # as above
    variables = {f"GREL_LEADERELECTION_JOBS_{field.upper()}": str(value) for field, value in values.items()}
    setting(**variables)
    with pytest.raises(ValueError, match=sentence) as caught:
        LeaderElection("jobs")
    assert all(variable in str(caught.value) for variable in variables)


def test_an_election_at_the_edge_of_what_works_is_taken() -> None:
    LeaderElection("jobs", renew_deadline=14.99)
    LeaderElection("jobs", retry_interval=9.9, retry_jitter=0)


def test_a_ready_configuration_is_looked_at_again() -> None:
    wrong = LockConfig().model_copy(update={"lease_duration": -1.0})
    with pytest.raises(ValueError, match="lease_duration"):
        Lock.from_config("cart", wrong)
    with pytest.raises(ValueError, match="lease_duration"):
        Lock("cart").reconfigure(wrong)
    election = LeaderElection("jobs")
    with pytest.raises(ValueError, match="renew_deadline"):
        election.reconfigure(election.config.model_copy(update={"renew_deadline": 20.0}))
    with pytest.raises(TypeError, match="expected LockConfig, not LeaderElectionConfig"):
        Lock.from_config("cart", LeaderElectionConfig())  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="expected LeaderElectionConfig, not dict"):
        LeaderElection.from_config("jobs", {})  # type: ignore[arg-type]  # that is the point


def test_a_configuration_is_frozen_and_knows_its_fields() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Lock("cart").config.lease_duration = 5
    with pytest.raises(ValueError, match="lease_time"):
        LockConfig(lease_time=5)  # type: ignore[call-arg]  # that is the point


# Replacing it.


def test_a_new_configuration_counts_from_the_next_operation() -> None:
    lock = Lock("cart")
    lock.reconfigure(LockConfig(lease_duration=5))
    assert lock.config.lease_duration == lock.lease_duration == 5


def test_worker_is_fixed_for_life(setting: Set) -> None:
    setting(GREL_LOCK_WORKER="pod-7")
    for lock in (Lock("cart"), Lock("cart", worker="pod-7")):
        with pytest.raises(ValueError, match="worker is fixed"):
            lock.reconfigure(LockConfig(worker="pod-8"))
        lock.reconfigure(LockConfig(worker="pod-7", lease_duration=6))
        lock.reconfigure(LockConfig(lease_duration=5))
        assert (lock.config.worker, lock.config.lease_duration) == ("pod-7", 5)
    unnamed = Lock("cart", env_load=False)
    with pytest.raises(ValueError, match="worker is fixed"):
        unnamed.reconfigure(LockConfig(worker="pod-8"))
    assert unnamed.config.identity == worker_identity()


def test_only_a_configuration_of_the_same_kind_replaces_one() -> None:
    with pytest.raises(TypeError, match="expected LockConfig"):
        Lock("cart").reconfigure(LeaderElectionConfig())  # type: ignore[arg-type]  # that is the point


async def test_what_began_under_one_configuration_ends_under_it() -> None:
    async with Grelmicro(uses=[Place()]):
        lock = Lock("cart", lease_duration=60)
        async with lock as handle:
            waiting = asyncio.create_task(lock.acquire())
            await asyncio.sleep(0)
            lock.reconfigure(lock.config.model_copy(update={"lease_duration": 5.0}))
            assert handle.expires_in > 50
            await handle.extend()  # a new operation: the new duration
            assert handle.expires_in <= 5
        second = await waiting  # it began before
        assert second.expires_in > 50
        await second.release()


async def test_an_election_uses_a_new_configuration_from_its_next_round() -> None:
    place = Place()
    election = LeaderElection("jobs")
    async with Grelmicro(uses=[place, election]):
        await election.wait_for_leader()
        election.reconfigure(LeaderElectionConfig(lease_duration=100))
        await eventually(lambda: election.record is not None and election.record.lease_duration == 100)
