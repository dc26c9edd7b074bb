"""What redis-py does: clients for URLs, and the script by a client's own commands."""

import asyncio
import logging
import random
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from grel_core.providers.redis_connection import PAUSE, Argument, Link, Terms

logger = logging.getLogger("grel")

Client = Redis | RedisCluster
PARALLEL = 16
"""Commands under way at most, each on a connection of its own: a pool that runs out would raise."""


def client_of(url: str, timeout: float) -> Client:
    """A client for `url` that has not connected yet.

    Raises:
        TypeError: the URL is no text.
        ValueError: it is no URL of ours.
    """
    if not isinstance(url, str):
        raise TypeError(f"RedisProvider takes a URL, not {type(url).__name__}; a client goes to its from_client")
    try:
        # Half of it, so that redis-py is the first to notice a node that hangs, and looks for another one.
        return _client_of(url, {"socket_timeout": timeout / 2, "socket_connect_timeout": timeout / 2, "protocol": 3})
    except (ValueError, TypeError, RedisError) as error:
        # The URL stays out of the message, and what redis-py says of it too: a password may stand anywhere in it.
        reason = str(error) if isinstance(error, _UrlError) else "redis-py does not understand it"
        raise ValueError(f"no usable Redis URL: {reason}; give for example 'redis://localhost:6379/0'") from None


class _UrlError(ValueError):
    """What is wrong with a URL, in words that do not repeat it."""


def _client_of(url: str, options: dict[str, Any]) -> Client:
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.replace("valkey", "redis").partition("+")
    if scheme not in {"redis", "rediss", "unix"} or kind not in {"", "sentinel", "cluster"} or "://" not in url:
        raise _UrlError("its scheme is none of redis, rediss, unix, redis+sentinel, redis+cluster")
    if "@" in parts.path + parts.query + parts.fragment:
        raise _UrlError("characters such as / ? # in a user name or password must be percent-encoded")
    user, at, places = parts.netloc.rpartition("@")
    hosts = [_host(place, 26379 if kind == "sentinel" else 6379) for place in places.split(",")]
    path = parts.path.strip("/")
    service, _, database = path.partition("/") if kind == "sentinel" else ("", "", path)
    if scheme != "unix" and database and not database.isdecimal():
        raise _UrlError("its database is not a number")
    if kind == "sentinel" and not service:
        raise _UrlError("a Sentinel URL ends with the name of the service, as in redis+sentinel://host:26379/mymaster")
    if kind == "cluster" and int(database or 0):
        raise _UrlError("a cluster has no numbered databases")
    start = url[len(parts.scheme) :] if not kind else f"://{user}{at}{places.split(',')[0]}/{database}?{parts.query}"
    options |= parse_url(scheme + start)
    if not kind:
        client = Redis.from_pool(ConnectionPool(**options))
        client.connection_pool.make_connection()  # refuses unknown options
        return client
    options = {name: value for name, value in options.items() if name not in {"host", "port"}}
    options["ssl"] = options.pop("connection_class", None) is SSLConnection
    if kind == "cluster":
        return RedisCluster(startup_nodes=[ClusterNode(*host) for host in hosts], **options)
    primary: Redis = _sentinel(hosts, options).master_for(service)
    return primary


