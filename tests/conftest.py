"""Fixtures for every suite: one event loop kind, the backends, and a watch over what is left behind."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.kubernetes_store import KubernetesStore
from tests.conformance.postgres_store import PostgresStore
from tests.conformance.redis_store import RedisStore
from tests.harness import Harness, MemoryHarness, SQLiteHarness
from tests.postgres_server import Postgres, postgres
from tests.servers import Valkey, valkey

pytest_plugins = ["tests.require"]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Plain asyncio, the only kind of event loop that the library runs on; GREL_LOOP=uvloop takes the other make."""
    return "asyncio", {"use_uvloop": os.environ.get("GREL_LOOP") == "uvloop"}


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """A real server, for all the tests that only need one."""
    with valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A real server of the newest version, for all the tests that only need one."""
    with postgres(18) as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "redis", "postgres", "kubernetes"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """Each backend in turn, with an empty store."""
    made: Harness
    if request.param == "memory":
        made = MemoryHarness()
    elif request.param == "sqlite":
        made = SQLiteHarness(tmp_path)
    elif request.param == "kubernetes":
        made = KubernetesStore()
    elif request.param == "postgres":
        made = PostgresStore(request.getfixturevalue("postgres_server"))
    else:
        made = RedisStore(request.getfixturevalue("valkey_server"))
    await made.start()
    yield made
    await made.stop()
    left = {task for task in asyncio.all_tasks() if not task.done() and task.get_name().startswith("grel")}
    assert not left, f"tasks left behind: {left}"
