"""Open and close a Grelmicro together with a web app."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from starlette.applications import Starlette

from grel_core.app import Grelmicro
from grel_core.component import announce, withdraw
from grel_fastapi.binding import Binding
from grel_fastapi.decorators import GUARD, GUARDED
from grel_fastapi.dependencies import ElectionDependency
from grel_fastapi.responses import PROBLEMS, Answers
from grel_fastapi.routes import all_calls

Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Any]]

_installed: WeakKeyDictionary[Starlette, Grelmicro] = WeakKeyDictionary()


def lifespan(micro: Grelmicro, user: Lifespan | None = None, *, early_step_down: bool = True) -> Lifespan:
    """A lifespan that opens `micro` around yours: `FastAPI(lifespan=lifespan(micro, mine))`.

    For app factories that want to see it there; add `micro.install(app, lifespan=False)`.
    """

    @asynccontextmanager
    async def opened(app: Any) -> AsyncIterator[Any]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("Grelmicro runs on asyncio; run the server, or the TestClient, with it") from None
        prepare(micro, app)
        try:
            async with micro:
                announce(micro)
                with stepping_down(micro) if early_step_down else nullcontext():
                    async with user(app) if user else nullcontext() as state:
                        yield state
        finally:
            if not micro.started:
                withdraw(micro)

    return opened


_around = lifespan


def install(
    micro: Grelmicro,
    app: object,
    *,
    lifespan: bool = True,
    handlers: bool = True,
    status: Mapping[str, int] | None = None,
    problem_base: str | None = None,
    early_step_down: bool = True,
) -> Starlette | None:
    """What `micro.install(app)` does for Starlette and FastAPI; None for any other app.

    `lifespan` opens `micro` around the app's own lifespan. `handlers` answers errors as problem+json, unless the app
    has handlers for them; `status` changes the status of some (`{"lock-busy": 409}`), and `problem_base` is what their
    `type` begins with. `early_step_down` gives leads away at SIGTERM, not only when the server closes the app.

    Raises:
        RuntimeError: the app has started, or another Grelmicro is installed on it.
        TypeError, ValueError: `status` names no problem, or gives it no status.
    """
    if not isinstance(app, Starlette):
        return None
    if (installed := _installed.get(app)) is micro:
        return app
    if installed is not None:
        raise RuntimeError(f"{app!r} has {installed!r} installed already; install {micro!r} on another app")
    if app.middleware_stack is not None:
        raise RuntimeError(f"{app!r} has started; call install() where the app is made, not in its lifespan")
    answers = Answers(status or {}, problem_base)
    for error in PROBLEMS if handlers else ():
        app.exception_handlers.setdefault(error, answers)
    if lifespan:
        app.router.lifespan_context = _around(micro, app.router.lifespan_context, early_step_down=early_step_down)
    build = app.build_middleware_stack
    # Around the whole stack, so that middleware which is added later is inside, too.
    app.build_middleware_stack = lambda: Binding(build(), micro)  # type: ignore[method-assign]  # there is no hook
    _installed[app] = micro
    return app


def prepare(micro: Grelmicro, app: Starlette) -> None:
    """Let every election that a route mentions run with `micro`.

    Raises:
        RuntimeError: a guard stands above a route's decorator, where it guards nothing.
    """
    for call in all_calls(app.routes):
        if getattr(call, GUARDED, False):
            raise RuntimeError(f"leader_only stands above the decorator of a route, where it guards nothing: {call!r}")
        named = call if isinstance(call, ElectionDependency) else getattr(call, GUARD, None)
        if named is not None:
            micro.election(named.election)


@contextmanager
def stepping_down(micro: Grelmicro) -> Iterator[None]:
    """Begin the shutdown at SIGTERM itself: the server may take long to close the app, with a stream open.

    The handler that was there runs as before. Without one, or outside the main thread, there is nothing to join.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    loop = asyncio.get_running_loop()
    inside = True

    def handle(number: int, frame: FrameType | None) -> None:
        if inside and not loop.is_closed():
            loop.call_soon_threadsafe(micro.begin_shutdown)
        before(number, frame)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        inside = False
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, before)
