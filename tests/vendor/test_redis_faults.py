"""Faults that a hostile engineer found on the shared connection to Redis: each one here so that it stays away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from redis.asyncio import Redis

from grel_core.coordination import Lock, LockHandle
from grel_core.lease.names import LOCK, Key
from grel_core.providers.redis import SCRIPT, RedisProvider
from tests.harness import eventually, work
from tests.proxy import Direction, Proxy
from tests.servers import Valkey

pytestmark = pytest.mark.anyio

CART = Key(LOCK, "cart")


class Stall(Direction):
    """Each chunk waits at the gate that is up when it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(65536):
                self.bytes += len(chunk)
                await self.gate.wait()
                target.write(chunk)
                await target.drain()
        target.close()


@pytest.fixture
async def client(valkey_server: Valkey) -> AsyncIterator[Redis]:
    """A bystander on an empty server."""
    async with Redis.from_url(valkey_server.url, decode_responses=True) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def proxy(valkey_server: Valkey) -> AsyncIterator[Proxy]:
    """A way to the server that can be made worse."""
    async with Proxy(port=valkey_server.port, requests=Stall(), replies=Stall()) as proxy:
        yield proxy


@pytest.fixture
async def rival(client: Redis, valkey_server: Valkey) -> AsyncIterator[RedisProvider]:
    """Another process, which reaches the server without the proxy."""
    async with RedisProvider(valkey_server.url) as provider:
        yield provider


def through(proxy: Proxy, **options: Any) -> RedisProvider:
    return RedisProvider(f"redis://127.0.0.1:{proxy.listening}/0", **options)


async def test_a_call_that_cannot_be_sent_takes_nobody_elses_answer(rival: RedisProvider) -> None:
    await rival.take(CART, "t", 60)
    unsendable: Any = object()
    with pytest.raises((TypeError, ValueError)):
        await rival.take(CART, unsendable, 60)
    calls = asyncio.gather(rival.owned(CART, "t"), rival.locked(Key(LOCK, "free")))
    owned, locked = await asyncio.wait_for(calls, 3)
    assert (owned, locked) == (True, False)


async def test_a_cancelled_take_that_met_a_flushed_script_is_not_sent_again(
    proxy: Proxy, client: Redis, rival: RedisProvider
) -> None:
    async def refused() -> int:
        """How many calls the server has refused because it did not know the script."""
        return int((await client.info("errorstats")).get("errorstat_NOSCRIPT", {}).get("count", 0))

    assert isinstance(proxy.replies, Stall)
    async with through(proxy) as provider:
        await client.script_flush()
        before = await refused()
        proxy.replies.gate.clear()
        taking = asyncio.create_task(Lock("cart", backend=provider.lock()).acquire_nowait())

        async def known() -> bool:
            return await refused() > before

        await eventually(known)
        await client.script_load(SCRIPT)
        sent = proxy.requests.bytes
        taking.cancel()
        await asyncio.wait([taking])
        await eventually(lambda: proxy.requests.bytes > sent)
        proxy.replies.gate.set()
    assert not await rival.locked(CART)


@pytest.mark.parametrize("timeout", [0, 1])
async def test_a_take_that_arrives_after_it_was_given_up_does_not_stay_held(
    proxy: Proxy, client: Redis, rival: RedisProvider, timeout: float
) -> None:
    assert isinstance(proxy.requests, Stall)
    async with through(proxy, backend_timeout=0.3) as provider:
        assert not await provider.locked(CART)
        fast, slow = proxy.requests.gate, asyncio.Event()
        proxy.requests.gate = slow
        sent = proxy.requests.bytes
        taking = asyncio.create_task(Lock("cart", backend=provider.lock()).acquire(timeout=timeout))
        await eventually(lambda: proxy.requests.bytes > sent)
        proxy.requests.gate = fast
        (outcome,) = await asyncio.gather(taking, return_exceptions=True)
        if isinstance(outcome, LockHandle):
            await outcome.release()
        await work(0.2)  # in which what gives it back may overtake it
        slow.set()
        await work(0.1)

        async def free() -> bool:
            return not await rival.locked(CART)

        await eventually(free, what="the lock free")


async def test_a_connection_that_breaks_while_someone_waits_is_replaced_by_one(
    proxy: Proxy, client: Redis, rival: RedisProvider
) -> None:
    await rival.take(CART, "t", 60)
    async with through(proxy) as provider:
        waiting = asyncio.create_task(Lock("cart", backend=provider.lock()).acquire())
        await eventually(lambda: provider.lines.waiting(CART) == 1)

        async def connections() -> int:
            return len(await client.client_list())

        async def answers() -> bool:
            (outcome,) = await asyncio.gather(provider.check(), return_exceptions=True)
            return outcome is None

        before = await connections()
        proxy.reset()
        await eventually(answers)
        await work(0.1)  # in which whoever waits may connect once more
        assert await connections() <= before
        waiting.cancel()
        await asyncio.wait([waiting])
