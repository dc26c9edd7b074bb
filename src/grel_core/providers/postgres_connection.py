"""How rules reach the server: over one connection that everybody shares, one statement after the other."""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, NamedTuple, Protocol

import asyncpg

from grel_core.errors import CoordinationBackendError

logger = logging.getLogger("grel")

SQL = resources.files(__package__).joinpath("postgres.sql").read_text(encoding="utf-8")
FORMAT = 1
"""Of the records. A newer library reads and keeps older ones; this one refuses newer ones."""
OLDEST = 140_000
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('schema grel', 0));"
"""Held while the schema is made: processes that start at once take turns."""
VERSION = "SELECT max(version) FROM grel.format"
# From the catalog alone: nobody is waited for, and nothing is asked of a schema that may not be there.
FACTS = """
SELECT pg_backend_pid() AS pid,
  (SELECT extract(epoch FROM backend_start)::text FROM pg_stat_activity WHERE pid = pg_backend_pid()) AS began,
  pg_is_in_recovery() AS replica,
  current_setting('server_version_num')::int AS version,
  EXISTS (
    SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.proname = 'apply_v1'
  ) AS ready
"""
SETTINGS = """
SELECT set_config('default_transaction_isolation', 'read committed', false),
  set_config('default_transaction_read_only', 'off', false),
  set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)
"""
END = """
SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity
WHERE pid = $1 AND extract(epoch FROM backend_start)::text = $2
"""
BROKEN = (
    OSError,
    asyncpg.InterfaceError,  # also for arguments that do not fit, but then it is a ValueError, too
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.ReadOnlySQLTransactionError,  # it became a replica: the next connection may find the primary
)
"""What ends a session."""
VENDOR = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)
REPLICA = "this PostgreSQL is a replica; give the address of the primary"
CURE = "run the SQL that `python -m grel_core schema postgres` prints, once, as the owner of the database"


def located(sql: str, schema: str) -> str:
    """`sql` for the schema of that name."""
    return re.sub(r"\bgrel\b", f'"{schema}"', sql)


class Source(Protocol):
    """Where connections come from and go to."""

    async def take(self, timeout: float) -> Any:
        """A connection of asyncpg, to keep."""

    async def leave(self, connection: Any) -> None:
        """Give it back, alive or not."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a connection is told."""

    source: Source
    schema: str
    sql: str
    timeout: float
    """Seconds within which every call is answered or raises."""
    auto_migrate: bool
    pooled: bool | None
    """Whether a pooler is in between that gives each transaction another session; None: find out."""
    channel: str
    """Where this process hears hints."""
    hint: Callable[[str | None], None]
    """Called with the key that may be free, or with None after a time in which hints may have been missed."""


