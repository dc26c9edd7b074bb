"""What an app is made of, and which app is current."""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self, runtime_checkable

from grel_core.errors import OutOfContextError, ShuttingDownError


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


_current: ContextVar[App | None] = ContextVar("grel_current_app", default=None)
_request: ContextVar[bool] = ContextVar("grel_in_request", default=False)
_installed: list[App] = []
"""Open apps that were installed into a framework: code that runs outside of any request finds them here."""


def current_app() -> App:
    """The app in whose scope this code runs: the innermost one, else the only installed one that is open.

    Raises:
        OutOfContextError: there is none, or several could be meant.
    """
    if (app := _current.get()) is not None:
        return app
    if len(_installed) == 1:
        return _installed[0]
    what = "several installed apps are open, and" if _installed else "no app is open here:"
    raise OutOfContextError(
        f"{what} nothing says where coordination is kept; run this inside `async with micro:`, in a request of an app "
        "that `micro.install(app)` was called on, or give `backend=`"
    )


def check_admission() -> None:
    """Let work in, unless it comes from a request and the app is closing.

    Raises:
        ShuttingDownError: it is.
    """
    if _request.get() and (app := _current.get()) is not None and app.draining:
        raise ShuttingDownError("the app is shutting down and takes no new leases; send the request to another replica")


@contextmanager
def bound(app: App, *, request: bool = False) -> Iterator[None]:
    """Make `app` the current one for the body; `request` marks work that a drain refuses."""
    app_token, request_token = _current.set(app), _request.set(request)
    try:
        yield
    finally:
        _request.reset(request_token)
        _current.reset(app_token)


def announce(app: App) -> None:
    """Make an open, installed app findable from everywhere in the process."""
    if app not in _installed:
        _installed.append(app)


def withdraw(app: App) -> None:
    """Undo `announce`."""
    if app in _installed:
        _installed.remove(app)


_identity: tuple[int, str] | None = None


def worker_identity() -> str:
    """Who this process is, to people: its host and a random suffix.

    Made on first use and never inherited: a forked child gets another one.
    """
    global _identity  # noqa: PLW0603 - one identity per process is the point
    if _identity is None or _identity[0] != os.getpid():
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname()[:40])
        _identity = (os.getpid(), f"{host}-{secrets.token_hex(8)}")
    return _identity[1]
