"""`leader_only`, `leader` and `election`: what runs on the leader only."""

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from grel_core import Grelmicro
from grel_core.coordination import LeaderElection, NotLeaderError
from grel_fastapi import election, held_lock, leader, leader_only
from tests.fastapi import future_annotations
from tests.fastapi.serving import Exchange, broken, leading, passing, serving, started
from tests.harness import MemoryHarness, eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
def app(micro: Grelmicro) -> FastAPI:
    return micro.install(FastAPI())


@asynccontextmanager
async def led_elsewhere(rival: Grelmicro, name: str = "default") -> AsyncIterator[None]:
    """Another worker leads."""
    async with rival:
        await leading(rival, name)
        yield


async def never() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()


async def test_only_the_leader_runs_it(app: FastAPI, micro: Grelmicro, rival: Grelmicro) -> None:
    """79."""

    @app.get("/bare")
    @leader_only
    async def bare() -> str:
        return "led"

    @app.get("/named")
    @leader_only("jobs", on_follower=421)
    def named() -> str:
        return "led"

    @app.get("/dependency")
    async def dependency(jobs: Annotated[LeaderElection, Depends(leader("jobs"))]) -> str:
        return jobs.name

    @app.get("/anyone")
    async def anyone(jobs: Annotated[LeaderElection, Depends(election("jobs"))]) -> bool:
        return jobs.is_leader()

    async with led_elsewhere(rival), led_elsewhere(rival, "jobs"), serving(app) as client:
        answer = await client.get("/bare")
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:grel:problem:not-leader")
        assert answer.headers["Retry-After"] == "2"
        assert (await client.get("/named")).status_code == 421
        assert (await client.get("/dependency")).status_code == 503
        assert (await client.get("/anyone")).json() is False
        await rival.election("jobs").step_down(stay_out=60)
        await rival.election().step_down(stay_out=60)
        await leading(micro)
        await leading(micro, "jobs")
        assert (await client.get("/bare")).json() == "led"
        assert (await client.get("/named")).json() == "led"
        assert (await client.get("/dependency")).json() == "jobs"
        assert (await client.get("/anyone")).json() is True


