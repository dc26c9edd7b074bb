"""Every way to reach a Redis: URLs of all kinds, clients of the user's, and what is refused before it connects."""

import asyncio
import itertools
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import AuthenticationError, ResponseError

from grel_core.coordination import Lock, LockAcquireError
from grel_core.errors import CoordinationBackendError
from grel_core.lease.names import LOCK, READWRITELOCK, SCHEDULE, Key
from grel_core.lease.rules import Busy, Grant
from grel_core.providers.redis import RedisProvider
from tests.harness import eventually
from tests.proxy import Proxy
from tests.servers import Group, Sentinel, Valkey, certificate, cluster, sentinel, valkey

pytestmark = pytest.mark.anyio

Make = Callable[[], RedisProvider]
NUMBERS = itertools.count()


async def works(make: Make) -> None:
    """Two processes share leases, wake each other, and leave nothing behind."""
    number = next(NUMBERS)
    key, shared, tick = (
        Key(LOCK, f"a lock: {{{number}}} % ü"),
        Key(READWRITELOCK, f"{number}"),
        Key(SCHEDULE, f"{number}"),
    )
    async with make() as mine, make() as theirs:
        await mine.check()
        first = await mine.take(key, "mine", 60, meta={"at": "ü"})
        assert isinstance(first, Grant)
        assert await theirs.listen()
        with theirs.watch(key) as watch:
            assert isinstance(await theirs.take(key, "theirs", 60, queue=30), Busy)
            (record, _) = await theirs.peek(key)
            assert (record.holder, record.meta, record.waiters[0].token) == ("mine", {"at": "ü"}, "theirs")
            assert await mine.renew(key, "mine", 60) == Grant(first.fence)
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert await mine.drop(key, "mine")
            await watch.wait(10)
            assert loop.time() - began < 0.5
        second = await theirs.take(key, "theirs", 60)
        assert isinstance(second, Grant)
        assert second.fence > first.fence
        assert await theirs.drop(key, "theirs")
        assert not await theirs.drop(key, "theirs")
        for token in ("a", "b"):
            assert isinstance(await mine.take(shared, token, 60, shared=True), Grant)
        assert set((await theirs.peek(shared))[0].readers) == {"a", "b"}
        assert await mine.advance(tick, 7)
        assert not await theirs.advance(tick, 7)


@pytest.fixture
async def clean(valkey_server: Valkey) -> Valkey:
    async with Redis.from_url(valkey_server.url) as client:
        await client.flushall()
    return valkey_server


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Valkey]:
    with valkey(tmp_path, password="p:a@s/s%", unix=True) as server:
        server.ask("ACL", "SETUSER", "app", "on", ">se/cret", "~*", "&*", "+@all", "-@admin")
        yield server


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
async def test_a_plain_url_works(clean: Valkey, scheme: str) -> None:
    await works(lambda: RedisProvider(f"{scheme}://127.0.0.1:{clean.port}/3"))
    async with Redis(port=clean.port, db=3) as client:
        assert await client.dbsize() > 0


async def test_a_connection_that_cannot_be_shared_is_left_to_the_client(clean: Valkey) -> None:
    # RESP2 has no pushes, so that hints need a connection of their own.
    await works(lambda: RedisProvider(f"{clean.url}?protocol=2"))


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_client_of_the_users_works_and_stays_open(clean: Valkey, decode: bool, protocol: int) -> None:
    async with Redis(port=clean.port, decode_responses=decode, protocol=protocol) as client:
        await works(lambda: RedisProvider.from_client(client))
        assert await client.ping()


async def test_a_socket_file_a_password_and_a_user_work(locked: Valkey) -> None:
    password, secret = quote("p:a@s/s%", safe=""), quote("se/cret", safe="")
    await works(lambda: RedisProvider(f"unix://:{password}@{locked.unix}?db=1"))
    await works(lambda: RedisProvider(f"redis://:{password}@127.0.0.1:{locked.port}/1"))
    await works(lambda: RedisProvider(f"redis://app:{secret}@127.0.0.1:{locked.port}/2"))


