"""Importing the core brings no vendor's library and no framework along."""

import subprocess
import sys

import pytest

VENDORS = {
    "redis",
    "valkey",
    "hiredis",
    "asyncpg",
    "psycopg",
    "aiosqlite",
    "sqlite3",
    "kubernetes",
    "kubernetes_asyncio",
}
FRAMEWORKS = {"fastapi", "starlette", "uvicorn", "aiohttp", "opentelemetry", "click"}


@pytest.mark.parametrize(
    "module",
    ["grel_core", "grel_core.coordination", "grel_core.providers.memory", "grel_core.health", "grel_core.errors"],
)
def test_importing_the_core_loads_no_vendor_and_no_framework(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "pydantic" in loaded or module == "grel_core.errors"
    assert not set(loaded) & (VENDORS | FRAMEWORKS)


@pytest.mark.parametrize("package", ["grel_core", "grel_core.coordination", "grel_core.errors"])
def test_what_a_package_lists_is_there(package: str) -> None:
    module = __import__(package, fromlist=["__all__"])
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