def _host(place: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{place}")
    if not parts.hostname and place:
        raise _UrlError("it has a port but no host")
    return parts.hostname or "localhost", parts.port or port


def _sentinel(hosts: list[tuple[str, int]], options: dict[str, Any]) -> Sentinel:
    """Sentinels have options of their own as `sentinel_...`, share those of TLS, and are all asked in one timeout."""
    own = {name: options.pop(name) for name in list(options) if name.startswith("sentinel_")}
    each = options["socket_timeout"] / (len(hosts) + 1)
    shared = {name: value for name, value in options.items() if name.startswith("ssl")}
    asked = {"socket_timeout": each, "socket_connect_timeout": each, "retry": Retry(NoBackoff(), 0), **shared}
    asked |= {name.removeprefix("sentinel_"): value for name, value in own.items()}
    return Sentinel(hosts, sentinel_kwargs=asked, **options)


class Plain(Link):
    """The client's own commands: for Cluster, for a client of the user's, and where a connection cannot be shared."""

    def __init__(self, terms: Terms, client: Client) -> None:
        super().__init__(terms)
        self.counts = not isinstance(client, RedisCluster)
        self._client = client
        self._last: dict[tuple[Argument, ...], asyncio.Task[Any]] = {}
        self._slots = asyncio.Semaphore(PARALLEL)
        self._ears: asyncio.Task[None] | None = None

    async def open(self) -> None:
        async with asyncio.timeout(self.terms.timeout):
            await self._client.ping()

    async def call(self, key: str, arguments: list[Argument]) -> Any:
        whose = (key, *arguments[3:4])
        task = self._last[whose] = self.loop.create_task(self._run(self._last.get(whose), key, arguments))
        timer = self.loop.call_later(self.terms.timeout, self._give_up, task)

        def ended(_: object) -> None:
            timer.cancel()
            if not task.cancelled():
                task.exception()  # seen, also when the caller is gone
            if self._last.get(whose) is task:
                del self._last[whose]

        task.add_done_callback(ended)
        await asyncio.wait([task])
        if task.cancelled():
            raise TimeoutError(f"Redis did not answer within {self.terms.timeout} s")
        return task.result()

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        """Cancel `task` until it ends: before Python 3.12, redis-py may lose a cancellation in `asyncio.wait_for`."""
        if not task.done():
            task.cancel()
            self.loop.call_later(PAUSE, self._give_up, task)

    async def _run(self, before: asyncio.Task[Any] | None, key: str, arguments: list[Argument]) -> Any:
        if before is not None:
            await asyncio.wait([before])
        async with self._slots:
            try:
                return await self._client.evalsha(self.sha, 2, key, key + ":r", *arguments)
            except NoScriptError:
                return await self._client.eval(self.terms.script, 2, key, key + ":r", *arguments)

    async def listen(self) -> bool:
        if self._ears is None:
            tried = asyncio.Event()
            self._ears = self.loop.create_task(self._listen(tried), name="grel: hints from Redis")
            await tried.wait()
        return await super().listen()

    async def _listen(self, tried: asyncio.Event) -> None:
        """Hear hints until the end, on one connection after another."""
        while self.refusal is None:
            try:
                await self._hear(tried)
            except ResponseError as error:
                self.refusal = error
            except (RedisError, OSError) as error:
                logger.info("redis: no hints for a while (%s)", type(error).__name__)
            self.channel = ""
            tried.set()
            await asyncio.sleep(PAUSE)

    async def _hear(self, tried: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            client, silent = self._client, False
            if isinstance(client, RedisCluster):  # any node will do: they pass messages on
                node = random.choice(client.get_nodes())
                pool = ConnectionPool(connection_class=node.connection_class, **node.connection_kwargs)
                client = await stack.enter_async_context(Redis.from_pool(pool))
            ears = await stack.enter_async_context(client.pubsub())
            async with asyncio.timeout(self.terms.timeout):
                await ears.subscribe(self.terms.channel)
            while True:
                message = await ears.get_message(timeout=self.terms.timeout)
                if message is None and silent:
                    raise ConnectionError("no answer to PING")
                silent = message is None
                if message is None:
                    await ears.ping()
                elif message["type"] == "message":
                    data = message["data"]
                    self.terms.hint(data if isinstance(data, str) else data.decode())
                elif message["type"] == "subscribe":
                    self.channel = self.terms.channel
                    self.terms.hint(None)
                    tried.set()

    async def close(self) -> None:
        if self._last:
            await asyncio.wait(self._last.values())
        if self._ears is not None:
            self._give_up(self._ears)
            await asyncio.wait([self._ears])
