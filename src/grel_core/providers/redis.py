"""Redis and Valkey: leases that every process of an application shares."""

import json
import os
import re
import secrets
import ssl
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from typing import Any, Self, cast

from redis import exceptions
from redis.asyncio import Redis, RedisCluster

from grel_core.errors import CoordinationBackendError
from grel_core.lease import rules
from grel_core.lease.backend import T
from grel_core.lease.names import Key, escape
from grel_core.lease.rules import Instant, Record, Rule, Waiter
from grel_core.providers.base import Provider, granted, mask
from grel_core.providers.redis_client import Client, Plain, client_of
from grel_core.providers.redis_connection import Argument, Link, Shared, Terms, UnfitError

SCRIPT = resources.files(__package__).joinpath("redis.lua").read_text(encoding="utf-8")
EXAMPLE = "a URL such as 'redis://localhost:6379/0'"
PASSING = re.compile(r"\b(LOADING|READONLY|CLUSTERDOWN|TRYAGAIN|MASTERDOWN|BUSY|OOM|NOREPLICAS|MISCONF)\b")
"""What a server says when it refuses for now."""


class RedisProvider(Provider):
    """Leases on a Redis (7 or newer) or Valkey server, a Sentinel set or a Cluster, whose clock decides.

    URLs: `redis://`, `rediss://` (TLS), `unix://`, `redis+sentinel://host:port,host:port/service/db` and
    `redis+cluster://host:port,host:port`, or `valkey` in place of `redis`, with what redis-py takes in a URL's query
    (`?protocol=2` for what does not speak RESP3). Without one, `REDIS_URL`, `VALKEY_URL`, or `REDIS_HOST` and
    `REDIS_PORT` say where, each with `env_prefix` in front.

    With `replicas`, a grant counts only once so many replicas have it: that bounds what a failover can lose, and does
    not rule it out.
    """

    variables = ("REDIS_URL", "VALKEY_URL")
    script = SCRIPT

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "grel",
        backend_timeout: float = 5.0,
        retention: float = 60.0,
        memory_retention: float = 30 * 86_400.0,
        replicas: int = 0,
        env_prefix: str = "",
    ) -> None:
        super().__init__(
            prefix=prefix,
            backend_timeout=backend_timeout,
            retention=retention,
            memory_retention=memory_retention,
        )
        self._url = self.from_environment(EXAMPLE, env_prefix) if url is None else url
        if replicas < 0 or isinstance(replicas, bool):
            raise ValueError(f"replicas is {replicas}; give how many replicas must have a grant before it counts")
        self._replicas = replicas
        self._borrowed: Client | None = None
        self._client = client_of(self._url, self.backend_timeout)
        self._link: Link
        self._text = lru_cache(maxsize=1024)(lambda key: key.text(self.prefix))

    @classmethod
    def from_client(cls, client: Client, **options: Any) -> Self:
        """A provider on a `redis.asyncio` client of yours, which stays yours to close; `options` as for a URL."""
        if not isinstance(client, Redis | RedisCluster):
            raise TypeError(f"from_client takes a client of redis.asyncio, not {type(client).__name__}")
        provider = cls("redis://", **options)
        provider._borrowed = client
        return provider

    @classmethod
    def from_environment(cls, what: str, env_prefix: str = "") -> str:
        host = os.environ.get(f"{env_prefix}REDIS_HOST")
        if host and not any(os.environ.get(env_prefix + variable) for variable in cls.variables):
            return f"redis://{host}:{os.environ.get(f'{env_prefix}REDIS_PORT') or 6379}"
        return super().from_environment(what, env_prefix)

    def identity(self) -> Any:
        place = self._borrowed or self._url
        return (
            type(self),
            place,
            self.prefix,
            self.backend_timeout,
            self._retention,
            self._memory_retention,
            self._replicas,
        )

    def __repr__(self) -> str:
        return f"<RedisProvider {'on a given client' if self._borrowed else mask(self._url)}>"

    async def _open(self) -> None:
        terms = Terms(
            script=self.script,
            timeout=self.backend_timeout,
            channel=f"{escape(self.prefix, ':{}')}:wake:{secrets.token_hex(8)}",
            hint=self._hear,
            wanted=lambda: bool(self.watches),
            replicas=self._replicas,
        )
        client = self._client = self._borrowed or client_of(self._url, self.backend_timeout)
        if isinstance(client, Redis) and self._borrowed is None:
            self._link = Shared(terms, client.connection_pool)
        else:
            self._link = self._plain(terms)
        try:
            await self._reach(self._connect)
        except BaseException:
            await self._close()
            raise

    def _plain(self, terms: Terms) -> Plain:
        if self._replicas:
            raise CoordinationBackendError(
                "replicas= needs one connection for a grant and its WAIT: it works with hiredis and the URL of a "
                "server or a Sentinel set, not with a Cluster or a client of yours"
            )
        return Plain(terms, self._client)

    async def _connect(self) -> None:
        try:
            await self._link.open()
        except UnfitError:
            self._link = self._plain(self._link.terms)
            await self._link.open()

    async def _close(self) -> None:
        try:
            await self._link.close()
        finally:
            await self._disconnect()

    async def _disconnect(self) -> None:
        if self._borrowed is not None:
            return
        await self._client.aclose()
        if sentinel := getattr(getattr(self._client, "connection_pool", None), "sentinel_manager", None):
            for client in sentinel.sentinels:
                await client.aclose()

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        self.check_loop()
        link = self._link
        try:
            reply = await link.call(self._text(key), [rule.verb, self.keep(key), *arguments(rule, link)])
        except UnfitError:
            await self._connect()  # it could not be reached when this was opened
            return await self.apply(key, rule)
        except exceptions.ResponseError as error:
            if "GRELFORMAT" in str(error):
                raise CoordinationBackendError(
                    f"{key.kind} {key.name!r} was written by a newer version of this library; upgrade this process too"
                ) from error
            raise
        return cast(T, ANSWERS[rule.verb](reply))

    async def listen(self) -> bool:
        self.check_loop()
        return await self._link.listen()

    def transient(self, error: BaseException) -> bool:
        refused = exceptions.AuthenticationError | exceptions.AuthorizationError | ssl.SSLCertVerificationError
        if isinstance(error, refused) or isinstance(error.__cause__ or error.__context__, refused):
            return False
        if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError) or super().transient(error):
            return True
        # Where redis-py has a class for a refusal, it cuts the word off.
        named = exceptions.ReadOnlyError | exceptions.ClusterDownError | exceptions.TryAgainError
        if isinstance(error, named | exceptions.OutOfMemoryError):
            return True
        return isinstance(error, exceptions.ResponseError) and PASSING.search(str(error)) is not None