async def test_a_lead_that_was_not_confirmed_lately_does_not_count(
    app: FastAPI, micro: Grelmicro, store: MemoryHarness
) -> None:
    """80."""

    @app.get("/")
    @leader_only
    async def usual() -> None: ...

    @app.get("/strict")
    @leader_only("default", confirmed_within=3)
    async def strict() -> None: ...

    @app.get("/dependency", dependencies=[Depends(leader(confirmed_within=3))])
    async def dependency() -> None: ...

    async with serving(app) as client:
        await leading(micro)
        with broken(store.provider()):
            await passing(5)
            assert micro.election().is_leader()
            assert (await client.get("/")).status_code == 200
            assert (await client.get("/strict")).status_code == 503
            assert (await client.get("/dependency")).status_code == 503
            await passing(10)
            assert (await client.get("/")).status_code == 503


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_background_task_is_skipped_and_the_next_ones_run(
    app: FastAPI, rival: Grelmicro, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """81."""
    caplog.set_level(logging.INFO, "grel")
    ran: list[str] = []

    @leader_only("mail", otherwise="skip")
    async def send(number: int) -> None:
        ran.append(f"mail {number}")

    @leader_only("mail", otherwise="skip")
    def send_in_a_thread(number: int) -> None:
        ran.append(f"mail {number}")

    @app.get("/")
    async def take(later: BackgroundTasks) -> None:
        later.add_task(send if kind == "async" else send_in_a_thread, 7)
        later.add_task(ran.append, "next")

    async with serving(app) as client:
        # Nobody mentioned the election before: it starts now, and is won before the task is judged.
        assert (await client.get("/")).status_code == 200
        assert ran == ["mail 7", "next"]
    ran.clear()
    async with led_elsewhere(rival, "mail"), serving(app) as client:
        assert (await client.get("/")).status_code == 200
    assert ran == ["next"]
    assert "was skipped" in caplog.text


async def test_a_loop_runs_on_the_leader_and_moves_with_the_lead(
    app: FastAPI, micro: Grelmicro, rival: Grelmicro, caplog: pytest.LogCaptureFixture
) -> None:
    """82."""
    ran: list[str] = []

    def looping(worker: Grelmicro, name: str) -> None:
        @worker.leader_loop("jobs", every=1)
        async def refresh() -> None:
            ran.append(name)
            if len(ran) % 3 == 0:
                raise ValueError("a bad day")

    looping(micro, "ours")
    looping(rival, "theirs")
    async with started(app):
        await leading(micro, "jobs")
        async with rival:
            await passing(5)
            assert set(ran) == {"ours"}
            assert len(ran) >= 5
            await micro.election("jobs").step_down(stay_out=3)
            ran.clear()
            await leading(rival, "jobs")
            await passing(2)
            assert set(ran) == {"theirs"}
        ran.clear()
        await leading(micro, "jobs")
        await passing(2)
        assert set(ran) == {"ours"}
    assert "a bad day" in caplog.text


# Losing the lead.


@pytest.mark.parametrize("kind", ["endpoint", "dependency chain"])
async def test_losing_the_lead_cancels_an_async_endpoint(
    app: FastAPI, micro: Grelmicro, rival: Grelmicro, kind: str
) -> None:
    inside = asyncio.Event()

    @leader_only
    async def inner() -> None:
        inside.set()
        await never()

    @app.get("/")
    @leader_only
    async def take(cart: Annotated[Any, Depends(held_lock("cart"))]) -> None:
        await (inner() if kind == "dependency chain" else never_inside())

    async def never_inside() -> None:
        inside.set()
        await never()

    async with started(app), Exchange(app, "/") as exchange:
        await inside.wait()
        async with rival:
            await micro.election().step_down(stay_out=60)
            await leading(rival)
            await exchange.ended()
        assert exchange.status == 503
        assert b"urn:grel:problem:leadership-lost" in exchange.body


@pytest.mark.parametrize(
    ("kind", "on_lost", "status"),
    [
        ("sync", "cancel", 503),
        ("sync", "error", 503),
        ("sync", "ignore", 200),
        ("async", "error", 503),
        ("async", "ignore", 200),
    ],
)
async def test_an_endpoint_that_is_let_to_end_ends_before_somebody_else_leads(
    app: FastAPI, micro: Grelmicro, rival: Grelmicro, kind: str, on_lost: Any, status: int
) -> None:
    inside, go = threading.Event(), threading.Event()

    @leader_only("default", on_lost=on_lost)
    def in_a_thread() -> None:
        inside.set()
        assert go.wait(60)

    @leader_only("default", on_lost=on_lost)
    async def on_the_loop() -> None:
        inside.set()
        await eventually(go.is_set)

    app.get("/")(in_a_thread if kind == "sync" else on_the_loop)
    async with started(app), rival, Exchange(app, "/") as exchange:
        rival.election()  # takes part from here on
        await eventually(inside.is_set)
        resigning = asyncio.create_task(micro.election().step_down(stay_out=60))
        await passing(1)
        assert not rival.election().is_leader()
        go.set()
        assert (await exchange.ended()).status == status
        await resigning
        await leading(rival)


@pytest.mark.parametrize("on_lost", ["error", "ignore"])
async def test_a_stream_that_is_let_to_end_ends_before_somebody_else_leads(
    micro: Grelmicro, rival: Grelmicro, on_lost: Any
) -> None:
    @leader_only("default", on_lost=on_lost)
    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async with micro:
        await leading(micro)
        stream = numbers()
        assert await anext(stream) == 0
        async with rival:
            rival.election()
            resigning = asyncio.create_task(micro.election().step_down(stay_out=60))
            await passing(1)
            assert not rival.election().is_leader()
            assert [await anext(stream), await anext(stream)] == [1, 2]
            with pytest.raises(StopAsyncIteration if on_lost == "ignore" else NotLeaderError):
                await anext(stream)
            await resigning
            await leading(rival)


async def test_work_cannot_begin_once_the_lead_is_given_away(micro: Grelmicro) -> None:
    async with micro:
        jobs = micro.election("jobs")
        await leading(micro, "jobs")
        with jobs.working() as fence:
            assert fence == jobs.fencing_token
        beginning = jobs.working()
        await jobs.step_down(stay_out=60)
        with pytest.raises(NotLeaderError, match="'jobs'"), beginning:
            pytest.fail("it began")


@pytest.mark.parametrize("guard", [leader, leader_only])
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (TypeError, {"on_follower": []}),
        (TypeError, {"on_follower": True}),
        (ValueError, {"on_follower": 200}),
        (ValueError, {"on_follower": 5000}),
        (TypeError, {"confirmed_within": "x"}),
        (ValueError, {"confirmed_within": float("nan")}),
        (ValueError, {"confirmed_within": 0}),
        (ValueError, {"on_lost": "shrug"}),
        (ValueError, {"on_lost": []}),
        (ValueError, {"otherwise": "shrug"}),
    ],
    ids=str,
)
def test_impossible_options_are_refused_where_they_stand(guard: Any, error: Any, options: dict[str, Any]) -> None:
    option = next(iter(options))
    if option in inspect.signature(guard).parameters:
        with pytest.raises(error, match=option):
            guard("jobs", **options)


