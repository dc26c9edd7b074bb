"""How the script reaches the server: over one connection that everybody shares."""

import asyncio
import hashlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ResponseError

try:
    import hiredis
except ImportError:
    hiredis = None  # type: ignore[assignment]  # absent: every command goes through the client

logger = logging.getLogger("grel")

Argument = str | int
PAUSE = 0.05
"""Seconds before the first attempt to connect again; doubled up to a second while attempts fail."""
_NOTHING = object()


class UnfitError(ConnectionError):
    """The connection cannot be shared; the client's own commands will do."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What every link is told."""

    script: str
    timeout: float
    """Seconds within which every call is answered or raises."""
    channel: str
    """Where this process hears hints."""
    hint: Callable[[str | None], None]
    """Called with the key that may be free, or with None after a time in which hints may have been missed."""
    wanted: Callable[[], bool]
    """Whether anyone waits for hints."""
    replicas: int = 0
    """How many replicas must have a grant before it counts."""


GRANTING = {"take", "renew", "downgrade"}


class Link(ABC):
    """A way to the server. A call whose caller is cancelled goes on; a later one of the same token runs after it."""

    counts = True
    """Whether the server's PUBLISH counts every receiver."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.sha = hashlib.sha1(terms.script.encode(), usedforsecurity=False).hexdigest()
        self.loop = asyncio.get_running_loop()
        self.channel = ""
        """Where hints arrive; empty while they do not."""
        self.refusal: Exception | None = None
        """Why they cannot."""
        self._said = False

    @abstractmethod
    async def open(self) -> None:
        """Connect."""

    @abstractmethod
    async def close(self) -> None:
        """Let what is under way end, and disconnect."""

    @abstractmethod
    def call(self, key: str, arguments: list[Argument]) -> Awaitable[Any]:
        """Run the script on the record of `key`; the fourth of `arguments` is the token, where there is one."""

    async def listen(self) -> bool:
        """Whether hints arrive; says once when they cannot."""
        if self.refusal is not None and not self._said:
            self._said = True
            logger.warning("redis: waiters poll, since SUBSCRIBE was refused (%s)", type(self.refusal).__name__)
        return bool(self.channel)


class Call(NamedTuple):
    """A command on its way."""

    command: tuple[Any, ...]
    deadline: float
    answer: asyncio.Future[Any]


class Wire(asyncio.BufferedProtocol):
    """One live connection: commands leave in the order of the calls, and in that order answers come back."""

    def __init__(self, link: "Shared", connection: Any) -> None:
        """Take over what redis-py connected, greeted and authenticated.

        Raises:
            UnfitError: this redis-py keeps its stream elsewhere, or hiredis is missing or too old.
        """
        reader, writer = getattr(connection, "_reader", None), getattr(connection, "_writer", None)
        transport: Any = getattr(writer, "transport", None)
        if not hasattr(hiredis, "PushNotification") or not hasattr(transport, "set_protocol"):
            raise UnfitError
        if connection.protocol not in {3, "3"} or getattr(reader, "_buffer", True):
            raise UnfitError
        # From here on the stream is ours: redis-py would close it together with the connection.
        connection._reader = connection._writer = None
        self.gone = False
        self._link, self._loop, self._writer, self._transport = link, link.loop, writer, transport
        self._calls: deque[Call] = deque()
        self._outbox: list[bytes] = []
        self._buffer = memoryview(bytearray(65_536))
        self._parser: Any = hiredis.Reader(replyError=ResponseError, notEnoughData=_NOTHING)
        self._error: Exception = ConnectionError("the connection to Redis was lost")
        self._closed: asyncio.Future[None] = link.loop.create_future()
        transport.set_protocol(self)
        self._timer = link.loop.call_later(link.terms.timeout, self._tick)

    def send(self, *command: Argument) -> asyncio.Future[Any]:
        """Send a command. Whether its answer is waited for or not, the next one is behind it."""
        if self.gone:
            raise self._error
        call = Call(command, self._loop.time() + self._link.terms.timeout, self._loop.create_future())
        self._send(call)
        return call.answer

    def _send(self, call: Call) -> None:
        # Packed first: what cannot be sent must not wait for an answer, or it would get that of the next call.
        packed = hiredis.pack_command(call.command)
        self._calls.append(call)
        if len(self._calls) == 1:
            self._transport.write(packed)
            return
        # Something is in flight already: whatever else this loop iteration brings goes out in the same write.
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(packed)

    def _flush(self) -> None:
        packed, self._outbox = b"".join(self._outbox), []
        self._transport.write(packed)

    def get_buffer(self, _: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        try:
            self._parser.feed(self._buffer, 0, size)
            while (reply := self._parser.gets()) is not _NOTHING:
                if not isinstance(reply, hiredis.PushNotification):
                    self._answer(reply)
                elif reply[0] == b"message":
                    self._link.terms.hint(reply[2].decode())
                elif reply[0] == b"subscribe":
                    self._answer(reply)
        except (hiredis.ProtocolError, IndexError, ValueError):
            self.abort(ConnectionError("Redis sent what it was not asked for"))

    def _answer(self, reply: Any) -> None:
        call = self._calls.popleft()
        if not isinstance(reply, ResponseError):
            if not call.answer.done():
                call.answer.set_result(reply)
            return
        word = str(reply).partition(" ")[0]
        if word == "NOSCRIPT" and call.command[0] == "EVALSHA":
            if call.answer.cancelled():
                return  # it never ran, and what gives its claim back was sent already: it must not run after that
            self._send(call._replace(command=("EVAL", self._link.terms.script, *call.command[2:])))
            return
        if not call.answer.done():
            call.answer.set_exception(reply)
        if word == "READONLY":
            self.abort(ConnectionError("this Redis became a replica"))  # the next connection finds the primary

    def _tick(self) -> None:
        now = self._loop.time()
        if self._calls and self._calls[0].deadline <= now:
            self.abort(TimeoutError(f"Redis did not answer within {self._link.terms.timeout} s"))
            return
        if not self._calls and self._link.terms.wanted():
            self.send("PING").add_done_callback(asyncio.Future.exception)
        due = self._calls[0].deadline if self._calls else now + self._link.terms.timeout
        self._timer = self._loop.call_at(due, self._tick)

    def abort(self, error: Exception) -> None:
        """Give the connection up: what is in flight fails with `error`, its effect unknown."""
        if not self.gone:
            self.gone, self._error = True, error
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self.gone = True
        self._timer.cancel()
        calls, self._calls = self._calls, deque()
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(self._error)
        self._closed.set_result(None)
        self._link.lost()

    async def close(self) -> None:
        """Wait until everything sent was answered, then disconnect."""
        if self._calls and not self.gone:
            await asyncio.gather(self.send("PING"), return_exceptions=True)
        self._transport.close()
        await asyncio.wait([self._closed], timeout=1)
        self._transport.abort()
        await asyncio.wait([self._closed])


class Shared(Link):
    """One connection for all commands and all hints of this process."""

    def __init__(self, terms: Terms, pool: ConnectionPool) -> None:
        super().__init__(terms)
        self._pool = pool
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire] | None = None
        self._later: asyncio.TimerHandle | None = None
        self._pause = PAUSE
        self._closed = False

    async def open(self) -> None:
        await self._connected()

    def call(self, key: str, arguments: list[Argument]) -> Awaitable[Any]:
        wire = self._wire
        if wire is None or wire.gone or self.terms.replicas:
            return self._call_later(key, arguments)
        return wire.send("EVALSHA", self.sha, 2, key, key + ":r", *arguments)

    async def _call_later(self, key: str, arguments: list[Argument]) -> Any:
        # A caller that is cancelled while it waits for a connection has sent nothing.
        wire = self._wire
        if wire is None or wire.gone:
            wire = await self._connected()
        answer = wire.send("EVALSHA", self.sha, 2, key, key + ":r", *arguments)
        if self.terms.replicas and arguments[0] in GRANTING:
            # Behind the grant on the same connection, whose writes are what WAIT waits for.
            copies = await wire.send("WAIT", self.terms.replicas, round(self.terms.timeout * 500))
            if copies < self.terms.replicas:
                answer.cancel()
                raise ConnectionError(f"{copies} of {self.terms.replicas} replicas have it")
        return await answer

    async def _connected(self) -> Wire:
        """A live connection, which all who need one wait for together."""
        task = self._reconnect()
        await asyncio.wait([task])
        if self._closed:
            raise ConnectionError("the connection to Redis was closed")
        return task.result()

    def _reconnect(self) -> asyncio.Task[Wire]:
        if self._connecting is None:
            self._connecting = self.loop.create_task(self._connect(), name="grel: connect to Redis")
            self._connecting.add_done_callback(self._reconnected)
        return self._connecting

    async def _connect(self) -> Wire:
        if self._closed:
            raise ConnectionError("the connection to Redis was closed")
        connection, wire = self._pool.make_connection(), None
        heard: Any
        try:
            async with asyncio.timeout(self.terms.timeout):
                await connection.connect()
                wire = Wire(self, connection)
                # Where loading is not allowed, the first call is answered with NOSCRIPT and sent again as EVAL.
                greeting = wire.send("SCRIPT", "LOAD", self.terms.script), wire.send("SUBSCRIBE", self.terms.channel)
                _, heard = await asyncio.gather(*greeting, return_exceptions=True)
        except BaseException:
            if wire is not None:
                wire.abort(ConnectionError("Redis could not be greeted"))
            await connection.disconnect(nowait=True)
            raise
        self.refusal = heard if isinstance(heard, ResponseError) else None
        self.channel = "" if self.refusal else self.terms.channel
        return wire

    def _reconnected(self, task: asyncio.Task[Wire]) -> None:
        self._connecting = None
        if task.cancelled() or task.exception():
            self._pause = min(2 * self._pause, 1.0)
            self.lost()
        else:
            self._wire, self._pause = task.result(), PAUSE
            if self._later is not None:
                self._later.cancel()
            self.terms.hint(None)

    def lost(self) -> None:
        """Connect again a little later if anyone waits for hints; otherwise the next call does."""
        if self._later is not None:
            self._later.cancel()
        if self.terms.wanted() and not self._closed:
            self._later = self.loop.call_later(self._pause, self._reconnect)

    async def close(self) -> None:
        self._closed = True
        if self._later is not None:
            self._later.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._wire is not None:
            await self._wire.close()
