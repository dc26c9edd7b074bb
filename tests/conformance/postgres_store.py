"""A schema on a real PostgreSQL: reached through a proxy that can delay, on a clock that tests can move or stop."""

import secrets
from typing import Any

import asyncpg

from grel_core.providers.postgres import PostgresProvider
from grel_core.providers.postgres_connection import SQL
from tests.conformance.redis_store import Slow
from tests.harness import Harness
from tests.postgres_server import Postgres
from tests.proxy import Proxy

TIME = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
# In the place of TIME: where a test stopped the clock, or the server's own time plus what the test skipped.
MOVABLE = f"(SELECT coalesce(stopped, {TIME} + skipped) FROM grel.clock)"


class PostgresStore(Harness):
    """A schema of its own on a server that runs already."""

    name = "postgres"

    def __init__(self, server: Postgres) -> None:
        super().__init__()
        self.server = server
        self.schema = f"t{secrets.token_hex(4)}"
        self.proxy = Proxy(port=server.port)
        self.proxy.requests, self.proxy.replies = Slow(self.delay), Slow(self.delay)
        self.client: Any

    async def start(self) -> None:
        await self.proxy.__aenter__()
        self.client = await asyncpg.connect(self.server.url())
        await self.client.execute(
            f"CREATE SCHEMA {self.schema}; CREATE TABLE {self.schema}.clock (stopped bigint, skipped bigint NOT NULL);"
            f"INSERT INTO {self.schema}.clock VALUES (NULL, 0)"
        )

    async def stop(self) -> None:
        await self.client.execute("SET client_min_messages = error")
        await self.client.execute(f"DROP SCHEMA {self.schema} CASCADE")
        await self.client.close()
        await self.proxy.__aexit__()

    def provider(self, **options: Any) -> PostgresProvider:
        url = self.server.url().replace(str(self.server.port), str(self.proxy.listening))
        provider = PostgresProvider(url, **{"schema": self.schema, **options})
        assert SQL.count(TIME) == 2
        provider.sql = SQL.replace(TIME, MOVABLE)
        return provider

    async def freeze(self, now: int = 4_102_444_800_000_000, wall: int = 4_102_444_800_000_000) -> None:
        await super().freeze(now, wall)
        await self.client.execute(f"UPDATE {self.schema}.clock SET stopped = $1", now)

    async def advance(self, seconds: float) -> None:
        await super().advance(seconds)
        stopped = self.clock.fixed.now if self.clock.fixed is not None else None
        await self.client.execute(
            f"UPDATE {self.schema}.clock SET stopped = $1, skipped = $2", stopped, self.clock.skipped
        )

    async def keys(self) -> int:
        return int(await self.client.fetchval(f"SELECT count(*) FROM {self.schema}.lease"))
