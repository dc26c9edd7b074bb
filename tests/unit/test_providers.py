"""Where a provider takes its address from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grel_core.providers.base import Provider
from grel_core.providers.postgres import PostgresProvider
from grel_core.providers.redis import RedisProvider
from grel_core.providers.sqlite import SQLiteProvider

VARIABLES = {
    "REDIS_URL": "redis://plain:1/0",
    "CARTS_REDIS_HOST": "carts",
    "CARTS_REDIS_PORT": "7",
    "POSTGRES_URL": "postgresql://plain/app",
    "CARTS_POSTGRES_HOST": "carts",
    "CARTS_POSTGRES_USER": "ada",
    "CARTS_POSTGRES_PASSWORD": "s3cret",
    "CARTS_POSTGRES_DB": "shop",
    "SQLITE_PATH": "/plain.db",
    "CARTS_SQLITE_PATH": "/carts.db",
}


@pytest.mark.parametrize(
    ("make", "plain", "prefixed"),
    [
        (RedisProvider, "redis://plain:1/0", "redis://carts:7"),
        (PostgresProvider, "postgresql://plain/app", "postgresql://***@carts:5432/shop"),
        (SQLiteProvider, "/plain.db", "/carts.db"),
    ],
)
def test_a_prefix_tells_the_variables_of_one_provider_from_those_of_another(
    make: Callable[..., Provider], plain: str, prefixed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in VARIABLES.items():
        monkeypatch.setenv(variable, value)
    assert plain in repr(make())
    assert prefixed in repr(make(env_prefix="CARTS_"))
    assert "s3cret" not in repr(make(env_prefix="CARTS_"))


def test_the_variables_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("REDIS_URL", "VALKEY_URL", "REDIS_HOST"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match="CARTS_REDIS_URL or CARTS_VALKEY_URL"):
        RedisProvider(env_prefix="CARTS_")
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "grel.db") in repr(SQLiteProvider(env_prefix="CARTS_"))