@pytest.mark.parametrize("credentials", ["", ":wrong@", "app:wrong@"])
async def test_wrong_credentials_are_refused_for_good_and_never_shown(
    locked: Valkey, credentials: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider = RedisProvider(f"redis://{credentials}127.0.0.1:{locked.port}/0")
    with caplog.at_level(logging.DEBUG), pytest.raises(CoordinationBackendError, match="cannot be used") as caught:
        await provider.__aenter__()
    assert isinstance(caught.value.__cause__, AuthenticationError | ResponseError)
    assert "wrong" not in f"{caught.value!r} {provider!r} {caplog.text}".replace("WRONGPASS", "")


@asynccontextmanager
async def tls(server: Valkey, directory: Path) -> AsyncIterator[tuple[Proxy, Path]]:
    context, authority = certificate(directory)
    async with Proxy(port=server.port, tls=context) as proxy:
        yield proxy, authority


async def test_tls_works_with_an_authority_of_ones_own_and_is_verified(clean: Valkey, tmp_path: Path) -> None:
    async with tls(clean, tmp_path) as (proxy, authority):
        await works(lambda: RedisProvider(f"rediss://localhost:{proxy.listening}/0?ssl_ca_certs={authority}"))
        await works(lambda: RedisProvider(f"valkeys://localhost:{proxy.listening}/0?ssl_ca_certs={authority}"))
        stranger = RedisProvider(f"rediss://localhost:{proxy.listening}/0")
        with pytest.raises(CoordinationBackendError) as caught:
            await stranger.__aenter__()
        assert "CERTIFICATE_VERIFY_FAILED" in str(caught.value.__cause__)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinel]:
    with sentinel(tmp_path_factory.mktemp("sentinel")) as group:
        yield group


async def test_a_sentinel_leads_to_the_primary_and_after_a_failover_to_the_next(watched: Sentinel) -> None:
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{watched.watcher.port}/{watched.name}/1"
    await works(lambda: RedisProvider(url))
    async with RedisProvider(url, backend_timeout=2) as provider:
        before = await provider.take(Key(LOCK, "cart"), "before", 60)
        with provider.watch(Key(LOCK, "awaited")) as watch:
            await asyncio.to_thread(watched.fail_over)
            await asyncio.to_thread(watched.members[0].stop)
            await watch.wait(10)  # connected again, before anybody asks
            await provider.check()
        after = await provider.take(Key(LOCK, "cart"), "after", 60)
        async with Redis(port=watched.master_port(), db=1) as primary:
            assert await primary.exists(Key(LOCK, "cart").text("grel"))
        assert isinstance(before, Grant)
        assert isinstance(after, Grant | Busy)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with cluster(tmp_path_factory.mktemp("cluster")) as group:
        yield group


async def test_a_cluster_works_by_url_and_by_client(nodes: Group) -> None:
    places = ",".join(f"{host}:{port}" for host, port in nodes.addresses)
    await works(lambda: RedisProvider(f"redis+cluster://127.0.0.1:1,{places}"))
    host, port = nodes.addresses[0]
    async with (
        RedisCluster(host=host, port=port, decode_responses=True) as decoding,
        RedisCluster(host=host, port=port, decode_responses=False) as plain,
    ):
        await works(lambda: RedisProvider.from_client(decoding))
        await works(lambda: RedisProvider.from_client(plain))


