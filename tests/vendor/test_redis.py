"""What only a server can do to its clients: forget the script, restart, freeze, demote itself, refuse, fill up."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from grel_core.errors import CoordinationBackendError
from grel_core.lease.names import ELECTION, LOCK, Key
from grel_core.lease.rules import Busy, Grant
from grel_core.providers.redis import RedisProvider
from tests.harness import eventually
from tests.proxy import Proxy
from tests.servers import Valkey, valkey

pytestmark = pytest.mark.anyio

CART = Key(LOCK, "cart")
FAILURES = (OSError, RedisError)


@pytest.fixture
async def client(valkey_server: Valkey) -> AsyncIterator[Redis]:
    """A bystander on an empty server."""
    async with Redis.from_url(valkey_server.url, decode_responses=True) as client:
        await client.flushall()
        yield client


@pytest.fixture(params=["shared", "plain"])
async def make(request: pytest.FixtureRequest, client: Redis) -> AsyncIterator[Callable[..., RedisProvider]]:
    """Providers on either way to the server; the address is the server's unless a port is given."""
    borrowed: list[Redis] = []

    def provider(port: int = 0, **options: Any) -> RedisProvider:
        port = port or client.connection_pool.connection_kwargs["port"]
        if request.param == "shared":
            return RedisProvider(f"redis://127.0.0.1:{port}/0", **options)
        borrowed.append(Redis(port=port))
        return RedisProvider.from_client(borrowed[-1], **options)

    yield provider
    for each in borrowed:
        await each.aclose()


Make = Callable[..., RedisProvider]


