"""PostgreSQL: leases in the database that an application has anyway."""

import asyncio
import json
import os
import re
import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Self, cast
from urllib.parse import quote

import asyncpg

from grel_core.errors import CoordinationBackendError
from grel_core.lease import rules
from grel_core.lease.backend import T
from grel_core.lease.names import Key
from grel_core.lease.rules import Instant, Peek, Record, Rule, Waiter, reap
from grel_core.providers.base import Provider, granted, mask
from grel_core.providers.postgres_connection import LOCK, REPLICA, SQL, VENDOR, Connection, Source, Terms, located

PASSING = (
    asyncpg.PostgresConnectionError,  # class 08
    asyncpg.InsufficientResourcesError,  # 53, such as too many connections
    asyncpg.TransactionRollbackError,  # 40, such as a deadlock
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleSessionTimeoutError,
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.ReadOnlySQLTransactionError,
)
"""What a server says when it refuses for now."""
EXAMPLE = "a URL such as 'postgresql://localhost/app'"
SCHEMA = "grel"


class Address(Source):
    """Connections of our own."""

    def __init__(self, place: Any) -> None:
        self.place = place

    async def take(self, timeout: float) -> Any:
        named = {} if "application_name" in self.place else {"application_name": "grel"}
        # Without asyncpg's cache, the statements are ours to name, and none is left behind in a pooler.
        return await asyncpg.connect(self.place, timeout=timeout, statement_cache_size=0, server_settings=named)

    async def leave(self, connection: Any) -> None:
        try:
            await connection.close(timeout=1)
        except VENDOR:
            connection.terminate()


class Pool(Address):
    """One connection of a pool of the user's."""

    async def take(self, timeout: float) -> Any:
        return await self.place.acquire(timeout=timeout)

    async def leave(self, connection: Any) -> None:
        await self.place.release(connection, timeout=1)


class Engine(Address):
    """One connection of an engine of SQLAlchemy; closed afterwards, for what was set on it."""

    checked_out: Any = None

    async def take(self, timeout: float) -> Any:
        async with asyncio.timeout(timeout):
            self.checked_out = await self.place.connect()
            return (await self.checked_out.get_raw_connection()).driver_connection

    async def leave(self, connection: Any) -> None:
        if self.checked_out is not None:
            await self.checked_out.invalidate()
            await self.checked_out.close()
            self.checked_out = None


class PostgresProvider(Provider):
    """Leases on a PostgreSQL server (14 or newer), whose clock decides, in a schema of their own.

    The URL is one of `postgresql://`, with what asyncpg takes in its query. Without one, `POSTGRES_URL`, or
    `POSTGRES_HOST`, `_PORT`, `_USER`, `_PASSWORD` and `_DB` say where. One connection per process, which also hears
    hints. The first open makes the schema, unless `auto_migrate` is off. `pgbouncer` says whether a pooler is in
    between that gives each transaction another session; by default it is found out.
    """

    variables = ("POSTGRES_URL",)
    sql = SQL

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = "grel",
        schema: str = SCHEMA,
        auto_migrate: bool = True,
        pgbouncer: bool | None = None,
        backend_timeout: float = 5.0,
        retention: float = 60.0,
        memory_retention: float = 30 * 86_400.0,
        env_prefix: str = "",
    ) -> None:
        super().__init__(
            prefix=prefix,
            backend_timeout=backend_timeout,
            retention=retention,
            memory_retention=memory_retention,
        )
        self.schema = check_schema(schema)
        self._auto_migrate, self._pgbouncer = auto_migrate, pgbouncer
        self._url = normal(self.from_environment(EXAMPLE, env_prefix) if url is None else url)
        self._borrowed: Pool | Engine | None = None
        self._connection: Connection
        self._text = lru_cache(maxsize=1024)(lambda key: key.text(self.prefix))
        self._apply = located("SELECT grel.apply_v1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)", schema)
        self._peek = located("SELECT grel.peek_v1($1)", schema)

    @classmethod
    def from_pool(cls, pool: Any, **options: Any) -> Self:
        """A provider on an `asyncpg.Pool` of yours: takes one connection when it opens, and keeps it."""
        if not isinstance(pool, asyncpg.Pool):
            raise TypeError(f"from_pool takes an asyncpg.Pool, not {type(pool).__name__}")
        return cls._on(Pool(pool), options)

    @classmethod
    def from_engine(cls, engine: Any, **options: Any) -> Self:
        """A provider on an `AsyncEngine` of SQLAlchemy over asyncpg: takes one connection as it opens, and keeps it."""
        if getattr(getattr(engine, "dialect", None), "driver", None) != "asyncpg" or not hasattr(engine, "sync_engine"):
            raise TypeError("from_engine takes an AsyncEngine of SQLAlchemy that was made for postgresql+asyncpg://")
        return cls._on(Engine(engine), options)

    @classmethod
    def _on(cls, borrowed: Pool | Engine, options: dict[str, Any]) -> Self:
        provider = cls("postgresql://", **options)
        provider._borrowed = borrowed
        return provider

    @classmethod
    def from_environment(cls, what: str, env_prefix: str = "") -> str:
        def read(part: str) -> str:
            return os.environ.get(f"{env_prefix}POSTGRES_{part}", "")

        host = read("HOST")
        if not host or read("URL"):
            return super().from_environment(what, env_prefix)
        user, password, database = (quote(read(part), safe="") for part in ("USER", "PASSWORD", "DB"))
        who = f"{user}:{password}@" if password else f"{user}@" if user else ""
        place = f"[{host}]" if ":" in host else quote(host, safe="")
        return f"postgresql://{who}{place}:{read('PORT') or 5432}/{database}"

    def identity(self) -> Any:
        options = self.schema, self.prefix, self.backend_timeout, self._retention, self._memory_retention
        return type(self), id(self._borrowed.place) if self._borrowed else self._url, *options

    def __repr__(self) -> str:
        place = f"on a given {type(self._borrowed).__name__.lower()}" if self._borrowed else mask(self._url)
        return f"<PostgresProvider {place}>"

    async def _open(self) -> None:
        connection = Connection(
            Terms(
                source=self._borrowed or Address(self._url),
                schema=self.schema,
                sql=self.sql,
                timeout=self.backend_timeout,
                auto_migrate=self._auto_migrate,
                pooled=self._pgbouncer,
                channel=f"grel:{secrets.token_hex(8)}",
                hint=self._hear,
            )
        )
        self._connection = connection
        await self._reach(self._connect)

    async def _connect(self) -> None:
        try:
            await self._connection.open()
        except ConnectionError as error:
            if str(error) == REPLICA:
                # Later on it may be a primary that was replaced; at the start it is the wrong address.
                raise CoordinationBackendError(f"{self!r}: {REPLICA}") from error
            raise

    async def _close(self) -> None:
        await self._connection.close()

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        self.check_loop()
        connection, text, keep = self._connection, self._text(key), self.keep(key)
        if isinstance(rule, Peek):
            reply = await connection.call(self._peek, text)
            if reply is None:
                raise ConnectionError(REPLICA)
            record, at = seen(reply)
            _, answer = rule(reap(record, at.now, keep), at)
            return cast(T, answer)
        reply = await connection.call(self._apply, rule.verb, text, keep, *arguments(rule, connection.channel))
        return cast(T, bool(reply[0]) if rule.verb in {"release", "advance"} else granted(reply))

    async def listen(self) -> bool:
        self.check_loop()
        return await self._connection.listen()

    def transient(self, error: BaseException) -> bool:
        return isinstance(error, PASSING) or super().transient(error)


