"""Which app a request belongs to, what it holds, and whether its client is still there: one `Visit` per request."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from starlette.exceptions import HTTPException, WebSocketException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grel_core.app import Grelmicro
from grel_core.component import bound, current_app
from grel_core.coordination.tether import Tether
from grel_core.errors import NotStartedError, OutOfContextError

SCOPE_KEY = "grel"
LOOK_AFTER = 0.05
"""Seconds of waiting after which it is worth looking whether the client still waits."""
KEPT_BYTES = 1 << 16
"""Bytes of a body that are kept for the app while looking for the disconnect behind them."""


class Visit:
    """One request, or one WebSocket connection, from its arrival to its last byte.

    Looking whether its client has left takes no message from the app, and everyone who asks is told of a disconnect:
    hypercorn says it once, and then never answers again.
    """

    def __init__(self, micro: Grelmicro, scope: Scope, receive: Receive, send: Send) -> None:
        self.micro = micro
        self.responding = False
        """Whether the response has begun: no error can become the answer any more."""
        self.holdings: dict[object, Any] = {}
        """What this request holds, so that it takes nothing twice."""
        self._websocket = scope["type"] == "websocket"
        self._receive, self._send = receive, send
        self._kept: deque[Message] = deque()
        self._gone: Message | None = None
        self._turn = asyncio.Lock()
        self._look: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """The app's `send`."""
        if message["type"] == "http.response.start":
            self.responding = True
        await self._send(message)

    async def receive(self) -> Message:
        """The app's `receive`: each message once."""
        while not self._kept:
            if self._gone is not None:
                return self._gone
            await self._more(0)
        return self._kept.popleft()

    async def _more(self, have: int) -> None:
        """Let one message in, unless somebody else's turn brought one already."""
        async with self._turn:
            if len(self._kept) > have or self._gone is not None:
                return
            message = await self._receive()
            if message["type"] in {"http.disconnect", "websocket.disconnect"}:
                self._gone = message
            else:
                self._kept.append(message)

    async def _departure(self) -> None:
        """Return once the client has left. Never, if it sends too much meanwhile, or the server fails to say."""
        while self._gone is None:
            # A task of its own that outlives the look: a read that is cancelled could lose the message it waited for.
            look = self._look = self._look or asyncio.create_task(self._more(len(self._kept)), name="grel: look")
            await asyncio.wait([look])
            self._look = None
            if look.exception() or sum(len(message.get("body") or b"") for message in self._kept) > KEPT_BYTES:
                await asyncio.get_running_loop().create_future()

    @contextmanager
    def while_client_waits(self) -> Iterator[None]:
        """Cancel the body when the client leaves meanwhile, and raise what ends its request."""
        loop = asyncio.get_running_loop()
        watching: list[asyncio.Task[None]] = []
        with Tether() as tether:

            async def watch() -> None:
                await self._departure()
                tether.cut(WebSocketException(1001) if self._websocket else HTTPException(499, "Client left"))

            start = loop.call_later(LOOK_AFTER, lambda: watching.append(loop.create_task(watch(), name="grel: watch")))
            try:
                yield
            finally:
                start.cancel()
                for task in watching:
                    task.cancel()

    def close(self) -> None:
        """Look no more: the request is over."""
        if self._look is not None:
            self._look.cancel()


class Unstarted:
    """Stands where the app would, in a request that comes while the app is not open."""

    draining = False

    def get(self, kind: str, name: str = "default") -> NoReturn:
        """Nothing; says why."""
        raise NotStartedError(
            f"{kind} {name!r} is not open: the lifespan of this web app has not run. Either a test uses "
            "TestClient(app) without `with`, or httpx's ASGITransport without a lifespan (enter `async with micro:` "
            "around it); or the server runs with its lifespan off; or install() was called on a mounted sub-app, whose "
            "lifespan no server runs: call it on the root app"
        )


class Binding:
    """ASGI middleware, outside of all others, that makes `micro` the current app of every request."""

    def __init__(self, app: ASGIApp, micro: Grelmicro) -> None:
        self._app = app
        self._micro = micro

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outer: Visit | None = scope.get(SCOPE_KEY)
        if scope["type"] not in {"http", "websocket"} or (outer and outer.micro is self._micro):
            await self._app(scope, receive, send)
            return
        visit = scope[SCOPE_KEY] = Visit(self._micro, scope, receive, send)
        with bound(self._micro if self._micro.started else Unstarted(), request=True):
            try:
                await self._app(scope, visit.receive, visit.send)
            finally:
                visit.close()


def visit_of(connection: HTTPConnection) -> Visit:
    """The visit that `connection` is.

    Raises:
        OutOfContextError: no Grelmicro is installed on the app that got it.
    """
    visit: Visit | None = connection.scope.get(SCOPE_KEY)
    if visit is None:
        raise OutOfContextError("no Grelmicro is installed on this web app; call `micro.install(app)` where it is made")
    return visit


def current_micro() -> Grelmicro:
    """The app in whose scope this code runs, in a request or outside; errors as `Grelmicro.current` and `Unstarted`."""
    app = current_app()
    return app.get("election") if isinstance(app, Unstarted) else Grelmicro.current()
