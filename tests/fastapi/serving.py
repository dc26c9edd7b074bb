"""A web app under test: its lifespan in a task of its own, as under a server, and requests message by message."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import httpx2

from grel_core import Grelmicro
from grel_core.providers.base import Provider
from tests.harness import eventually

Message = dict[str, Any]


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[dict[str, Any]]:
    """Run the lifespan of `app` around the body, as a server does; gives the lifespan's state."""
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    outbox: asyncio.Queue[Message] = asyncio.Queue()
    state: dict[str, Any] = {}
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": state}
    server = asyncio.create_task(app(scope, inbox.get, outbox.put))

    async def tell(what: str) -> None:
        await inbox.put({"type": f"lifespan.{what}"})
        answer = await outbox.get()
        if answer["type"] != f"lifespan.{what}.complete":
            await asyncio.wait([server])
            raise RuntimeError(answer["message"]) from server.exception()

    await tell("startup")
    try:
        yield state
    finally:
        await tell("shutdown")
        await server


@asynccontextmanager
async def serving(app: Any, *, state: dict[str, Any] | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of `app`, which is started."""
    async with started(app), client_of(app, state) as client:
        yield client


def client_of(app: Any, state: dict[str, Any] | None = None) -> httpx2.AsyncClient:
    """A client of `app`, started or not. Errors that nothing answers are 500, as from a server."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        # In a task of its own, as a server does: who calls in the same task would be one holder with the endpoint.
        await asyncio.create_task(app({**scope, "state": dict(state or {})}, receive, send))

    transport = httpx2.ASGITransport(served, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=None)


class Exchange:
    """One request of a client that may be slow, or leave.

    `async with Exchange(app, "/path") as exchange:` sends it; what the app sends is in `sent`.
    """

    def __init__(
        self,
        app: Any,
        path: str,
        *,
        method: str = "GET",
        body: Iterable[bytes] = (),
        websocket: bool = False,
        extensions: Iterable[str] = (),
        once: bool = False,
    ) -> None:
        self._app, self._once = app, once
        self.scope: dict[str, Any] = {
            "type": "websocket" if websocket else "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "ws" if websocket else "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"test")],
            "server": ("test", 80),
            "client": ("test", 1),
            "state": {},
            "subprotocols": [],
            "extensions": {name: {} for name in extensions},
        }
        chunks = list(body)
        first: Message = {"type": "websocket.connect"}
        requests = [
            {"type": "http.request", "body": chunk, "more_body": bool(rest)}
            for rest, chunk in zip(range(len(chunks) - 1, -1, -1), chunks, strict=True)
        ] or [{"type": "http.request", "body": b"", "more_body": False}]
        self.inbox: deque[Message] = deque([first] if websocket else requests)
        self._news = asyncio.Event()
        self._news.set()
        self.sent: list[Message] = []
        self.reading = asyncio.Event()
        """Cleared by a client that does not read: `send` then waits."""
        self.reading.set()

    async def receive(self) -> Message:
        """What the server gives to the app."""
        while not self.inbox:
            self._news.clear()
            await self._news.wait()
        if len(self.inbox) == 1 and self.inbox[0]["type"].endswith(".disconnect") and not self._once:
            return self.inbox[0]
        return self.inbox.popleft()

    async def send(self, message: Message) -> None:
        """What the app gives to the server."""
        await self.reading.wait()
        self.sent.append(message)

    def say(self, **message: Any) -> None:
        """Let the client send something."""
        self.inbox.append(message)
        self._news.set()

    def leave(self) -> None:
        """Let the client go away."""
        kind = self.scope["type"]
        self.say(type=f"{kind}.disconnect", **({"code": 1006} if kind == "websocket" else {}))

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self._app(self.scope, self.receive, self.send))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if not self.task.done():
            self.task.cancel()
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.exception()

    async def ended(self) -> Self:
        """Wait until the app is done with it."""
        await asyncio.wait([self.task], timeout=60)
        assert self.task.done()
        return self

    @property
    def status(self) -> int | None:
        """Of the response; None before it."""
        starts = [m for m in self.sent if m["type"] in {"http.response.start", "websocket.http.response.start"}]
        return starts[0]["status"] if starts else None

    @property
    def body(self) -> bytes:
        """Of the response so far."""
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def closed(self) -> tuple[int, str] | None:
        """Code and reason with which a WebSocket was closed."""
        closes = [message for message in self.sent if message["type"] == "websocket.close"]
        return (closes[0].get("code", 1000), closes[0].get("reason", "")) if closes else None


async def down(*_: object) -> Any:
    """What a store does that cannot be reached."""
    raise ConnectionError("redis://user:password@host")


@contextmanager
def broken(provider: Provider, how: Callable[..., Any] = down) -> Iterator[None]:
    """Let `provider` do `how` instead of its work."""
    provider.apply = how  # type: ignore[method-assign]  # a fake in its place
    try:
        yield
    finally:
        del provider.apply


async def passing(seconds: float) -> None:
    """Let virtual time pass, in one step."""
    loop = asyncio.get_running_loop()
    later: asyncio.Future[None] = loop.create_future()
    loop.call_later(seconds, later.set_result, None)
    await later


async def leading(micro: Grelmicro, name: str = "default") -> None:
    """Wait until the election of that name is won here."""
    await eventually(micro.election(name).is_leader, within=60, what=f"leading {name!r}")