async def seconds(call: Awaitable[Any]) -> float:
    """How long `call` takes to fail in a way that may pass, or to answer."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(call, return_exceptions=True)
    return loop.time() - began


async def fails_for_now(provider: RedisProvider, key: Key = CART) -> None:
    with pytest.raises(FAILURES) as caught:
        await provider.peek(key)
    assert provider.transient(caught.value), repr(caught.value)


async def answers(provider: RedisProvider) -> bool:
    """Whether it answers by now; whatever stands in the way has to be transient."""
    (outcome,) = await asyncio.gather(provider.check(), return_exceptions=True)
    assert outcome is None or provider.transient(outcome), repr(outcome)
    return outcome is None


# The script.


async def test_a_flushed_script_is_sent_again(make: Make, client: Redis) -> None:
    async with make() as provider:
        await client.script_flush()
        assert isinstance(await provider.take(CART, "t", 60), Grant)
        await client.script_flush()
        first, second = await asyncio.gather(provider.take(CART, "t", 60), provider.drop(CART, "t"))
        assert (isinstance(first, Grant), second) == (True, True)
        assert not await provider.locked(CART)


async def test_a_user_who_may_not_load_scripts_works(client: Redis, valkey_server: Valkey) -> None:
    await client.acl_setuser(
        "narrow", enabled=True, passwords=["+x"], keys="*", channels="*", commands=["+@all", "-script"]
    )
    await client.script_flush()
    async with RedisProvider(f"redis://narrow:x@127.0.0.1:{valkey_server.port}/0") as provider:
        assert isinstance(await provider.take(CART, "t", 60), Grant)
        assert await provider.drop(CART, "t")


async def test_a_record_of_a_newer_format_is_refused_and_left_alone(make: Make, client: Redis) -> None:
    async with make() as provider:
        await provider.take(CART, "t", 60)
        await client.hset(CART.text("grel"), "v", "2")
        before = await client.hgetall(CART.text("grel"))
        for call in (provider.take(CART, "u", 60), provider.drop(CART, "t"), provider.peek(CART)):
            with pytest.raises(CoordinationBackendError, match=r"'cart'.*upgrade"):
                await call
        assert await client.hgetall(CART.text("grel")) == before


async def test_a_key_of_somebody_elses_is_an_error_for_good(make: Make, client: Redis) -> None:
    await client.set(CART.text("grel"), "mine")
    async with make() as provider:
        with pytest.raises(ResponseError, match="WRONGTYPE") as caught:
            await provider.take(CART, "t", 60)
        assert not provider.transient(caught.value)
    assert await client.get(CART.text("grel")) == "mine"


# What stays behind.


async def test_ten_thousand_names_used_once_leave_nothing_behind(client: Redis, make: Make) -> None:
    async with make(retention=0.2) as provider:

        async def once(number: int) -> None:
            await provider.take(Key(LOCK, f"order:{number}"), "t", 60)
            await provider.drop(Key(LOCK, f"order:{number}"), "t")

        for start in range(0, 10_000, 500):
            await asyncio.gather(*(once(number) for number in range(start, start + 500)))

        async def empty() -> bool:
            return bool(await client.dbsize() == 0)

        await eventually(empty, within=10)


async def test_an_uncontended_lock_is_one_key_and_a_refusal_writes_nothing(client: Redis, make: Make) -> None:
    async with make() as provider:
        await provider.take(CART, "t", 60)
        assert await client.keys("*") == [CART.text("grel")]
        before = await client.dump(CART.text("grel"))
        assert isinstance(await provider.take(CART, "u", 60), Busy)
        assert not await provider.drop(CART, "u")
        assert await provider.renew(CART, "u", 60) is None
        assert await client.dump(CART.text("grel")) == before
        assert 59_000 < await client.pttl(CART.text("grel")) - 60_000 <= 60_001
        await provider.drop(CART, "t")
        assert 59_000 < await client.pttl(CART.text("grel")) <= 60_001


async def test_fences_rise_over_flushall_and_another_provider(client: Redis, make: Make) -> None:
    fences: list[int] = []
    for _ in range(3):
        async with make() as provider:
            for _ in range(3):
                await client.flushall()
                grant = await provider.take(CART, f"t{len(fences)}", 60)
                assert isinstance(grant, Grant)
                fences.append(grant.fence)
    assert fences == sorted(set(fences))
    assert 2**50 < fences[0] < 2**53


async def test_a_cancelled_take_whose_give_back_follows_leaves_nothing(
    make: Make, client: Redis, valkey_server: Valkey
) -> None:
    chance = random.Random(7)
    async with Proxy(port=valkey_server.port) as proxy, make(port=proxy.listening) as provider:
        await provider.check()
        proxy.requests.delay = proxy.replies.delay = 0.002
        for number in range(60):
            key, token = Key(LOCK, f"n{number}"), f"t{number}"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(chance.uniform(0, 0.004)):
                    await provider.take(key, token, 60)
                    await asyncio.Future()
            await provider.drop(key, token)
            assert await client.hget(key.text("grel"), "s") in {None, "free"}


# When it does not answer.


async def test_a_frozen_server_costs_no_call_more_than_the_timeout(make: Make, valkey_server: Valkey) -> None:
    async with make(backend_timeout=0.3) as provider:
        await provider.check()
        valkey_server.pause()
        try:
            spent = await asyncio.gather(*(seconds(provider.take(Key(LOCK, f"{n}"), "t", 60)) for n in range(20)))
            assert 0.25 < min(spent) <= max(spent) < 0.6
            assert await seconds(provider.peek(CART)) < 0.6
            await fails_for_now(provider)
        finally:
            valkey_server.resume()
        await eventually(lambda: answers(provider))


async def test_an_app_starts_where_nobody_answers_and_works_as_soon_as_somebody_does(
    make: Make, valkey_server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    async with Proxy(port=valkey_server.port) as proxy:
        proxy.replies.lost = True
        provider = make(port=proxy.listening, backend_timeout=0.3)
        began = asyncio.get_running_loop().time()
        async with provider:
            assert asyncio.get_running_loop().time() - began < 0.6
            assert "cannot be reached yet" in caplog.text
            assert provider.failing_since is not None
            await fails_for_now(provider)
            proxy.replies.lost = False
            proxy.reset()
            await eventually(lambda: provider.failing_since is None)
            await provider.check()
        await proxy.refuse()
        proxy.reset()
        async with provider:
            await fails_for_now(provider)


async def test_a_restarted_server_is_found_again_by_calls_and_by_those_who_wait(make: Make, tmp_path: Any) -> None:
    with valkey(tmp_path) as server:
        async with make(port=server.port) as provider:
            assert await provider.listen()
            with provider.watch(CART) as watch:
                await watch.wait(0)
                server.stop()
                await fails_for_now(provider)
                server.start()
                await watch.wait(10)  # without any call
                assert isinstance(await provider.take(CART, "t", 60), Grant)
                assert await provider.listen()
            async with make(port=server.port) as other:
                with other.watch(CART) as watch:
                    assert await other.listen()
                    await other.take(CART, "u", 60, queue=30)
                    await provider.drop(CART, "t")
                    await watch.wait(10)
                    assert isinstance(await other.take(CART, "u", 60), Grant)


async def test_a_connection_that_died_in_silence_is_noticed_while_someone_waits(
    make: Make, valkey_server: Valkey
) -> None:
    async with Proxy(port=valkey_server.port) as proxy, make(port=proxy.listening, backend_timeout=0.2) as provider:
        assert await provider.listen()
        with provider.watch(CART) as watch:
            await watch.wait(0)
            proxy.replies.lost = True
            before = proxy.connections
            await eventually(lambda: proxy.connections > before)
            proxy.replies.lost = False
            await watch.wait(10)
            await eventually(lambda: answers(provider))


async def test_a_server_that_became_a_replica_is_an_error_that_may_pass(make: Make, tmp_path: Any) -> None:
    with valkey(tmp_path) as server:
        async with make(port=server.port, backend_timeout=2) as provider:
            await provider.take(CART, "t", 60)
            server.ask("REPLICAOF", "127.0.0.1", "1")
            await fails_for_now(provider)
            server.ask("REPLICAOF", "NO", "ONE")
            await eventually(lambda: answers(provider))
            assert await provider.owned(CART, "t")


async def test_a_full_server_still_takes_a_lock_back(make: Make, tmp_path: Any) -> None:
    with valkey(tmp_path, "--maxmemory-policy", "noeviction") as server:
        async with make(port=server.port) as provider, Redis(port=server.port) as client:
            await provider.take(CART, "t", 60)
            await client.config_set("maxmemory", 1)
            with pytest.raises(ResponseError):
                await client.set("a", "b")
            assert await provider.drop(CART, "t")


# Hints.


async def test_a_release_wakes_the_first_in_line_of_another_process_at_once(make: Make) -> None:
    loop = asyncio.get_running_loop()
    spent = []
    async with make() as mine, make() as theirs:
        await theirs.listen()
        for number in range(20):
            await mine.take(CART, "mine", 60)
            with theirs.watch(CART) as watch:
                await theirs.take(CART, "theirs", 60, queue=30)
                began = loop.time()
                await mine.drop(CART, "mine")
                await watch.wait(10)
                spent.append(loop.time() - began)
                assert isinstance(await mine.take(CART, f"barging{number}", 60), Busy)
                assert isinstance(await theirs.take(CART, "theirs", 60), Grant)
            await theirs.drop(CART, "theirs")
    assert sorted(spent)[10] < 0.05


async def test_nothing_is_published_while_nobody_waits(make: Make, client: Redis) -> None:
    async with make() as provider:
        await provider.listen()
        await client.config_resetstat()
        await provider.take(CART, "t", 60)
        await provider.drop(CART, "t")
        assert "cmdstat_publish" not in await client.info("commandstats")


async def test_a_process_that_died_in_line_is_passed_over(make: Make) -> None:
    async with make() as mine, make() as theirs:
        await theirs.listen()
        await mine.take(CART, "mine", 60)
        async with make() as dead:
            await dead.listen()
            await dead.take(CART, "dead", 60, queue=30)
        with theirs.watch(CART) as watch:
            await theirs.take(CART, "theirs", 60, queue=30)
            await mine.drop(CART, "mine")
            await watch.wait(10)
            assert isinstance(await theirs.take(CART, "theirs", 60), Grant)
        assert not (await mine.peek(CART))[0].waiters


async def test_without_the_right_to_subscribe_waiters_poll_and_it_is_said_once(
    client: Redis, valkey_server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    await client.acl_setuser("deaf", enabled=True, nopass=True, keys="*", reset_channels=True, commands=["+@all"])
    url = f"redis://deaf:x@127.0.0.1:{valkey_server.port}/0"
    for provider in (RedisProvider(url), RedisProvider(f"{url}?protocol=2")):
        caplog.clear()
        async with provider, RedisProvider(valkey_server.url) as hearing:
            assert not caplog.records
            assert not await provider.listen()
            assert not await provider.listen()
            assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == ["grel"]
            # It has no right to publish either: its release counts all the same, and nobody loses a place by it.
            await hearing.listen()
            assert isinstance(await provider.take(CART, "deaf", 60), Grant)
            await hearing.take(CART, "hearing", 60, queue=30)
            assert await provider.drop(CART, "deaf")
            assert (await provider.peek(CART))[0].waiters[0].token == "hearing"
            assert isinstance(await provider.take(CART, "deaf", 60, queue=30), Busy)
            await hearing.take(CART, "hearing", 60)
            await hearing.drop(CART, "hearing")
            assert (await provider.peek(CART))[0].waiters[0].token == "deaf"
            assert isinstance(await provider.take(CART, "deaf", 60), Grant)
            await provider.drop(CART, "deaf")


# Being open.


async def test_closing_waits_for_what_is_under_way_and_leaves_no_task(
    make: Make, client: Redis, valkey_server: Valkey
) -> None:
    async with Proxy(port=valkey_server.port) as proxy:
        async with make(port=proxy.listening) as provider:
            await provider.listen()
            proxy.requests.delay = 0.05
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await provider.take(CART, "t", 60)
        assert await client.hget(CART.text("grel"), "s") == "held"
        proxy.requests.delay = 0
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("grel")]


def test_a_provider_opens_again_on_another_loop(valkey_server: Valkey) -> None:
    provider = RedisProvider(valkey_server.url, prefix="loops")

    async def once(token: str) -> bool:
        async with provider:
            await provider.listen()
            answer = await provider.take(Key(ELECTION, "e"), token, 60)
            return isinstance(answer, Grant)

    assert asyncio.run(once("a"))
    assert not asyncio.run(once("b"))


async def test_more_callers_than_connections_are_served(make: Make) -> None:
    async with make() as provider:
        answers = await asyncio.gather(*(provider.take(Key(LOCK, f"{n}"), "t", 60) for n in range(400)))
        assert all(isinstance(answer, Grant) for answer in answers)


async def test_an_opening_that_is_cancelled_leaves_nothing(make: Make, client: Redis, valkey_server: Valkey) -> None:
    async def connections() -> int:
        return len(await client.client_list())

    before = await connections()
    async with Proxy(port=valkey_server.port) as proxy:
        proxy.replies.lost = True
        provider = make(port=proxy.listening)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await provider.__aenter__()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("grel")]

        async def gone() -> bool:
            return await connections() == before

        await eventually(gone)


async def test_closing_is_quick_while_the_server_cannot_be_reached(make: Make, tmp_path: Any) -> None:
    with valkey(tmp_path) as server:
        async with make(port=server.port, backend_timeout=1) as provider:
            with provider.watch(CART):
                await provider.listen()
                server.pause()
                calls = [asyncio.create_task(provider.peek(CART)) for _ in range(3)]
                await asyncio.wait(calls, timeout=0.05)
                server.kill()
                outcomes = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(each, BaseException) and provider.transient(each) for each in outcomes)
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 2
