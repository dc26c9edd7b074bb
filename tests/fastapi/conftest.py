"""Fixtures for the web suite: virtual time, and a memory store whose leases a test can let run out."""

from typing import Any

import pytest

from grel_core import Grelmicro
from tests.harness import MemoryHarness
from tests.virtual_loop import VirtualLoop


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Waiting costs nothing."""
    return "asyncio", {"loop_factory": VirtualLoop}


@pytest.fixture
def store() -> MemoryHarness:
    """One memory store for all apps of a test; `advance` lets time pass only in it."""
    return MemoryHarness()


@pytest.fixture
def micro(store: MemoryHarness) -> Grelmicro:
    """One worker on that store."""
    return Grelmicro(uses=[store.provider()])


@pytest.fixture
def rival(store: MemoryHarness) -> Grelmicro:
    """Another worker on that store."""
    return Grelmicro(uses=[store.provider()])