class Session:
    """One session on the server, from its greeting to its loss."""

    def __init__(self, terms: Terms, connection: Any) -> None:
        self.terms, self.connection = terms, connection
        self.pooled = bool(terms.pooled)
        self.hears = self.lost = False
        self.who: tuple[int, str] | None = None
        """How the server tells it from all others; None behind a pooler."""
        self._statements: dict[str, Any] = {}

    async def greet(self, before: "Session | None") -> None:
        """Make sure that this is a primary with our schema, and that the session `before` runs nothing any more."""
        facts = await self.connection.fetchrow(FACTS, self.terms.schema)
        if facts["version"] < OLDEST:
            raise CoordinationBackendError("this PostgreSQL is older than 14; leases need a newer one: upgrade it")
        if facts["replica"]:
            raise ConnectionError(REPLICA)
        if self.terms.pooled is None:
            self.pooled = facts["pid"] != self.connection.get_server_pid()
        if not self.pooled:
            self.who = facts["pid"], facts["began"]
            await self.connection.fetchrow(SETTINGS)
            if before is not None and before.who is not None:
                await self.connection.fetchval(END, *before.who)
        if not facts["ready"]:
            await self._migrate()
        if await self.connection.fetchval(located(VERSION, self.terms.schema)) > FORMAT:
            raise CoordinationBackendError(
                f"the schema {self.terms.schema!r} comes from a newer version of this library; upgrade this process too"
            )
        self.connection.add_termination_listener(self._ended)

    async def _migrate(self) -> None:
        schema = self.terms.schema
        if not self.terms.auto_migrate:
            raise CoordinationBackendError(f"there are no leases in the schema {schema!r} yet; {CURE}")
        try:
            async with self.connection.transaction():
                await self.connection.execute(located(LOCK, schema))
                if not (await self.connection.fetchrow(FACTS, schema))["ready"]:
                    await self.connection.execute(located(self.terms.sql, schema))
        except asyncpg.InsufficientPrivilegeError as error:
            raise CoordinationBackendError(f"this role may not make the schema {schema!r}; {CURE}") from error

    async def listen(self) -> None:
        """Hear hints from now on."""
        await self.connection.add_listener(self.terms.channel, self._hear)
        self.hears = True

    async def run(self, statement: str, arguments: tuple[Any, ...]) -> Any:
        """The one value that `statement` gives, in one round trip."""
        prepared = self._statements.get(statement)
        if prepared is None:
            # Without a name it is sent again each time, and never looked for in a session that does not have it.
            name = "" if self.pooled else f"{self.terms.channel}:{len(self._statements)}"
            prepared = self._statements[statement] = await self.connection.prepare(statement, name=name)
        return await prepared.fetchval(*arguments)

    def abort(self) -> None:
        """Give the connection up: the effect of what is in flight is unknown."""
        self.lost = True
        with suppress(asyncpg.InterfaceError):  # a pool has taken back what was lost
            self.connection.terminate()

    async def leave(self) -> None:
        """Give the connection back."""
        with suppress(*VENDOR):
            self.connection.remove_termination_listener(self._ended)
            if self.hears and not self.lost:
                async with asyncio.timeout(1):
                    await self.connection.remove_listener(self.terms.channel, self._hear)
        self.lost = True
        with suppress(*VENDOR):
            await self.terms.source.leave(self.connection)

    def _hear(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        self.terms.hint(payload)

    def _ended(self, _connection: Any) -> None:
        self.lost = True
        self.terms.hint(None)


def drive(coroutine: Coroutine[Any, Any, Any], done: Callable[[Any, BaseException | None], None]) -> None:
    """Run a coroutine of asyncpg without a task: what it sends is sent at once, and nobody can cancel it."""

    def step(_: "asyncio.Future[Any] | None" = None) -> None:
        try:
            waits_for = coroutine.send(None)
        except StopIteration as stop:
            done(stop.value, None)
        except Exception as error:  # noqa: BLE001 - handed to the one who waits
            done(None, error)
        else:
            waits_for._asyncio_future_blocking = False  # what a task does, too: the future is waited for properly
            waits_for.add_done_callback(step)

    step()


class Job(NamedTuple):
    """A statement on its way, and who waits for its answer."""

    statement: str
    arguments: tuple[Any, ...]
    answer: asyncio.Future[Any]
    timer: asyncio.TimerHandle


class Connection:
    """The one connection of this process, made anew when it is needed and was lost.

    Statements run one after the other in the order of the calls; one whose caller is cancelled goes on. What was given
    up is ended on the server before anything else is sent, so that this order holds even then.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.loop = asyncio.get_running_loop()
        self.session: Session | None = None
        self._jobs: deque[Job] = deque()
        self._running: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._idle = asyncio.Event()
        self._listens = self._said = self._closed = False

    async def open(self) -> None:
        """Connect."""
        self._idle.set()
        await self._connect()

    async def close(self) -> None:
        """Let what was asked for end, and disconnect."""
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.terms.timeout):
                await self._idle.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.session is not None:
            await self.session.leave()

    async def call(self, statement: str, *arguments: Any) -> Any:
        """The one value that `statement` gives; an empty one only makes sure of the connection."""
        if self._closed:
            raise ConnectionError("the connection to PostgreSQL was closed")
        answer = self.loop.create_future()
        timer = self.loop.call_later(self.terms.timeout, self._expire, answer)
        self._jobs.append(Job(statement, arguments, answer, timer))
        if self._running is None:
            self._next()
        return await answer

    async def listen(self) -> bool:
        """Whether hints arrive; says once when they cannot."""
        self._listens = True
        if not self._ready():
            await self.call("")
        if not self.channel and not self._said:
            self._said = True
            logger.warning("postgres: waiters poll, since a pooler such as pgbouncer lets no hints through")
        return bool(self.channel)

    @property
    def channel(self) -> str:
        """Where hints arrive; empty while they do not."""
        return self.terms.channel if self.session is not None and self.session.hears else ""

    def _expire(self, answer: "asyncio.Future[Any]") -> None:
        if not answer.done():
            answer.set_exception(TimeoutError(f"PostgreSQL did not answer within {self.terms.timeout} s"))
        if self._running is answer and self.session is not None:
            self.session.abort()

    def _ready(self) -> bool:
        """Whether the next statement can go out at once."""
        session = self.session
        return session is not None and not session.lost and (session.hears or session.pooled or not self._listens)

    def _next(self) -> None:
        """Start the first job that is still waited for. Several could share one statement here."""
        while self._jobs:
            job = self._jobs.popleft()
            if job.answer.done():
                job.timer.cancel()
                continue
            self._running = job.answer
            self._idle.clear()
            if self._ready():
                drive(self._run(job), partial(self._settle, job))
            else:
                self._task = self.loop.create_task(self._run(job), name="grel: connect to PostgreSQL")
                self._task.add_done_callback(partial(self._connected, job))
            return
        self._idle.set()

    def _connected(self, job: Job, task: "asyncio.Task[Any]") -> None:
        self._task = None
        error = ConnectionError("the connection to PostgreSQL was closed") if task.cancelled() else task.exception()
        self._settle(job, None if error else task.result(), error)

    def _settle(self, job: Job, value: Any, error: BaseException | None) -> None:
        self._running = None
        job.timer.cancel()
        if not job.answer.done():
            if error is None:
                job.answer.set_result(value)
            else:
                job.answer.set_exception(error)
        self._next()

    async def _run(self, job: Job) -> Any:
        session = self.session
        if session is None or session.lost:
            session = await self._connect()
        try:
            if self._listens and not session.hears and not session.pooled:
                await session.listen()
            if job.answer.done() or not job.statement:
                return None
            return await session.run(job.statement, job.arguments)
        except BROKEN as error:
            if isinstance(error, ValueError):
                raise
            session.abort()
            raise ConnectionError("the connection to PostgreSQL was lost") from error

    async def _connect(self) -> Session:
        before, self.session = self.session, None
        try:
            async with asyncio.timeout(self.terms.timeout):
                if before is not None:
                    await before.leave()
                session = Session(self.terms, await self.terms.source.take(self.terms.timeout))
                try:
                    await session.greet(before)
                except BaseException:
                    session.abort()
                    await session.leave()
                    raise
        except BaseException:
            self.session = before  # lost, but known: what it runs must end before the next one begins
            raise
        self.session = session
        self.terms.hint(None)
        return session
