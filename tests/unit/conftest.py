"""Unit tests run on a loop whose clock jumps: waiting costs them nothing."""

import pytest

from grel_core import config
from tests.virtual_loop import VirtualLoop


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": VirtualLoop}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads what another one, or the machine, has set."""
    import os

    for variable in [variable for variable in os.environ if variable.startswith("GREL_")]:
        monkeypatch.delenv(variable)
    monkeypatch.delenv("WEB_CONCURRENCY", raising=False)
    config._variables.cache_clear()
    config._mention_unread.cache_clear()
