"""What an app is made of, and which app is current."""

import asyncio
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from grel_core.errors import CoordinationBackendError, NotStartedError, OutOfContextError, ShuttingDownError


@runtime_checkable
class Component(Protocol):
    """Something that an app opens and closes, filed under its kind and name."""

    @property
    def kind(self) -> str:
        """What sort of thing it is: `micro.coordination` is the default component of kind `coordination`."""
        ...

    @property
    def name(self) -> str:
        """Which one of its kind; `default` unless said otherwise."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


@runtime_checkable
class Task(Protocol):
    """Something that runs for as long as the app is open. When it raises, it is started again."""

    @property
    def name(self) -> str:
        """What it is called in logs and health."""
        ...

    async def run(self) -> None:
        """Run until cancelled."""
        ...


class App(Protocol):
    """What components and primitives may ask of the app that they live in."""

    draining: bool

    def get(self, kind: str, name: str = "default") -> Any:
        """The component of that kind and name."""
        ...


_current: ContextVar[tuple[App, ...]] = ContextVar("grel_current_apps", default=())
"""The apps in whose scope this code runs, the innermost one last."""
_request: ContextVar["Request | None"] = ContextVar("grel_request", default=None)
_installed: list[App] = []
"""Open apps that were installed into a framework: code that runs outside of any request finds them here."""


def current_app() -> App:
    """The app in whose scope this code runs: the innermost one, else the only installed one that is open.

    Raises:
        OutOfContextError: there is none, or several could be meant.
    """
    if apps := _current.get():
        return apps[-1]
    if len(_installed) == 1:
        return _installed[0]
    what = "several installed apps are open, and" if _installed else "no app is open here:"
    raise OutOfContextError(
        f"{what} nothing says where coordination is kept; run this inside `async with micro:`, in a request of an app "
        "that `micro.install(app)` was called on, or give `backend=`"
    )


class Request:
    """Stands for one request of a web app, in whichever thread it is served."""


def current_request() -> Request | None:
    """The request that this code serves; None outside of any."""
    return _request.get()


def check_admission() -> None:
    """Let work in, unless it comes from a request and the app is closing.

    Raises:
        ShuttingDownError: it is.
    """
    if _request.get() is not None and any(app.draining for app in _current.get()[-1:]):
        raise ShuttingDownError("the app is shutting down and takes no new leases; send the request to another replica")


def enter(app: App) -> None:
    """Make `app` the current one from here on."""
    _current.set((*_current.get(), app))


def leave(app: App) -> None:
    """Undo the last `enter` of `app`. Without a token, since an app may be closed in another task than opened it."""
    apps = [*reversed(_current.get())]
    if app in apps:
        apps.remove(app)
        _current.set((*reversed(apps),))


@contextmanager
def bound(app: App, *, request: bool = False) -> Iterator[None]:
    """Make `app` the current one for the body; `request` marks work that a drain refuses."""
    before = _request.set(Request() if request else None)
    enter(app)
    try:
        yield
    finally:
        leave(app)
        _request.reset(before)


def announce(app: App) -> None:
    """Make an open, installed app findable from everywhere in the process."""
    if app not in _installed:
        _installed.append(app)


def withdraw(app: App) -> None:
    """Undo `announce`."""
    if app in _installed:
        _installed.remove(app)


def worker_identity() -> str:
    """Who this process is, to people: its host and a random suffix.

    Made on first use and never inherited: a forked child gets another one.
    """
    return _identity(os.getpid())


@lru_cache(maxsize=1)
def _identity(_pid: int) -> str:
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname()[:40])
    return f"{host}-{secrets.token_hex(8)}"


class Openable:
    """What the first who enters it opens and the last who leaves it closes, on one event loop at a time."""

    lazy: ClassVar[bool] = False
    """There is nothing to connect: the first use opens it on the running loop."""

    _loop: asyncio.AbstractEventLoop | None = None
    _is_open = False
    _users = 0
    _gate: asyncio.Lock
    """Opening and closing never overlap."""
    _gate_loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which this is open.

        Raises:
            NotStartedError: it is not open.
        """
        if self._loop is None:
            raise NotStartedError(f"{self!r} is not open; enter it, or the app that uses it, with `async with` first")
        return self._loop

    def check_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, which must be the one on which this is open.

        Raises:
            NotStartedError: it is not open.
            CoordinationBackendError: it is open on another event loop.
        """
        running = asyncio.get_running_loop()
        if self.lazy and (self._loop is None or self._loop.is_closed()):
            self._forget()
            self._loop = running
        if (self._loop or self.loop) is not running:
            raise CoordinationBackendError(
                f"{self!r} is open on another event loop; use `from_thread` from threads, or open one object per loop"
            )
        return running

    async def __aenter__(self) -> Self:
        running = asyncio.get_running_loop()
        if self._loop not in {None, running}:
            if not self.loop.is_closed():
                self.check_loop()
            self._forget()
        if self._gate_loop is not running:
            self._gate_loop, self._gate, self._is_open, self._users = running, asyncio.Lock(), False, 0
        self._users += 1
        try:
            async with self._gate:
                if not self._is_open:
                    self._loop = running
                    await self._open()
                    self._is_open = True
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._users -= 1
        if self._users > 0:
            return
        async with self._gate:
            if self._users > 0:
                return
            opened, self._is_open = self._is_open, False
            try:
                if opened:
                    await self._drain()
            finally:
                try:
                    if opened:
                        await self._close()
                finally:
                    self._forget()

    def _forget(self) -> None:
        """Drop what is bound to the loop, so that the next open starts afresh, on whichever loop."""
        self._loop = None

    async def _open(self) -> None:
        """Connect; on failure leave nothing behind."""

    async def _drain(self) -> None:
        """Wait, not for ever, for what is under way."""

    async def _close(self) -> None:
        """Disconnect; also after a drain that failed."""
