"""Writers and readers in steady loops on one name: neither side shuts the other out."""

import asyncio
import os
import time
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from grel_core.coordination import ReadWriteLock
from grel_core.providers.base import Provider
from grel_core.providers.postgres import PostgresProvider
from grel_core.providers.redis import RedisProvider
from tests.harness import work
from tests.postgres_server import Postgres
from tests.servers import Valkey

WRITERS, READERS, CLIENTS = 3, 10, 3
SECONDS = float(os.environ.get("GREL_READWRITE_SECONDS", "6"))


class Book:
    """Who is inside, seen from outside of the lock, and how long everybody waited."""

    def __init__(self) -> None:
        self.inside: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.longest = {"read": 0.0, "write": 0.0}
        self.until = time.monotonic() + SECONDS

    async def visit(self, provider: Provider, kind: str) -> None:
        """Come in again and again."""
        side = getattr(ReadWriteLock("book", backend=provider.readwritelock()), kind)
        while time.monotonic() < self.until:
            began = time.monotonic()
            async with side:
                self.longest[kind] = max(self.longest[kind], time.monotonic() - began)
                self.inside[kind] += 1
                self.visits[kind] += 1
                assert self.inside["write"] <= 1
                assert not (self.inside["write"] and self.inside["read"])
                await work(0.01)
                self.inside[kind] -= 1


@pytest.mark.anyio
@pytest.mark.parametrize("backend", ["redis", "postgres"])
async def test_nobody_waits_long_for_the_other_side(
    backend: str, valkey_server: Valkey, postgres_server: Postgres
) -> None:
    book = Book()
    async with AsyncExitStack() as stack:
        clients: list[Provider] = [
            RedisProvider(valkey_server.url, prefix="rw")
            if backend == "redis"
            else PostgresProvider(postgres_server.url())
            for _ in range(CLIENTS)
        ]
        for client in clients:
            await stack.enter_async_context(client)
        kinds = ["write"] * WRITERS + ["read"] * READERS
        await asyncio.gather(*(book.visit(clients[number % CLIENTS], kind) for number, kind in enumerate(kinds)))
    print(
        f"{backend}: {dict(book.visits)}, longest wait " + ", ".join(f"{k} {v:.2f} s" for k, v in book.longest.items())
    )
    assert max(book.longest.values()) < 2
    assert min(book.visits.values()) > SECONDS
