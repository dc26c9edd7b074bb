"""Who holds: a public identity for people, never shared by two processes, and a secret token that nobody sees."""

import asyncio
import logging
import os
import re
import subprocess
import sys
from uuid import UUID

import pytest

from grel_core import Grelmicro
from grel_core.component import worker_identity
from grel_core.coordination import CoordinationError, LeaderElection, Lock, LockHandle
from grel_core.coordination.owner import identity, new_token
from grel_core.lease.names import LOCK, Key
from tests.harness import eventually
from tests.unit.fakes import Place
from tests.unit.test_drain import passing

pytestmark = pytest.mark.anyio

# As `gunicorn --preload` does: the app is imported, and its locks are made and even used, before the workers fork.
PRELOADED = """
import asyncio, os
from grel_core import Grelmicro
from grel_core.coordination import LeaderElection, Lock
from grel_core.providers.memory import MemoryProvider

lock, election = Lock("cart"), LeaderElection("jobs")
micro = Grelmicro(uses=[MemoryProvider(), election])

async def use():
    async with micro, lock as handle:
        await election.wait_for_leader()
        await election.wait_for_record()
        return f"{os.getpid()} {handle.token} {election.identity} {election.record.holder}"

print(asyncio.run(use()), flush=True)
for _ in range(3):
    if (child := os.fork()) == 0:
        print(asyncio.run(use()), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print(asyncio.run(use()), flush=True)
"""


def test_forked_workers_that_share_an_import_have_identities_of_their_own() -> None:
    told = subprocess.run([sys.executable, "-c", PRELOADED], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in told.splitlines()]
    parent, *children, again = rows
    assert [row[0] for row in (parent, again)] == [parent[0]] * 2
    assert again[2] == parent[2]
    assert len({row[0] for row in rows}) == 4
    for column in (2, 3):  # the identity, and what the others read from the record
        assert len({row[column] for row in (parent, *children)}) == 4
    assert len({row[1] for row in rows}) == 5
    assert all(row[1].startswith(row[2]) and row[2] == row[3] for row in rows)


def test_importing_draws_no_identity_and_asking_twice_gives_one() -> None:
    program = "from grel_core import component, coordination; print(component._identity.cache_info().currsize)"
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert told.strip() == "0"
    assert worker_identity() == worker_identity()
    assert str(os.getpid()) not in re.split(r"\D+", worker_identity())


def test_a_child_of_one_explicit_worker_still_has_tokens_of_its_own() -> None:
    tokens = {new_token("worker-1") for _ in range(1000)}
    assert len(tokens) == 1000
    assert {identity(token) for token in tokens} == {"worker-1"}


def test_a_token_is_128_bits_of_chance_behind_the_worker() -> None:
    assert re.fullmatch(r"a\.b\.[0-9a-f]{32}", new_token("a.b"))
    assert identity(new_token("a.b")) == "a.b"
    assert identity("somebody else's, without a point") == "unknown"
    halves = [new_token("w").removeprefix("w.") for _ in range(64)]
    assert all(len({token[place] for token in halves}) > 4 for place in range(32))


async def test_each_acquisition_has_a_token_of_its_own() -> None:
    async with Grelmicro(uses=[Place()]):
        lock, tokens = Lock("cart"), set[str]()
        for _ in range(50):
            async with lock as handle:
                tokens.add(handle.token)
        assert len(tokens) == 50


async def test_the_worker_stands_in_front_of_the_token() -> None:
    async with Grelmicro(uses=[Place()]):
        async with Lock("a", worker="pod-7") as handle:
            assert identity(handle.token) == "pod-7"
        async with Lock("b", worker=UUID(int=7)) as handle:
            assert identity(handle.token) == str(UUID(int=7))
        async with Lock("c") as handle:
            assert identity(handle.token) == worker_identity() == LeaderElection("jobs").identity


def shown(thing: object) -> str:
    return f"{thing!r} {thing} {thing:}"


async def test_no_token_is_seen_in_a_repr_a_log_or_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    place, seen, secrets = Place(), list[str](), list[str]()
    election = LeaderElection("jobs", lease_duration=3, renew_deadline=2, retry_interval=0.5, error_interval=0.1)

    async def failing(handle: LockHandle, lock: Lock) -> None:
        """Every error that a holder and those around it can get."""
        place.error = ConnectionError("refused")
        for attempt in (handle.extend, handle.release, lock.locked, lock.owned, lock.extend, lock.release):
            with pytest.raises(CoordinationError) as caught:
                await attempt()
            seen.append(shown(caught.value))
        place.error = None
        other = Lock("cart")
        for refused in (other.acquire_nowait, lambda: other.acquire(timeout=0.1), other.release):
            with pytest.raises(CoordinationError) as caught:
                await asyncio.create_task(refused())
            seen.append(shown(caught.value))
        with pytest.raises(CoordinationError) as caught:
            await lock.acquire()
        seen.append(shown(caught.value))

    async with Grelmicro(uses=[place, election], drain_timeout=0.1) as micro:
        await election.wait_for_leader()
        lock = Lock("cart", lease_duration=5)
        handle = await lock.acquire()
        secrets.append(handle.token.rpartition(".")[2])
        secrets.append(str(place._records[election._campaign._key].holder).rpartition(".")[2])
        await failing(handle, lock)
        seen += map(
            shown, (handle, lock, election, election.record, place, micro, micro.describe(), handle.from_thread)
        )
        place.error = ConnectionError("refused")
        await eventually(lambda: not election.is_leader(), within=10)
        place.error = None
        await eventually(handle.lost.is_set, within=10)
        await passing(1)
        seen.append(shown(handle))
        with pytest.raises(CoordinationError) as caught:
            handle.ensure()
        seen.append(shown(caught.value))
        with pytest.raises(CoordinationError) as caught:
            await handle.release()
        seen.append(shown(caught.value))
        left = await asyncio.create_task(Lock("left").acquire())
        secrets.append(left.token.rpartition(".")[2])
    assert len(caplog.records) > 1
    told = "\n".join([*seen, caplog.text, *(repr(record.__dict__) for record in caplog.records)])
    assert all(len(secret) == 32 and secret not in told for secret in secrets)


async def test_elections_show_the_identity_and_decide_by_the_token() -> None:
    place = Place()
    mine, other = (LeaderElection("jobs", worker="same-name") for _ in range(2))
    async with place, Grelmicro(uses=[place, mine]), Grelmicro(uses=[place, other]):
        await mine.wait_for_leader()
        await other.wait_for_record()
        assert mine.record
        assert other.record
        assert mine.record.holder == other.record.holder == "same-name"
        assert (mine.is_leader(), other.is_leader()) == (True, False)


async def test_who_knows_only_the_identity_can_take_nothing_away() -> None:
    place = Place()
    async with Grelmicro(uses=[place]), Lock("cart", worker="pod-7") as handle:
        assert not await place.drop(Key(LOCK, "cart"), "pod-7")
        assert not await place.drop(Key(LOCK, "cart"), new_token("pod-7"))
        assert await place.owned(Key(LOCK, "cart"), handle.token)
