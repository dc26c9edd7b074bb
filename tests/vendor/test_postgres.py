"""What only PostgreSQL has: sessions and their settings, roles, replicas, poolers, transactions, dead rows."""

import asyncio
import logging
import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from grel_core.coordination import Lock, LockAcquireError, LockTimeoutError
from grel_core.errors import CoordinationBackendError
from grel_core.lease.names import ELECTION, LOCK, READWRITELOCK, SCHEDULE, Key
from grel_core.lease.rules import Busy, Grant
from grel_core.providers.postgres import PostgresProvider, schema_sql
from tests.harness import eventually
from tests.postgres_server import FAST, Postgres, postgres, replica

pytestmark = pytest.mark.anyio

Make = Callable[..., PostgresProvider]
CART = Key(LOCK, "cart")


@pytest.fixture(scope="module", params=[16, 18])
def server(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    with postgres(request.param, *FAST, "-c", "autovacuum=off") as running:
        yield running


@pytest.fixture
def schema() -> str:
    return f"s{secrets.token_hex(4)}"


@pytest.fixture
def make(server: Postgres, schema: str) -> Make:
    """A provider on the schema of this test; a second one stands for another process."""

    def provider(url: str | None = None, **options: Any) -> PostgresProvider:
        return PostgresProvider(url or server.url(), **{"schema": schema, **options})

    return provider


@asynccontextmanager
async def connected(server: Postgres, **options: str) -> Any:
    """A session beside those of the providers."""
    connection = await asyncpg.connect(server.url(**options))
    try:
        yield connection
    finally:
        await connection.close()


async def taken(provider: PostgresProvider, key: Key = CART, token: str = "a", seconds: float = 60) -> Grant:
    """The claim, which has to be free."""
    answer = await provider.take(key, token, seconds)
    assert isinstance(answer, Grant)
    return answer


# Who else uses the database, and how.


async def test_two_clients_with_different_time_zones_agree(server: Postgres, make: Make) -> None:
    east = make(server.url(timezone="Pacific/Kiritimati", datestyle="German"))
    west = make(server.url(timezone="America/New_York"))
    async with east, west:
        grant = await taken(east)
        busy = await west.take(CART, "b", 60)
        assert isinstance(busy, Busy)
        assert 55e6 < busy.remaining <= 60e6
        assert await east.drop(CART, "a")
        assert (await taken(west, token="b")).fence > grant.fence


async def test_tables_of_the_same_name_elsewhere_stay_as_they_are(server: Postgres, make: Make) -> None:
    async with connected(server) as session:
        for table in ("locks", "lease", "reader", "format"):
            await session.execute(f"DROP TABLE IF EXISTS {table}; CREATE TABLE {table} (id int PRIMARY KEY)")
            await session.execute(f"INSERT INTO {table} VALUES (1)")
        async with make() as provider:
            await taken(provider)
            await provider.take(Key(READWRITELOCK, "book"), "r", 60, shared=True)
        for table in ("locks", "lease", "reader", "format"):
            assert [tuple(row.items()) for row in await session.fetch(f"SELECT * FROM {table}")] == [(("id", 1),)]
            await session.execute(f"DROP TABLE {table}")


async def test_a_role_that_may_not_make_tables_works_on_a_ready_schema(
    server: Postgres, make: Make, schema: str
) -> None:
    role = f"app_{schema}"
    async with connected(server) as session:
        await session.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
        with pytest.raises(CoordinationBackendError, match="python -m grel_core schema postgres"):
            await make(server.url(user=role)).__aenter__()
        await session.execute(schema_sql(schema))
        for line in schema_sql(schema).splitlines():
            if line.startswith("--   GRANT"):
                await session.execute(line.removeprefix("--").replace("TO app", f"TO {role}"))
    for auto_migrate in (True, False):
        async with make(server.url(user=role), auto_migrate=auto_migrate) as provider:
            for number in range(50):
                await taken(provider, Key(LOCK, f"{number}"))
                await provider.drop(Key(LOCK, f"{number}"), "a")
            await provider.take(Key(READWRITELOCK, "book"), "a", 60, shared=True)


async def test_without_auto_migrate_nothing_is_made(make: Make) -> None:
    with pytest.raises(CoordinationBackendError, match="python -m grel_core schema postgres"):
        await make(auto_migrate=False).__aenter__()
    with pytest.raises(CoordinationBackendError):
        await make(auto_migrate=False).__aenter__()


async def test_the_printed_schema_may_be_run_again_and_keeps_what_is_there(
    server: Postgres, make: Make, schema: str
) -> None:
    async with connected(server) as session, make() as provider:
        grant = await taken(provider)
        await session.execute("SET client_min_messages = error")
        await session.execute(schema_sql(schema))
        assert await provider.renew(CART, "a", 60) == Grant(grant.fence)


async def test_an_open_transaction_that_read_the_tables_stops_no_start(
    server: Postgres, make: Make, schema: str
) -> None:
    async with make() as provider, connected(server) as session:
        await taken(provider)
        async with session.transaction():
            await session.fetch(f"SELECT * FROM {schema}.lease")
            async with asyncio.timeout(2), make(backend_timeout=1) as other:
                assert isinstance(await other.take(CART, "b", 60), Busy)
                assert await provider.drop(CART, "a")


def test_six_processes_that_start_first_at_once_all_start(server: Postgres, schema: str) -> None:
    program = (
        "import asyncio, sys\n"
        "from grel_core.providers.postgres import PostgresProvider\n"
        "from grel_core.lease.names import LOCK, Key\n"
        "async def main():\n"
        "    print('ready', flush=True); sys.stdin.readline()\n"
        "    async with PostgresProvider(sys.argv[1], schema=sys.argv[2]) as provider:\n"
        "        print(await provider.take(Key(LOCK, 'one'), sys.argv[3], 60))\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-W", "error", "-c", program, server.url(), schema]
    pipe = subprocess.PIPE
    starting = [
        subprocess.Popen([*command, f"{number}"], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for number in range(6)
    ]
    for process in starting:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in starting:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in starting:
        out, problems = process.communicate(timeout=30)
        assert (process.returncode, problems) == (0, "")
        outputs.append(out)
    assert sum("Grant" in out for out in outputs) == 1
    assert sum("Busy" in out for out in outputs) == 5


async def test_a_newer_format_is_refused(server: Postgres, make: Make, schema: str) -> None:
    async with make():
        pass
    async with connected(server) as session:
        await session.execute(f"UPDATE {schema}.format SET version = 99")
    with pytest.raises(CoordinationBackendError, match="newer version"):
        await make().__aenter__()


async def test_settings_of_the_role_change_nothing(server: Postgres, make: Make) -> None:
    odd = {"default_transaction_isolation": "serializable", "default_transaction_read_only": "on"}
    async with make() as plain, make(server.url(**odd, synchronous_commit="off")) as provider:
        connection = provider._connection.session.connection  # type: ignore[union-attr]  # it is open
        assert await connection.fetchval("SHOW synchronous_commit") == "on"
        for _ in range(20):
            first, second = await asyncio.gather(plain.take(CART, "a", 60), provider.take(CART, "b", 60))
            assert {type(first), type(second)} == {Grant, Busy}
            assert await plain.drop(CART, "a") != await provider.drop(CART, "b")


async def test_a_replica_is_refused(server: Postgres, make: Make) -> None:
    async with make() as provider:
        await taken(provider)
        with replica(server) as standby:
            with pytest.raises(CoordinationBackendError, match="replica"):
                await make(standby.url()).__aenter__()
            async with make(f"{server.url(target_session_attrs='primary')}") as other:
                assert isinstance(await other.take(CART, "b", 60), Busy)


# What is lost, and what is found again.


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_waiters_survive_a_restart_of_the_server(server: Postgres, make: Make, mode: str) -> None:
    async with make() as holder, make() as provider:
        held = Lock("cart", backend=holder.lock(), lease_duration=60)
        handle = await held.acquire()

        async def visit() -> None:
            async with Lock("cart", backend=provider.lock()).hold(timeout=20):
                pass

        waiting = [asyncio.create_task(visit()) for _ in range(20)]
        await eventually(lambda: provider.lines.waiting(CART) == 20)
        await asyncio.to_thread(server.restart, mode)
        await handle.release()
        await asyncio.gather(*waiting)


async def test_a_waiter_whose_session_ends_is_woken_all_the_same(server: Postgres, make: Make) -> None:
    loop = asyncio.get_running_loop()
    async with make() as holder, make() as provider, connected(server) as session:
        handle = await Lock("cart", backend=holder.lock()).acquire()
        waiting = asyncio.create_task(Lock("cart", backend=provider.lock()).acquire(timeout=20))

        async def in_line() -> bool:
            return bool((await holder.peek(CART))[0].waiters)

        await eventually(in_line)
        who = provider._connection.session.who  # type: ignore[union-attr]  # it is open
        assert who is not None
        await session.fetchval("SELECT pg_terminate_backend($1, 2000)", who[0])
        await eventually(lambda: getattr(provider._connection.session, "who", who) != who)
        await eventually(lambda: bool(provider._connection.channel))
        began = loop.time()
        await handle.release()
        second = await waiting
        assert loop.time() - began < 0.5
        assert second.fencing_token > handle.fencing_token


async def test_a_server_that_does_not_answer_costs_no_more_than_the_timeout(server: Postgres, make: Make) -> None:
    loop = asyncio.get_running_loop()
    async with make(backend_timeout=0.5) as provider:
        await provider.check()
        with server.paused():
            began = loop.time()
            with pytest.raises(TimeoutError):
                await provider.take(CART, "a", 60)
            assert loop.time() - began < 1
            with pytest.raises(LockAcquireError):
                await Lock("cart", backend=provider.lock()).acquire(timeout=1)
            assert loop.time() - began < 2.5

        async def free() -> bool:
            return not await provider.locked(CART)

        await eventually(free)
        await taken(provider, token="b")


async def test_what_was_given_up_ends_before_anything_new_begins(server: Postgres, make: Make, schema: str) -> None:
    async with make(backend_timeout=1) as provider, connected(server) as session, connected(server) as beside:
        await taken(provider)
        await provider.drop(CART, "a")
        async with session.transaction():
            await session.fetch(f"SELECT * FROM {schema}.lease FOR UPDATE")
            who = provider._connection.session.who  # type: ignore[union-attr]  # it is open
            with pytest.raises(TimeoutError):
                await provider.take(CART, "b", 60)
            dropping = asyncio.create_task(provider.drop(CART, "b"))
            asked = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%apply_v1%' AND pid = $1"

            async def gone() -> bool:
                return not await beside.fetchval(asked, who[0])  # type: ignore[index]  # no pooler is in between

            await eventually(gone, within=0.8)
        assert not await dropping
        # Had the first one gone on, it would hold the lock by now.
        assert (await provider.peek(CART))[0].holder is None


async def test_a_cancelled_caller_stops_no_rule(server: Postgres, make: Make, schema: str) -> None:
    async with make() as provider, connected(server) as session:
        await taken(provider)
        await provider.drop(CART, "a")
        async with session.transaction():
            await session.fetch(f"SELECT * FROM {schema}.lease FOR UPDATE")
            taking = asyncio.create_task(provider.take(CART, "b", 60))
            dropping = asyncio.create_task(provider.drop(CART, "b"))
            await eventually(lambda: provider._connection._running is not None)
            taking.cancel()
            await asyncio.wait([taking])
        assert await dropping
        assert (await provider.peek(CART))[0].transitions == 1


# What it costs.


async def test_a_process_has_one_connection_and_no_more(server: Postgres, make: Make) -> None:
    async with connected(server) as session, make() as holder, make() as provider:

        async def sessions() -> int:
            asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'grel'"
            return int(await session.fetchval(asked))

        await Lock("cart", backend=holder.lock()).acquire()
        waiting = [asyncio.create_task(Lock("cart", backend=provider.lock()).acquire()) for _ in range(20)]
        others = [asyncio.create_task(Lock(f"{n}", backend=provider.lock()).acquire()) for n in range(50)]
        await asyncio.wait(others)
        assert await sessions() == 2
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_a_refusal_writes_nothing(server: Postgres, make: Make, schema: str) -> None:
    async with make() as provider, connected(server) as session:
        await taken(provider)
        await provider.take(Key(READWRITELOCK, "read"), "a", 60, shared=True)
        await provider.take(Key(READWRITELOCK, "read"), "w", 60, queue=60)
        await provider.advance(Key(SCHEDULE, "tick"), 5)
        calls = [
            ("take", CART, 60_000_000, False),
            ("take", Key(READWRITELOCK, "read"), 60_000_000, False),
            ("take", Key(READWRITELOCK, "read"), 60_000_000, True),
            ("advance", Key(SCHEDULE, "tick"), 5, False),
        ]
        for verb, key, amount, shared in calls:
            async with session.transaction():
                answer = await session.fetchval(
                    f"SELECT {schema}.apply_v1($1, $2, 60000000, 'z', $3, $4, 0, '', 100000, '{{}}')",
                    verb, key.text("grel"), amount, shared,
                )  # fmt: skip
                assert answer[0] == 0
                assert await session.fetchval("SELECT pg_current_xact_id_if_assigned()") is None
                locks = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode ~ 'Exclusive|RowShare' AND locktype = 'relation'"  # noqa: E501 - one statement
                assert await session.fetchval(locks) == 0


async def test_nobody_is_notified_unless_somebody_waits(server: Postgres, make: Make) -> None:
    heard: list[str] = []
    async with make() as holder, make() as provider, connected(server) as session:
        for each in (holder, provider):
            assert await each.listen()
            await session.add_listener(each._connection.channel, lambda *what: heard.append(what[3]))
        for _ in range(20):
            await taken(holder)
            assert isinstance(await provider.take(CART, "b", 60), Busy)
            await holder.drop(CART, "a")
        await session.execute("SELECT 1")
        assert heard == []
        await taken(holder)
        await provider.take(CART, "b", 60, queue=60)
        await holder.drop(CART, "a")
        await eventually(lambda: heard == [CART.text("grel")])


async def work(session: Any, schema: str, call: str) -> int:
    """Rows and pages of ours that `call` looks at or changes."""
    counters = "sum(seq_tup_read + coalesce(idx_tup_fetch, 0) + n_tup_ins + n_tup_upd + n_tup_del)"
    transaction = session.transaction()
    await transaction.start()
    try:
        asked = f"SELECT {counters} FROM pg_stat_xact_user_tables WHERE schemaname = $1"
        before = await session.fetchval(asked, schema) or 0
        assert await session.fetchval(f"SELECT {schema}.{call}") is not None
        return int(await session.fetchval(asked, schema) - before)
    finally:
        await transaction.rollback()


async def test_a_thousand_readers_cost_what_one_costs(server: Postgres, make: Make, schema: str) -> None:
    key = Key(READWRITELOCK, "book")
    text = key.text("grel").replace("'", "''")
    after = "60000000, 'r0', {amount}, true, 0, '', 100000, '{{}}')"
    calls = {
        "join": f"apply_v1('take', '{text}', 60000000, 'new', 60000000, true, 0, '', 100000, '{{}}')",
        "renew": f"apply_v1('renew', '{text}', {after.format(amount=60000000)}",
        "leave": f"apply_v1('release', '{text}', {after.format(amount=0)}",
        "refuse": f"apply_v1('take', '{text}', 60000000, 'w', 60000000, false, 0, '', 100000, '{{}}')",
    }
    async with make() as provider, connected(server) as session:
        await session.execute("SET plan_cache_mode = force_generic_plan")
        await provider.take(key, "r0", 600, shared=True)
        few = {name: await work(session, schema, call) for name, call in calls.items()}
        for number in range(1, 1000):
            await provider.take(key, f"r{number}", 600, shared=True)
        many = {name: await work(session, schema, call) for name, call in calls.items()}
        print(few, many)
        assert all(many[name] <= 1.5 * few[name] + 1 for name in calls)
        assert len((await provider.peek(key))[0].readers) == 1000


async def test_a_busy_row_is_updated_in_place(server: Postgres, make: Make, schema: str) -> None:
    async with make() as provider, connected(server) as session:
        for _ in range(500):
            await taken(provider)
            await provider.drop(CART, "a")
        await session.execute("SELECT pg_stat_force_next_flush()")

        async def counted() -> Any:
            asked = (
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = 'lease'"
            )
            return await session.fetchrow(asked, schema)

        async def complete() -> bool:
            await provider.check()
            return int((await counted())["n_tup_upd"]) >= 900

        await eventually(complete)
        updates, hot = await counted()
        print(f"{hot} of {updates} updates in place")
        assert hot >= 0.99 * updates
        assert await session.fetchval(f"SELECT pg_total_relation_size('{schema}.lease')") <= 10 * 8192


async def test_names_go_as_fast_as_they_come(server: Postgres, make: Make, schema: str) -> None:
    async with make(retention=0.1) as provider, connected(server) as session:
        for number in range(3000):
            await taken(provider, Key(LOCK, f"order:{number}"))
            await provider.drop(Key(LOCK, f"order:{number}"), "a")
        left = await session.fetchval(f"SELECT count(*) FROM {schema}.lease")
        print(f"{left} of 3000 rows left")
        assert left < 1500
        plan = await session.fetch(
            f"EXPLAIN SELECT key FROM {schema}.lease WHERE ctid >= '(1,0)'::tid AND ctid < '(2,0)'::tid AND last <= 1"
        )
        assert "Tid Range Scan" in str(plan)


# Connections of the user's.


async def test_a_pool_that_is_used_up_by_those_who_lock_is_no_deadlock(
    server: Postgres, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncpg.create_pool(server.url(), min_size=0, max_size=4) as pool:
        provider = PostgresProvider.from_pool(pool, schema=schema)
        async with provider:

            async def handler() -> None:
                async with pool.acquire() as connection, connection.transaction():
                    await connection.fetchval("SELECT 1")
                    await everyone.wait()
                    async with Lock("cart", backend=provider.lock()).hold(timeout=5):
                        await connection.fetchval("SELECT 1")

            everyone = asyncio.Barrier(3)
            async with asyncio.timeout(10):
                await asyncio.gather(handler(), handler(), handler())
            assert repr(provider) == "<PostgresProvider on a given pool>"
        assert pool.get_size() - pool.get_idle_size() == 0
        async with pool.acquire() as connection:
            assert await connection.fetchval("SELECT 1") == 1
    assert not caplog.records


async def test_an_engine_that_is_used_up_by_those_who_lock_is_no_deadlock(server: Postgres, schema: str) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy.ext.asyncio")
    text = pytest.importorskip("sqlalchemy").text
    url = server.url().replace("postgresql://", "postgresql+asyncpg://")
    engine = sqlalchemy.create_async_engine(url, pool_size=4, max_overflow=0)
    provider = PostgresProvider.from_engine(engine, schema=schema)
    try:
        async with provider:

            async def handler() -> None:
                async with engine.begin() as connection:
                    await connection.execute(text("SELECT 1"))
                    await everyone.wait()
                    async with Lock("cart", backend=provider.lock()).hold(timeout=5):
                        await connection.execute(text("SELECT 1"))

            everyone = asyncio.Barrier(3)
            async with asyncio.timeout(10):
                await asyncio.gather(handler(), handler(), handler())
        assert engine.pool.checkedout() == 0
    finally:
        await engine.dispose()


async def test_a_connection_of_a_pool_that_is_lost_is_replaced(server: Postgres, schema: str) -> None:
    async with (
        asyncpg.create_pool(server.url(), min_size=0, max_size=2) as pool,
        connected(server) as session,
        PostgresProvider.from_pool(pool, schema=schema) as provider,
    ):
        await taken(provider)
        who = provider._connection.session.who  # type: ignore[union-attr]  # it is open
        await session.fetchval("SELECT pg_terminate_backend($1, 2000)", who[0])  # type: ignore[index]  # no pooler
        with pytest.raises(LockTimeoutError):
            await Lock("cart", backend=provider.lock()).acquire(timeout=0.3)
        assert await provider.drop(CART, "a")


def test_what_is_not_theirs_is_refused() -> None:
    with pytest.raises(TypeError, match=r"asyncpg\.Pool"):
        PostgresProvider.from_pool("postgresql://localhost")
    with pytest.raises(TypeError, match="AsyncEngine"):
        PostgresProvider.from_engine("postgresql://localhost")


# Addresses.


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
async def test_every_spelling_of_the_scheme_works(server: Postgres, schema: str, scheme: str) -> None:
    url = server.url().replace("postgresql", scheme, 1) + "?ssl=disable"
    async with PostgresProvider(url, schema=schema) as provider:
        await provider.check()


def test_other_schemes_and_schemas_are_refused() -> None:
    with pytest.raises(ValueError, match="mysql"):
        PostgresProvider("mysql://user:secret@localhost/app")
    with pytest.raises(ValueError, match="schema"):
        PostgresProvider("postgresql://localhost", schema='x"; DROP TABLE users; --')


def test_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("POSTGRES_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="POSTGRES_URL"):
        PostgresProvider()
    monkeypatch.setenv("POSTGRES_HOST", "db")
    monkeypatch.setenv("POSTGRES_USER", "shop")
    monkeypatch.setenv("POSTGRES_PASSWORD", "p@ss/word")
    monkeypatch.setenv("POSTGRES_DB", "orders")
    assert PostgresProvider()._url == "postgresql://shop:p%40ss%2Fword@db:5432/orders"
    monkeypatch.setenv("POSTGRES_URL", "postgres://elsewhere/app")
    assert PostgresProvider()._url == "postgresql://elsewhere/app"


async def test_a_password_is_never_shown(server: Postgres, schema: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    provider = PostgresProvider(server.url(password="hunter2"), schema=schema)
    with pytest.raises(CoordinationBackendError) as caught:
        await provider.__aenter__()
    assert "hunter2" not in f"{caught.value} {provider!r} {caplog.text}"
    assert "grel:" not in repr(provider)


async def test_providers_of_one_address_are_one(server: Postgres) -> None:
    assert PostgresProvider(server.url()).identity() == PostgresProvider(server.url()).identity()
    assert PostgresProvider(server.url()).identity() != PostgresProvider(server.url(), schema="other").identity()


def test_the_example_says_what_it_promises(server: Postgres) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "postgres.py"
    environment = {**os.environ, "POSTGRES_URL": server.url()}
    command = [sys.executable, "-W", "error", str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    promised = script.read_text().partition("It says:\n\n")[2].partition('"""')[0]
    assert (run.stdout, run.stderr) == (textwrap.dedent(promised), "")


def test_what_passes_and_what_does_not() -> None:
    provider = PostgresProvider("postgresql://localhost")
    passing = ["08006", "57P01", "57P02", "57P03", "53300", "53100", "40001", "40P01", "55P03", "57014", "25006"]
    lasting = ["28P01", "28000", "42501", "42P01", "3F000", "3D000", "42883", "22023"]
    errors = {code: asyncpg.PostgresError.new({"C": code, "M": "so"}) for code in passing + lasting}
    assert [code for code in passing if not provider.transient(errors[code])] == []
    assert [code for code in lasting if provider.transient(errors[code])] == []
    assert provider.transient(ConnectionRefusedError())
    assert provider.transient(TimeoutError())


# Poolers.


async def test_a_pooler_that_is_told_of_is_polled_and_gets_no_prepared_statements(
    server: Postgres, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with make() as holder, make(pgbouncer=True) as provider, AsyncExitStack() as stack:
        handle = await Lock("cart", backend=holder.lock()).acquire()
        session = await stack.enter_async_context(connected(server))
        waiting = asyncio.create_task(Lock("cart", backend=provider.lock()).acquire(timeout=5))
        await eventually(lambda: "waiters poll" in caplog.text)
        assert not await provider.listen()
        await handle.release()
        await (await waiting).release()
        connection = provider._connection.session.connection  # type: ignore[union-attr]  # it is open
        assert await connection.fetchval("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''") == 0
        assert caplog.text.count("waiters poll") == 1
        assert await session.fetchval("SELECT 1") == 1
        await provider.take(Key(ELECTION, "jobs"), "a", 60)


@pytest.mark.external
async def test_pgbouncer_in_transaction_mode_is_found_out(
    server: Postgres, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.postgres_server import pgbouncer

    with pgbouncer(server) as url:
        async with make(url) as one, make(url) as two, make() as direct:
            handle = await Lock("cart", backend=one.lock()).acquire()
            waiting = [asyncio.create_task(Lock("cart", backend=two.lock()).acquire(timeout=10))]
            waiting += [asyncio.create_task(Lock("cart", backend=direct.lock()).acquire(timeout=10))]
            await eventually(lambda: "waiters poll" in caplog.text)
            await handle.release()
            for done in asyncio.as_completed(waiting):
                await (await done).release()
            for number in range(100):
                await asyncio.gather(*(taken(each, Key(LOCK, f"{number}{each!r}{id(each)}")) for each in (one, two)))
            assert caplog.text.count("waiters poll") == 1