@pytest.mark.parametrize("make", [leader, leader_only, election])
@pytest.mark.parametrize("name", [5, None, b"jobs", "", "a\nb"])
def test_an_impossible_name_is_refused_where_it_stands(make: Any, name: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="name"):
        make(name)


async def test_an_endpoints_own_error_is_not_taken_for_a_lost_lead(app: FastAPI, store: MemoryHarness) -> None:
    @app.get("/")
    @leader_only
    async def take() -> None:
        async with Grelmicro.current().coordination.lock("cart").hold(timeout=0):
            await Grelmicro.current().coordination.lock("other").acquire(timeout=0)

    @app.get("/teapot")
    @leader_only
    async def teapot() -> None:
        raise HTTPException(418)

    from tests.fastapi.test_held_lock import held_elsewhere

    async with serving(app) as client, held_elsewhere(store, "other"):
        assert (await client.get("/")).json()["type"] == "urn:grel:problem:lock-busy"
        assert (await client.get("/teapot")).status_code == 418


# Every kind of function.


class Views:
    """Endpoints of a class."""

    @leader_only
    async def method(self, number: int) -> int:
        return number + 1


async def test_every_kind_of_endpoint_can_be_guarded(app: FastAPI, micro: Grelmicro) -> None:
    """62, 63."""
    threads: list[threading.Thread] = []

    @app.get("/async/{number}")
    @leader_only
    async def on_the_loop(number: int) -> int:
        return number + 1

    @app.get("/sync/{number}")
    @leader_only
    def in_a_thread(number: int) -> int:
        threads.append(threading.current_thread())
        return number + 1

    @app.get("/stream", response_model=None)
    @leader_only
    async def stream() -> AsyncIterator[int]:
        yield 1
        yield 2

    @app.websocket("/ws")
    @leader_only
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("led")
        await websocket.close()

    app.get("/method/{number}")(Views().method)
    async with serving(app) as client:
        await leading(micro)
        for path in ("/async/7", "/sync/7", "/method/7"):
            assert (await client.get(path)).json() == 8, path
        assert threads[0] is not threading.main_thread()
        if find_spec("fastapi.sse"):  # since 0.134 an endpoint may be a generator
            assert (await client.get("/stream")).text.split() == ["1", "2"]
        async with Exchange(app, "/ws", websocket=True) as exchange:
            await exchange.ended()
            assert exchange.sent[1] == {"type": "websocket.send", "text": "led"}


async def test_a_websocket_is_closed_on_a_follower(app: FastAPI, rival: Grelmicro) -> None:
    @app.websocket("/ws")
    @leader_only
    async def talk(websocket: WebSocket) -> None:
        pytest.fail("it ran")

    async with led_elsewhere(rival), started(app), Exchange(app, "/ws", websocket=True) as exchange:
        await exchange.ended()
        assert exchange.closed == (1013, "not-leader")


async def test_starlette_endpoints_can_be_guarded(micro: Grelmicro, rival: Grelmicro) -> None:
    """62."""

    @leader_only
    async def function(request: Request) -> PlainTextResponse:
        return PlainTextResponse("led")

    class Endpoint(HTTPEndpoint):
        @leader_only("jobs")
        async def get(self, request: Request) -> PlainTextResponse:
            return PlainTextResponse("led")

        @leader_only("jobs")
        def post(self, request: Request) -> PlainTextResponse:
            return PlainTextResponse("led")

    routes = [Route("/function", function), Mount("/sub", routes=[Route("/class", Endpoint)])]
    app = micro.install(Starlette(routes=routes))
    async with led_elsewhere(rival), led_elsewhere(rival, "jobs"), serving(app) as client:
        assert sorted(micro.elections) == ["default", "jobs"]
        asks = [client.get("/function"), client.get("/sub/class"), client.post("/sub/class")]
        answers = await asyncio.gather(*asks)
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.headers["Content-Type"] for answer in answers} == {"application/problem+json"}
        for name in ("default", "jobs"):
            await rival.election(name).step_down(stay_out=60)
            await leading(micro, name)
        asks = [client.get("/function"), client.get("/sub/class"), client.post("/sub/class")]
        assert [answer.text for answer in await asyncio.gather(*asks)] == ["led"] * 3


