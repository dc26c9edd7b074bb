"""The public protocols, by themselves, on every backend: what a stranger's code may rely on."""

from collections.abc import AsyncIterator

import pytest

from grel_core.coordination import LeaderElectionBackend, LockBackend, ReadWriteLockBackend, ScheduleBackend
from grel_core.providers.base import Provider
from tests.harness import Harness

pytestmark = pytest.mark.anyio

MINUTE = 60.0


@pytest.fixture
async def provider(harness: Harness) -> AsyncIterator[Provider]:
    async with harness.provider() as opened:
        yield opened


async def test_a_provider_has_a_backend_of_each_kind(provider: Provider) -> None:
    assert isinstance(provider.lock(), LockBackend)
    assert isinstance(provider.readwritelock(), ReadWriteLockBackend)
    assert isinstance(provider.leaderelection(), LeaderElectionBackend)
    assert isinstance(provider.schedule(), ScheduleBackend)
    await provider.check()


async def test_a_lock_backend_keeps_its_contract(provider: Provider, harness: Harness) -> None:
    backend = provider.lock()
    first = await backend.acquire(name="x", token="a.1", duration=5)
    assert first is not None
    assert await backend.acquire(name="x", token="a.1", duration=5) == first
    assert await backend.acquire(name="x", token="b.1", duration=5) is None
    assert await backend.locked(name="x")
    assert await backend.owned(name="x", token="a.1")
    assert not await backend.owned(name="x", token="b.1")
    assert not await backend.release(name="x", token="b.1")
    assert await backend.release(name="x", token="a.1")
    assert not await backend.release(name="x", token="a.1")
    second = await backend.acquire(name="x", token="b.1", duration=5)
    assert second is not None
    assert second > first
    await harness.advance(5.1)
    third = await backend.acquire(name="x", token="c.1", duration=5)
    assert third is not None
    assert third > second


async def test_a_read_write_backend_keeps_its_contract(provider: Provider, harness: Harness) -> None:
    backend = provider.readwritelock()
    generation = await backend.acquire_read(name="x", token="r.1", duration=60)
    assert generation is not None
    assert await backend.acquire_read(name="x", token="r.2", duration=60) == generation
    assert await backend.acquire_write(name="x", token="w.1", duration=60) is None
    assert await backend.acquire_read(name="x", token="r.3", duration=60) is None
    state = await backend.state(name="x")
    assert (state.readers, state.writing, state.waiting_writers) == (2, False, 1)
    assert await backend.release(name="x", token="r.1")
    assert await backend.release(name="x", token="r.2")
    grant = await backend.acquire_write(name="x", token="w.1", duration=5)
    assert grant is not None
    assert not grant.poisoned
    assert await backend.downgrade(name="x", token="w.1", duration=5) == grant.fence
    assert await backend.downgrade(name="x", token="w.1", duration=5) is None
    await harness.advance(5.1)
    assert await backend.acquire_write(name="x", token="w.2", duration=5) is not None
    await harness.advance(5.1)
    poisoned = await backend.acquire_write(name="x", token="w.3", duration=5)
    assert poisoned is not None
    assert poisoned.poisoned


async def test_an_election_backend_keeps_its_contract(provider: Provider, harness: Harness) -> None:
    backend = provider.leaderelection()
    assert await backend.get(name="x") is None
    first = await backend.acquire_or_renew(name="x", token="a.1", duration=5, metadata={"zone": "b"})
    assert (first.holder, first.transitions, first.metadata) == ("a.1", 0, {"zone": "b"})
    await harness.advance(2)
    again = await backend.acquire_or_renew(name="x", token="a.1", duration=5)
    assert again.acquired_at == first.acquired_at
    assert again.renewed_at > first.renewed_at
    assert again.transitions == 0
    other = await backend.acquire_or_renew(name="x", token="b.1", duration=5)
    assert other.holder == "a.1"
    assert not await backend.release(name="x", token="b.1")
    assert await backend.release(name="x", token="a.1")
    assert await backend.get(name="x") is None
    second = await backend.acquire_or_renew(name="x", token="b.1", duration=5)
    assert (second.holder, second.transitions, second.metadata) == ("b.1", 1, {})
    await harness.advance(5.1)
    third = await backend.acquire_or_renew(name="x", token="c.1", duration=5)
    assert (third.holder, third.transitions) == ("c.1", 2)
    assert first.fencing_token
    assert second.fencing_token
    assert third.fencing_token
    assert first.fencing_token < second.fencing_token < third.fencing_token


async def test_a_schedule_backend_keeps_its_contract(provider: Provider, harness: Harness) -> None:
    backend = provider.schedule()
    noon = 1_800_000_000.0
    assert await backend.last_fired("digest") is None
    assert await backend.claim("digest", noon)
    assert not await backend.claim("digest", noon)
    assert not await backend.claim("digest", noon - MINUTE)
    assert await backend.last_fired("digest") == noon
    assert await backend.claim("other", noon - MINUTE)
    await harness.advance(7 * 86_400)
    assert not await backend.claim("digest", noon)
    assert await backend.claim("digest", noon + MINUTE)
    assert await backend.last_fired("digest") == noon + MINUTE


async def test_a_tick_far_in_the_future_is_refused(provider: Provider) -> None:
    with pytest.raises(ValueError, match="check the clock"):
        await provider.schedule().claim("digest", 9_999_999_999.0)
    assert await provider.schedule().last_fired("digest") is None