def arguments(rule: Rule[Any], link: Link) -> list[Argument]:
    """What `redis.lua` is told of `rule`, behind the verb and the retention."""
    counts = int(link.counts)
    match rule:  # not taken apart by the patterns, which is three times as slow
        case rules.Take():
            head: list[Argument] = [counts, rule.token, rule.duration, rules.HEAD_START]
            if not (rule.shared or rule.queue or rule.meta):
                return head
            return [*head, int(rule.shared), rule.queue, link.channel, json.dumps(dict(rule.meta)) if rule.meta else ""]
        case rules.Release():
            return [counts, rule.token, rule.least]
        case rules.Renew() | rules.Downgrade():
            return [counts, rule.token, rule.duration]
        case rules.Advance():
            return [counts, rule.mark]
    return [counts]


def _seen(reply: list[Any]) -> tuple[Record, Instant]:
    reply = [item.decode() if isinstance(item, bytes) else item for item in reply]
    now, fence, state, holder, until, ended, transitions, readers, line, duration, since, renewed, meta, mark = reply
    record = Record(
        fence=fence,
        holder=holder if state == "held" else None,
        until=until,
        start=int(since),
        duration=int(duration),
        since=int(since),
        renewed=max(int(since), int(renewed)),
        meta=json.loads(meta or "{}"),
        lapsed=state == "lapsed",
        ended=ended,
        transitions=transitions,
        readers={token: int(ends) for token, ends in json.loads(readers)},
        waiters=tuple(Waiter(who, int(end), bool(sh), bool(called)) for who, end, sh, _, called in json.loads(line)),
        mark=int(mark) if mark else None,
    )
    return record, Instant(now, now)


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "take": granted,
    "renew": granted,
    "downgrade": granted,
    "release": bool,
    "advance": bool,
    "peek": _seen,
}
