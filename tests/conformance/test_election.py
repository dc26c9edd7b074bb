"""What an election does, on every backend."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from grel_core.coordination import LeaderElection, NotLeaderError, WouldBlockError
from grel_core.errors import NotStartedError
from grel_core.lease.names import ELECTION, Key
from grel_core.providers.base import Provider
from tests.harness import Harness, eventually
from tests.harness import work as pause

pytestmark = pytest.mark.anyio

FAST: dict[str, Any] = {"lease_duration": 1.0, "renew_deadline": 0.7, "retry_interval": 0.1, "error_interval": 0.01}


@asynccontextmanager
async def running(election: LeaderElection) -> AsyncIterator[LeaderElection]:
    task = asyncio.create_task(election.run())
    try:
        await eventually(election.is_running)
        yield election
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def candidates(harness: Harness, count: int, **options: Any) -> AsyncIterator[list[LeaderElection]]:
    """So many candidates, each a process of its own; the first one leads."""
    async with AsyncExitStack() as stack:
        elections = []
        for number in range(count):
            provider = await stack.enter_async_context(harness.provider())
            election = LeaderElection(
                "jobs", backend=provider.leaderelection(), worker=f"worker-{number}", **{**FAST, **options}
            )
            elections.append(await stack.enter_async_context(running(election)))
            if number == 0:
                await election.wait_for_leader()
        yield elections


@pytest.fixture
async def provider(harness: Harness) -> AsyncIterator[Provider]:
    async with harness.provider() as opened:
        yield opened


async def test_one_leads_and_everyone_knows_who(harness: Harness) -> None:
    async with candidates(harness, 3) as elections:
        first, *others = elections
        await eventually(lambda: all(e.record and e.record.holder == "worker-0" for e in elections))
        assert [e.is_leader() for e in elections] == [True, False, False]
        assert first.record
        assert first.record.transitions == 0
        assert first.fencing_token == first.record.fencing_token
        assert all(other.fencing_token is None for other in others)


async def test_a_leader_that_steps_down_is_followed_at_once_and_terms_count_up(harness: Harness) -> None:
    async with candidates(harness, 2, lease_duration=60, renew_deadline=40) as (first, second):
        token = first.fencing_token
        await eventually(lambda: in_line(first))
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await first.step_down(stay_out=30)
        await asyncio.wait_for(second.wait_for_leader(), 5)
        assert loop.time() - began < 0.5
        assert not first.is_leader()
        assert token is not None
        assert second.fencing_token is not None
        assert second.fencing_token > token
        await eventually(lambda: second.record is not None and second.record.transitions == 1)
        assert not await first.step_down()


async def in_line(election: LeaderElection) -> bool:
    from grel_core.lease.foreign import lease_backend

    record, _ = await lease_backend(election.backend).peek(Key(ELECTION, election.name))
    return bool(record.waiters)


async def test_guarded_work_ends_before_a_successor_leads(harness: Harness) -> None:
    async with candidates(harness, 2) as (first, second):
        at_work, cleaned = asyncio.Event(), []

        async def work() -> None:
            try:
                at_work.set()
                await asyncio.Event().wait()
            finally:
                for _ in range(20):
                    await pause(0.001)
                    assert not second.is_leader()
                cleaned.append(True)

        leading = asyncio.create_task(first.lead(work))
        await at_work.wait()
        await first.step_down(stay_out=30)
        assert cleaned
        await leading
        await asyncio.wait_for(second.wait_for_leader(), 5)


async def test_a_lost_lease_ends_the_work_and_the_loser_campaigns_again(harness: Harness) -> None:
    async with (
        harness.provider() as provider,
        running(LeaderElection("jobs", backend=provider.leaderelection(), **FAST)) as election,
    ):
        terms: list[int | None] = []

        async def work() -> None:
            terms.append(election.fencing_token)
            await asyncio.Event().wait()

        leading = asyncio.create_task(election.lead(work, repeat=True))
        await eventually(lambda: len(terms) == 1)
        await harness.advance(5)
        await eventually(lambda: len(terms) == 2)
        assert terms[0] is not None
        assert terms[1] is not None
        assert terms[1] > terms[0]
        leading.cancel()
        await asyncio.wait([leading])


async def test_a_crash_is_taken_over_when_the_lease_ends(harness: Harness) -> None:
    async with harness.provider() as dead, harness.provider() as living:
        await dead.leaderelection().acquire_or_renew(name="jobs", token="gone.x", duration=0.5)
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with running(LeaderElection("jobs", backend=living.leaderelection(), **FAST)) as election:
            await asyncio.wait_for(election.wait_for_leader(), 5)
            assert 0.3 < loop.time() - began < 1.0


async def test_lead_gives_the_result_and_passes_errors_on(provider: Provider) -> None:
    async with running(LeaderElection("jobs", backend=provider.leaderelection(), **FAST)) as election:

        async def double(number: int) -> int:
            assert election.is_leader_confirmed_within(1)
            return 2 * number

        async def fail() -> None:
            raise KeyError

        assert await election.lead(double, 21) == 42
        with pytest.raises(KeyError):
            await election.lead(fail)


async def test_leading_needs_a_running_election(provider: Provider) -> None:
    election = LeaderElection("jobs", backend=provider.leaderelection(), **FAST)
    assert election.record is None
    assert election.last_confirmation_age() is None
    for wait in (election.wait_for_leader(), election.lead(pause, 0), election.__aenter__()):
        with pytest.raises(NotStartedError, match="does not run here"):
            await wait
    await election.wait_lose_leader()


async def test_the_guard_skips_on_followers_and_ends_with_the_lead(harness: Harness) -> None:
    async with candidates(harness, 2) as (first, second):
        with pytest.raises(WouldBlockError):
            async with second.guard():
                pytest.fail("a follower went in")
        with pytest.raises(NotLeaderError):
            async with first.guard():
                step = asyncio.create_task(first.step_down(stay_out=30))
                await asyncio.Event().wait()
        assert await step
        async with second:
            assert second.is_leader()


async def test_stopping_gives_the_lead_back(harness: Harness) -> None:
    async with harness.provider() as provider:
        async with running(LeaderElection("jobs", backend=provider.leaderelection(), **FAST)) as election:
            await election.wait_for_leader()
            assert election.last_confirmation_age() is not None
        assert not election.is_leader()
        assert not election.is_running()
        assert await provider.leaderelection().get(name="jobs") is None


async def test_metadata_and_public_identity_are_shown_and_the_token_is_not(harness: Harness) -> None:
    async with harness.provider() as provider:
        election = LeaderElection(
            "jobs", backend=provider.leaderelection(), worker="pod-7", metadata={"zone": "b"}, **FAST
        )
        async with running(election):
            await election.wait_for_leader()
            await eventually(lambda: election.record is not None)
            assert election.record
            assert election.record.holder == "pod-7" == election.identity
            assert election.record.metadata == {"zone": "b"}
            kept = await provider.leaderelection().get(name="jobs")
            assert kept
            secret = kept.holder.removeprefix("pod-7.")
            assert len(secret) == 32
            assert secret not in f"{election!r} {election.record!r}"


async def test_a_new_configuration_counts_from_the_next_round(provider: Provider) -> None:
    async with running(LeaderElection("jobs", backend=provider.leaderelection(), **FAST)) as election:
        await election.wait_for_leader()
        election.reconfigure(election.config.model_copy(update={"lease_duration": 30.0}))
        await eventually(lambda: election.record is not None and election.record.lease_duration == 30)


async def test_terms_count_up_over_releases_lapsed_leases_and_a_month_of_silence(harness: Harness) -> None:
    async with harness.provider() as provider:
        backend = provider.leaderelection()
        seen = []
        for number, skip in enumerate((0, 0, 6, 0, 29 * 86_400 + 6, 0)):
            record = await backend.acquire_or_renew(name="jobs", token=f"w.{number}", duration=5)
            seen.append(record.transitions)
            if skip:
                await harness.advance(skip)
            else:
                await backend.release(name="jobs", token=f"w.{number}")
        assert seen == list(range(6))


async def test_guarded_work_that_will_not_end_keeps_its_lease_until_it_runs_out(harness: Harness) -> None:
    async with candidates(harness, 2, lease_duration=3, renew_deadline=2) as (first, second):
        at_work, end = asyncio.Event(), asyncio.Event()

        async def stubborn() -> None:
            while not end.is_set():
                at_work.set()
                try:
                    await end.wait()
                except asyncio.CancelledError:
                    continue

        leading = asyncio.create_task(first.lead(stubborn))
        await at_work.wait()
        await first.step_down(stay_out=30, within=0.05)
        assert not first.is_leader()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.wait_for_leader(), 0.5)
        await harness.advance(4)
        await asyncio.wait_for(second.wait_for_leader(), 5)
        end.set()
        await leading