def schema_sql(schema: str = SCHEMA) -> str:
    """The SQL that makes everything a provider with that `schema` needs; may be run again."""
    return located(f"BEGIN;\n{LOCK}\n\n{SQL}\nCOMMIT;\n", check_schema(schema))


def check_schema(schema: str) -> str:
    """Return `schema` if it can be the name of one."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", schema) or schema.startswith("pg_"):
        raise ValueError(f"the schema {schema!r} is no plain name; give letters, digits and underscores, as in 'grel'")
    return schema


def normal(url: str) -> str:
    """`url` as asyncpg takes it: without SQLAlchemy's driver, and with libpq's word for TLS."""
    scheme, _, rest = url.partition("://")
    if scheme.partition("+")[0] not in {"postgres", "postgresql"}:
        raise ValueError(f"PostgresProvider needs a URL of postgresql://, not of {scheme.partition(':')[0][:20]!r}")
    return f"postgresql://{re.sub(r'(?<=[?&])ssl=', 'sslmode=', rest)}"


def arguments(rule: Rule[Any], channel: str) -> tuple[Any, ...]:
    """What `apply_v1` is told of `rule`, behind the verb, the key and the retention."""
    match rule:
        case rules.Take(token, duration, shared, queue, meta):
            extra = json.dumps(dict(meta)) if meta else "{}"
            return token, duration, shared, queue, channel, rules.HEAD_START, extra
        case rules.Renew(token, amount) | rules.Downgrade(token, amount) | rules.Release(token, amount):
            return token, amount, False, 0, "", 0, ""
        case rules.Advance(mark):
            return "", mark, False, 0, "", 0, ""
    raise NotImplementedError(type(rule).__name__)


def seen(reply: str) -> tuple[Record, Instant]:
    """The record that `peek_v1` found, as it is kept, and when."""
    found = json.loads(reply)
    at = Instant(found["now"], found["now"])
    row: Mapping[str, Any] | None = found["lease"]
    if row is None:
        return Record(), at
    record = Record(
        fence=row["fence"],
        holder=row["holder"],
        until=row["until"],
        start=row["since"],
        duration=row["duration"],
        since=row["since"],
        renewed=row["renewed"],
        meta=json.loads(row["meta"]),
        lapsed=row["lapsed"],
        ended=row["ended"],
        transitions=row["transitions"],
        readers=found["readers"] or {},
        waiters=tuple(Waiter(w["token"], w["until"], w["shared"], w["called"]) for w in row["line"]),
        mark=row["mark"],
    )
    return record, at
