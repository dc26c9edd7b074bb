"""Opening an app together with a web app, and binding it to requests."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Annotated, Any, Self

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.requests import Request as PlainRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import grel_fastapi
from grel_core import Grelmicro
from grel_core.coordination import LeaderElection, Lock, LockHandle
from grel_core.errors import NotStartedError, OutOfContextError
from grel_core.providers.memory import MemoryProvider
from grel_fastapi import held_lock, leader
from tests.fastapi.serving import Exchange, client_of, serving, started
from tests.harness import MemoryHarness, eventually

pytestmark = pytest.mark.anyio

Cart = Annotated[LockHandle, Depends(held_lock("cart", timeout=0))]


class Part:
    """A component that says when it opens and closes."""

    kind = "part"

    def __init__(self, name: str, log: list[str], *, fails: str = "") -> None:
        self.name, self._log, self._fails = name, log, fails

    async def __aenter__(self) -> Self:
        if self._fails == "open":
            raise ConnectionError(self.name)
        self._log.append(f"+{self.name}")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._log.append(f"-{self.name}")
        if self._fails == "close":
            raise ConnectionError(self.name)


def logging_lifespan(log: list[str], name: str, **state: Any) -> Any:
    """A lifespan that writes down when it begins and ends."""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[dict[str, Any]]:
        log.append(f"+{name}")
        yield state
        log.append(f"-{name}")

    return lifespan


def logged(log: list[str], *names: str) -> Grelmicro:
    """A worker with a memory store and parts that say when they open and close."""
    return Grelmicro(uses=[MemoryProvider(), *(Part(name, log) for name in names)])


async def nothing() -> None:
    """An endpoint."""


async def locking() -> None:
    """An endpoint that takes a lock itself."""
    await Lock("cart").acquire_nowait()


async def test_the_app_is_current_in_every_kind_of_handler(micro: Grelmicro) -> None:
    """2."""
    app = micro.install(FastAPI())
    seen: list[Grelmicro] = []

    def note() -> None:
        seen.append(Grelmicro.current())

    @app.get("/async")
    async def on_the_loop() -> None:
        note()

    @app.get("/sync")
    def in_a_thread(later: BackgroundTasks) -> None:
        note()
        later.add_task(note)

    @app.websocket("/ws")
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        note()
        await websocket.close()

    async with serving(app) as client:
        assert (await client.get("/async")).status_code == 200
        assert (await client.get("/sync")).status_code == 200
        async with Exchange(app, "/ws", websocket=True) as exchange:
            await exchange.ended()
    assert seen == [micro] * 4


async def test_a_lifespan_of_the_user_runs_inside_and_keeps_its_state() -> None:
    """3, 4."""
    log: list[str] = []
    micro = logged(log, "micro")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with Lock("migrate"):
            log.append("+user")
        yield {"pool": "a pool"}
        async with Lock("migrate"):
            log.append("-user")

    app = micro.install(FastAPI(lifespan=lifespan))

    @app.get("/")
    async def pool(request: Request) -> str:
        return str(request.state.pool)

    async with started(app) as state, client_of(app, state) as client:
        assert (await client.get("/")).json() == "a pool"
    assert log == ["+micro", "+user", "-user", "-micro"]


async def test_startup_handlers_run_whenever_they_were_registered() -> None:
    """5."""
    log: list[str] = []
    app = FastAPI()
    app.router.add_event_handler("startup", lambda: log.append("before"))
    logged(log, "micro").install(app)
    app.router.add_event_handler("startup", lambda: log.append("after"))
    async with started(app):
        assert log == ["+micro", "before", "after"]


async def test_lifespans_of_routers_run_once_and_inside() -> None:
    """6."""
    log: list[str] = []
    app = FastAPI(lifespan=logging_lifespan(log, "user"))
    app.include_router(APIRouter(lifespan=logging_lifespan(log, "before")))
    logged(log, "micro").install(app)
    app.include_router(APIRouter(lifespan=logging_lifespan(log, "after")))
    async with started(app):
        assert log[0] == "+micro"
        assert sorted(log) == ["+after", "+before", "+micro", "+user"]
    assert log[-1] == "-micro"
    assert len(log) == 8


async def test_a_router_whose_startup_runs_twice_opens_nothing_twice() -> None:
    """7."""
    log: list[str] = []
    micro = logged(log, "micro")
    router = APIRouter()

    async def open_it() -> None:
        await micro.__aenter__()

    async def close_it() -> None:
        await micro.__aexit__(None, None, None)

    router.add_event_handler("startup", open_it)
    router.add_event_handler("shutdown", close_it)
    app = micro.install(FastAPI())
    app.include_router(router)
    async with started(app):
        assert log == ["+micro"]
    assert log == ["+micro", "-micro"]


async def test_mounted_apps_need_no_install_of_their_own(micro: Grelmicro) -> None:
    """8."""

    async def busy(request: PlainRequest) -> PlainTextResponse:
        await Lock("cart").acquire(timeout=0)
        return PlainTextResponse("never")

    sub = FastAPI()

    @sub.get("/dependency")
    async def take(cart: Cart) -> None: ...

    app = micro.install(FastAPI())
    app.mount("/fast", sub)
    app.mount("/plain", Starlette(routes=[Route("/", busy)]))
    async with serving(app) as client:
        assert (await client.get("/fast/dependency")).status_code == 200
        async with micro.coordination.lock("cart"):
            answer = await client.get("/fast/dependency")
            assert (answer.status_code, answer.headers["Cache-Control"]) == (423, "no-store")
            assert int(answer.headers["Retry-After"]) >= 1
            # A plain core error: nothing in that app knows how to answer it.
            assert (await client.get("/plain/")).status_code == 500


async def test_installing_again_changes_nothing() -> None:
    """9."""
    log: list[str] = []
    micro = logged(log, "micro")
    app = FastAPI()
    assert micro.install(micro.install(app)) is app
    async with serving(app) as client:
        assert (await client.get("/openapi.json")).status_code == 200
    assert log == ["+micro", "-micro"]


async def test_a_second_app_object_is_refused_and_both_are_named(micro: Grelmicro, rival: Grelmicro) -> None:
    """10."""
    app = micro.install(FastAPI())
    with pytest.raises(RuntimeError) as refused:
        rival.install(app)
    assert repr(micro) in str(refused.value)
    assert repr(rival) in str(refused.value)


async def test_installing_on_an_app_that_runs_is_refused_before_anything_changes(micro: Grelmicro) -> None:
    """11."""
    app = FastAPI()
    before = app.router.lifespan_context, dict(app.exception_handlers)
    async with client_of(app) as client:
        assert (await client.get("/openapi.json")).status_code == 200
    with pytest.raises(RuntimeError, match="has started"):
        micro.install(app)
    assert before == (app.router.lifespan_context, app.exception_handlers)


async def test_an_app_that_no_plugin_knows_is_refused(micro: Grelmicro) -> None:
    with pytest.raises(RuntimeError, match="starlette"):
        micro.install(object())


async def test_two_web_apps_share_one_and_the_last_one_closes_it() -> None:
    """12."""
    log: list[str] = []
    micro = logged(log, "micro")
    first, second = micro.install(FastAPI()), micro.install(FastAPI())

    @second.get("/")
    async def take(cart: Cart) -> str:
        return cart.name

    async with serving(second) as client:
        async with started(first):
            assert log == ["+micro"]
        assert (await client.get("/")).json() == "cart"
        assert log == ["+micro"]
        assert Grelmicro.current() is micro
    assert log == ["+micro", "-micro"]
    with pytest.raises(OutOfContextError):
        Grelmicro.current()


def test_one_app_works_on_one_event_loop_after_another() -> None:
    """13."""
    micro = Grelmicro(uses=[MemoryProvider(), LeaderElection("default")])
    app = micro.install(FastAPI())

    @app.get("/", dependencies=[Depends(leader())])
    async def take(cart: Cart) -> str:
        return cart.name

    for _ in range(3):
        with TestClient(app) as client:
            assert client.get("/").json() == "cart"


async def test_middleware_added_later_sees_the_app(micro: Grelmicro) -> None:
    """14."""
    app = micro.install(FastAPI())
    seen: list[Grelmicro] = []

    class Outer:
        def __init__(self, inner: ASGIApp) -> None:
            self._inner = inner

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                seen.append(Grelmicro.current())
            await self._inner(scope, receive, send)

    app.add_middleware(Outer)
    async with serving(app) as client:
        await client.get("/")
    assert seen == [micro]


async def test_a_request_to_an_app_that_never_started_says_what_to_do(micro: Grelmicro) -> None:
    """15."""
    app = micro.install(FastAPI())
    app.get("/dependency", dependencies=[Depends(held_lock("cart"))])(nothing)
    app.get("/leader", dependencies=[Depends(leader())])(nothing)
    app.get("/lock")(locking)
    app.get("/nothing")(nothing)
    for path in ("/dependency", "/leader", "/lock"):
        async with Exchange(app, path) as exchange:
            with pytest.raises(NotStartedError) as raised:
                await exchange.task
        for cause in ("TestClient(app) without `with`", "ASGITransport", "lifespan off", "mounted sub-app"):
            assert cause in str(raised.value)
    async with client_of(app) as client:
        assert (await client.get("/nothing")).status_code == 200


def test_a_test_client_that_was_not_entered_is_told_so(micro: Grelmicro) -> None:
    """15."""
    app = micro.install(FastAPI())

    @app.get("/")
    async def take(cart: Cart) -> None: ...

    with pytest.raises(NotStartedError, match="without `with`"):
        TestClient(app).get("/")


async def test_an_app_without_install_is_told_so() -> None:
    app = FastAPI()

    @app.get("/")
    async def take(cart: Cart) -> None: ...

    async with Exchange(app, "/") as exchange:
        with pytest.raises(OutOfContextError, match="install"):
            await exchange.task


async def test_a_part_that_fails_to_open_closes_the_others_and_the_web_app_does_not_start() -> None:
    """16, 18."""
    log: list[str] = []
    micro = Grelmicro(uses=[MemoryProvider(), Part("a", log), Part("b", log, fails="open"), Part("c", log)])
    with pytest.raises(RuntimeError, match="b"):
        async with started(micro.install(FastAPI())):
            pytest.fail("it started")
    assert log == ["+a", "-a"]
    assert not micro.started


async def test_a_lifespan_that_fails_closes_everything() -> None:
    """17."""
    log: list[str] = []
    micro = Grelmicro(uses=[MemoryProvider(), Part("a", log), Part("b", log, fails="close")])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with Lock("migrate"):
            int("no number")
        yield

    with pytest.raises(RuntimeError, match="ValueError"):
        async with started(micro.install(FastAPI(lifespan=lifespan))):
            pytest.fail("it started")
    assert log == ["+a", "+b", "-b", "-a"]


def test_other_event_loops_than_asyncio_are_refused(micro: Grelmicro) -> None:
    """19."""
    app = micro.install(FastAPI())
    opening = app.router.lifespan_context(app).__aenter__()
    with pytest.raises(RuntimeError, match="asyncio"):
        opening.__await__().send(None)


async def test_a_lifespan_that_is_written_out_works_too() -> None:
    log: list[str] = []
    micro = logged(log, "micro")
    app = FastAPI(lifespan=grel_fastapi.lifespan(micro, logging_lifespan(log, "user", pool=1)))
    micro.install(app, lifespan=False)

    @app.get("/")
    async def take(cart: Cart) -> str:
        return cart.name

    async with serving(app) as client:
        assert (await client.get("/")).json() == "cart"
    assert log == ["+micro", "+user", "-user", "-micro"]


async def test_starlette_apps_are_served_too(micro: Grelmicro) -> None:
    async def take(request: PlainRequest) -> PlainTextResponse:
        async with Lock("cart") as handle:
            return PlainTextResponse(handle.name)

    async def busy(request: PlainRequest) -> PlainTextResponse:
        await Lock("cart").acquire(timeout=0)
        return PlainTextResponse("never")

    app = micro.install(Starlette(routes=[Route("/", take), Mount("/sub", routes=[Route("/busy", busy)])]))
    async with serving(app) as client:
        assert (await client.get("/")).text == "cart"
        async with micro.coordination.lock("cart"):
            answer = await client.get("/sub/busy")
        assert answer.status_code == 423
        assert answer.headers["Content-Type"] == "application/problem+json"


# SIGTERM.


@contextmanager
def handling(handler: Any) -> Iterator[None]:
    """SIGTERM goes to `handler`, as a server would have it before it starts the lifespan."""
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_sigterm_steps_down_at_once_and_the_servers_handler_still_runs(
    store: MemoryHarness, micro: Grelmicro, rival: Grelmicro
) -> None:
    heard: list[int] = []

    def server(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    app = micro.install(FastAPI())

    @app.get("/", dependencies=[Depends(leader("jobs"))])
    async def lead() -> None: ...

    with handling(server):
        async with serving(app) as client:
            await eventually(micro.election("jobs").is_leader)
            async with rival:
                signal.raise_signal(signal.SIGTERM)
                assert heard == [signal.SIGTERM]
                loop = asyncio.get_running_loop()
                began = loop.time()
                await eventually(rival.election("jobs").is_leader)
                assert loop.time() - began < 1
                assert micro.draining
                assert (await client.get("/")).status_code == 503
        assert signal.getsignal(signal.SIGTERM) is server


async def test_a_server_without_a_handler_keeps_the_default(micro: Grelmicro) -> None:
    with handling(signal.SIG_DFL):
        async with started(micro.install(FastAPI())):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_early_step_down_can_be_switched_off(micro: Grelmicro) -> None:
    def server(number: int, frame: FrameType | None) -> None: ...

    with handling(server):
        async with started(micro.install(FastAPI(), early_step_down=False)):
            assert signal.getsignal(signal.SIGTERM) is server


async def test_a_handler_that_came_later_is_left_alone(micro: Grelmicro) -> None:
    def server(number: int, frame: FrameType | None) -> None: ...

    with handling(server):
        async with started(micro.install(FastAPI())):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_an_app_in_another_thread_leaves_signals_alone(micro: Grelmicro) -> None:
    app = micro.install(FastAPI())
    seen: list[Any] = []

    async def live() -> None:
        async with started(app):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    thread.join(10)
    assert seen == [signal.getsignal(signal.SIGTERM)]