async def test_names_lie_on_all_nodes_of_a_cluster(nodes: Group) -> None:
    host, port = nodes.addresses[0]
    async with RedisProvider(f"valkey+cluster://{host}:{port}", prefix="spread{x}") as provider:
        taken = await asyncio.gather(*(provider.take(Key(LOCK, f"n{n}"), "t", 60) for n in range(60)))
        assert all(isinstance(answer, Grant) for answer in taken)
    for _, port in nodes.addresses:
        async with Redis(port=port) as client:
            assert await client.dbsize() > 5


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        "localhost:6379/hunter2",
        "http://:hunter2@localhost",
        "redis:hunter2@localhost",
        "redis+ring://:hunter2@localhost",
        "redis://:hun/ter2@localhost",
        "redis://:hunter2?@localhost",
        "redis://localhost:hunter2",
        "redis://localhost:99999999",
        "redis://:hunter2@:6379",
        "redis://localhost/hunter2",
        "redis://localhost/0?hunter2=1",
        "redis://localhost/0?socket_timeout=hunter2",
        "redis://[::1/0",
        "redis+sentinel://:hunter2@localhost",
        "redis+sentinel://localhost/main/hunter2",
        "redis+cluster://:hunter2@localhost/1",
    ],
)
def test_a_url_that_cannot_work_is_refused_in_one_sentence_without_its_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="no usable Redis URL") as caught:
        RedisProvider(url)
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "\n" not in str(caught.value)


def test_what_is_no_url_and_no_client_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="from_client"):
        RedisProvider(Redis())  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match=r"redis\.asyncio"):
        RedisProvider.from_client(BlockingRedis())  # type: ignore[arg-type]  # on purpose


def test_the_environment_gives_the_address_when_no_argument_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("REDIS_URL", "VALKEY_URL", "REDIS_HOST", "REDIS_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match="REDIS_URL or VALKEY_URL"):
        RedisProvider()
    found = []
    for variable, value in [
        ("REDIS_HOST", "far"),
        ("REDIS_PORT", "7000"),
        ("VALKEY_URL", "valkey://near/1"),
        ("REDIS_URL", "redis://:pass@here/2"),
    ]:
        monkeypatch.setenv(variable, value)
        found.append(repr(RedisProvider()))
    assert found == [
        "<RedisProvider redis://far:6379>",
        "<RedisProvider redis://far:7000>",
        "<RedisProvider valkey://near/1>",
        "<RedisProvider redis://***@here/2>",
    ]


def test_providers_of_one_place_are_one_and_others_are_not() -> None:
    client = Redis()

    def identities(*providers: RedisProvider) -> int:
        return len({provider.identity() for provider in providers})

    one: dict[str, Any] = {"url": "redis://here/1"}
    assert identities(RedisProvider(**one), RedisProvider(**one)) == 1
    assert identities(RedisProvider.from_client(client), RedisProvider.from_client(client)) == 1
    assert identities(RedisProvider(**one), RedisProvider("redis://here/2"), RedisProvider(**one, prefix="b")) == 3
    assert (
        identities(RedisProvider.from_client(client), RedisProvider.from_client(Redis()), RedisProvider("redis://"))
        == 3
    )


def test_nothing_imports_redis_before_the_provider_is() -> None:
    code = "import sys, grel_core, grel_core.coordination; sys.exit('redis' in sys.modules or 'hiredis' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


async def test_a_grant_counts_only_when_enough_replicas_have_it(tmp_path: Path) -> None:
    with sentinel(tmp_path) as watched:
        address = f"127.0.0.1:{watched.watcher.port}/{watched.name}"
        provider = RedisProvider(f"redis+sentinel://{address}", replicas=1)
        async with provider, Lock("cart", backend=provider.lock()) as handle:
            await handle.extend()
        async with RedisProvider(f"redis+sentinel://{address}", replicas=2, backend_timeout=0.4) as provider:
            with pytest.raises(LockAcquireError):
                await Lock("order", backend=provider.lock()).acquire(timeout=0)

            async def free() -> bool:
                return not await provider.locked(Key(LOCK, "order"))

            await eventually(free)
    with pytest.raises(ValueError, match="replicas"):
        RedisProvider("redis://localhost", replicas=-1)
    with pytest.raises(CoordinationBackendError, match="replicas="):
        await RedisProvider("redis+cluster://localhost:1", replicas=1).__aenter__()