async def test_a_guarded_stream_ends_with_the_lead(app: FastAPI, micro: Grelmicro) -> None:
    closed = asyncio.Event()

    @leader_only
    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"first "
            await never()
        finally:
            closed.set()

    @app.get("/")
    async def stream() -> StreamingResponse:
        return StreamingResponse(events())

    async with started(app), Exchange(app, "/") as exchange:
        await eventually(lambda: exchange.body == b"first ")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await micro.election().step_down(stay_out=60)
        assert loop.time() - began < 1
        await exchange.ended()
        assert closed.is_set()
        assert isinstance(exchange.task.exception(), NotLeaderError | RuntimeError)


async def test_a_guarded_stream_takes_no_step_without_the_lead(micro: Grelmicro) -> None:
    made: list[int] = []

    @leader_only
    async def numbers() -> AsyncIterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    async with micro:
        stream = numbers()
        assert await anext(stream) == 0
        await micro.election().step_down(stay_out=0.1)
        await leading(micro)
        with pytest.raises(NotLeaderError):
            await anext(stream)  # it leads again, but that is another term
        assert made == [0]


def test_a_generator_that_is_not_async_is_refused() -> None:
    """62."""

    def generator() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="async"):
        leader_only(generator)


async def test_a_guarded_function_can_be_called_directly(micro: Grelmicro, rival: Grelmicro) -> None:
    """89."""

    @leader_only
    async def work(number: int, *, more: int = 0) -> int:
        """Work."""
        return number + more

    assert (work.__name__, work.__doc__) == ("work", "Work.")
    assert list(inspect.signature(work).parameters) == ["number", "more"]
    async with micro:
        assert await work(7, more=1) == 8
        async with rival:
            with pytest.raises(NotLeaderError) as refused:
                await work(7)
            assert isinstance(refused.value, HTTPException)
        # The innermost app was the rival's; now it is ours again.
        assert await work(7) == 7


# What FastAPI sees.


async def test_annotations_that_are_strings_are_understood(app: FastAPI, micro: Grelmicro) -> None:
    """64, 65."""
    app.include_router(future_annotations.router, prefix="/future")
    async with serving(app) as client:
        await leading(micro)
        assert (await client.get("/future/orders/07")).json() == "order:7 default"
        answer = await client.get("/future/guarded/07")
        assert (answer.json(), answer.headers["seen"]) == ("order:7", "/future/guarded/07")
        assert (await client.get("/future/sync/07")).json() == "order:7"
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert len(paths) == 3
    for path in paths.values():
        assert [(one["name"], one["schema"]["type"]) for one in path["get"]["parameters"]] == [("order_id", "integer")]


async def test_elections_of_included_routers_run_from_the_start(app: FastAPI, micro: Grelmicro) -> None:
    inner, outer = APIRouter(dependencies=[Depends(leader("router"))]), APIRouter()

    async def below(one: Annotated[LeaderElection, Depends(election("below"))]) -> None: ...

    @inner.get("/")
    @leader_only("guard")
    async def take(_: Annotated[None, Depends(below)]) -> None: ...

    outer.include_router(inner, prefix="/inner", dependencies=[Depends(leader("include"))])
    app.include_router(outer, prefix="/outer")
    sub = FastAPI()
    sub.get("/")(leader_only("mounted")(never))
    app.mount("/sub", sub)
    async with started(app):
        assert sorted(micro.elections) == ["below", "guard", "include", "mounted", "router"]
        assert all(one.is_running() for one in micro.elections.values())


async def test_a_guard_above_the_decorator_of_a_route_is_found_at_the_start(app: FastAPI) -> None:
    """67."""

    @leader_only
    @app.get("/")
    async def unguarded() -> None: ...

    with pytest.raises(RuntimeError, match="unguarded"):
        async with started(app):
            pytest.fail("it started")
