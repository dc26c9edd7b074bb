"""What clients are told."""

import asyncio
import logging
import re
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Request, Response, WebSocket
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from grel_core import Grelmicro
from grel_core.coordination import Lock, LockHandle, WouldBlockError
from grel_core.errors import CoordinationError
from grel_fastapi import held_lock, leader
from tests.fastapi.serving import Exchange, broken, serving, started
from tests.fastapi.test_held_lock import held_elsewhere
from tests.harness import MemoryHarness, eventually

pytestmark = pytest.mark.anyio

Order = Annotated[LockHandle, Depends(held_lock("order:{order_id}", timeout=0))]
DENIAL = "websocket.http.response"


def ordering(micro: Grelmicro, **options: Any) -> FastAPI:
    """An app that locks orders."""
    app = micro.install(FastAPI(), **options)

    @app.get("/orders/{order_id}")
    async def take(order_id: int, order: Order) -> None: ...

    return app


async def test_busy_is_a_423_that_says_when_to_come_again(micro: Grelmicro, store: MemoryHarness) -> None:
    """72."""
    async with serving(ordering(micro)) as client, held_elsewhere(store, "order:7"):
        answer = await client.get("/orders/07?secret=1")
    body = answer.json()
    retry_after = body.pop("retry_after")
    assert answer.status_code == 423
    assert body == {
        "type": "urn:grel:problem:lock-busy",
        "title": "Lock is held elsewhere",
        "status": 423,
        "instance": "/orders/07",
        "lock": "order:{order_id}",
    }
    assert retry_after == int(answer.headers["Retry-After"]) >= 1
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_backend_that_is_down_is_a_503_and_nothing_runs(micro: Grelmicro, store: MemoryHarness) -> None:
    """73."""
    ran: list[bool] = []
    app = micro.install(FastAPI())

    @app.get("/")
    async def take(cart: Annotated[LockHandle, Depends(held_lock("cart", timeout=1))]) -> None:
        ran.append(True)

    async with serving(app) as client:
        with broken(store.provider()):
            answer = await client.get("/")
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:grel:problem:coordination-unavailable")
        assert "password" not in answer.text
        assert ran == []
        assert (await client.get("/")).status_code == 200


async def test_a_backend_that_is_silent_is_a_503_and_not_a_busy_lock(micro: Grelmicro, store: MemoryHarness) -> None:
    app = micro.install(FastAPI())

    @app.get("/", dependencies=[Depends(held_lock("cart", timeout=2))])
    async def take() -> None: ...

    async with serving(app) as client:
        with broken(store.provider(), silent):
            answer = await client.get("/")
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:grel:problem:coordination-unavailable")
        assert (await client.get("/")).status_code == 200


async def silent(*_: object) -> Any:
    """What a store does whose packets are dropped: nothing."""
    await asyncio.Event().wait()


async def test_a_query_that_is_no_text_does_not_spoil_the_answer(micro: Grelmicro, store: MemoryHarness) -> None:
    app = ordering(micro)
    exchange = Exchange(app, "/orders/7")
    exchange.scope["query_string"] = b"\xff"
    async with started(app), held_elsewhere(store, "order:7"), exchange:
        assert (await exchange.ended()).status == 423
        assert b'"/orders/7"' in exchange.body


async def test_an_app_may_choose_other_statuses_and_types(micro: Grelmicro, store: MemoryHarness) -> None:
    """74."""
    app = ordering(micro, status={"lock-busy": 409}, problem_base="https://example.com/problems/")
    async with serving(app) as client, held_elsewhere(store, "order:7"):
        answer = await client.get("/orders/7")
    assert (answer.status_code, answer.json()["status"]) == (409, 409)
    assert answer.json()["type"] == "https://example.com/problems/lock-busy"


def test_a_status_for_no_problem_is_refused(micro: Grelmicro) -> None:
    with pytest.raises(ValueError, match="lock-busy"):
        micro.install(FastAPI(), status={"busy": 409})
    with pytest.raises(TypeError, match="lock-busy"):
        micro.install(FastAPI(), status={"lock-busy": "409"})


async def test_a_lock_may_choose_its_own_answer(micro: Grelmicro, store: MemoryHarness) -> None:
    """74."""

    def refuse(connection: object, error: WouldBlockError) -> Exception:
        return HTTPException(429, str(type(error).__name__))

    app = micro.install(FastAPI(), status={"lock-busy": 409})

    @app.get("/status", dependencies=[Depends(held_lock("cart", timeout=0, on_busy=418))])
    async def status() -> None: ...

    @app.get("/function", dependencies=[Depends(held_lock("cart", timeout=0, on_busy=refuse))])
    async def function() -> None: ...

    async with serving(app) as client, held_elsewhere(store):
        assert (await client.get("/status")).status_code == 418
        answer = await client.get("/function")
        assert (answer.status_code, answer.json()) == (429, {"detail": "WouldBlockError"})


@pytest.mark.parametrize("when", ["before", "after"])
async def test_handlers_of_the_user_win(micro: Grelmicro, store: MemoryHarness, when: str) -> None:
    """74."""
    app = FastAPI()

    def busy(request: Request, error: Exception) -> Response:
        return JSONResponse({"mine": True}, 400)

    if when == "before":
        app.add_exception_handler(WouldBlockError, busy)
    micro.install(app)
    if when == "after":
        app.add_exception_handler(WouldBlockError, busy)

    @app.get("/", dependencies=[Depends(held_lock("cart", timeout=0))])
    async def take() -> None: ...

    async with serving(app) as client, held_elsewhere(store):
        assert (await client.get("/")).json() == {"mine": True}


async def test_without_handlers_the_status_is_still_right(micro: Grelmicro, store: MemoryHarness) -> None:
    app = ordering(micro, handlers=False)
    async with serving(app) as client, held_elsewhere(store, "order:7"):
        answer = await client.get("/orders/7")
    assert (answer.status_code, answer.json()) == (423, {"detail": "Lock is held elsewhere"})
    assert int(answer.headers["Retry-After"]) >= 1


async def test_browsers_of_other_origins_may_read_the_answers(micro: Grelmicro, store: MemoryHarness) -> None:
    """75."""
    app = ordering(micro)
    app.add_middleware(CORSMiddleware, allow_origins=["https://shop.example"], expose_headers=["Retry-After"])
    async with serving(app) as client, held_elsewhere(store, "order:7"):
        answer = await client.get("/orders/7", headers={"Origin": "https://shop.example"})
    assert answer.headers["Access-Control-Allow-Origin"] == "https://shop.example"
    assert answer.headers["Access-Control-Expose-Headers"] == "Retry-After"


async def test_nothing_that_is_nobodys_business_is_told(
    micro: Grelmicro, store: MemoryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """76."""
    caplog.set_level(logging.DEBUG, "grel")
    caught: list[Exception] = []
    app = ordering(micro)

    @app.get("/users/{user}", dependencies=[Depends(held_lock("user:{user}:secret", timeout=0.1))])
    async def take() -> None: ...

    @app.get("/caught")
    async def catch(request: Request) -> None:
        try:
            await Lock("user:ann:secret").acquire(timeout=0)
        except CoordinationError as error:
            caught.append(error)

    @app.get("/lead", dependencies=[Depends(leader())])
    async def lead() -> None: ...

    async with serving(app) as client, held_elsewhere(store, "user:ann:secret") as holder:
        answers = [await client.get(path) for path in ("/users/ann", "/lead?x", "/caught")]
        texts = [f"{answer.text} {answer.headers}" for answer in answers]
        texts += [repr(holder), *map(repr, caught), *map(str, caught), caplog.text]
        assert answers[0].status_code == 423
    for text in texts:
        assert holder.token not in text
        assert holder.token.rpartition(".")[0] not in text
    assert all("ann:secret" not in text for text in texts[:2])
    assert re.search(r"user:\{user\}:secret", answers[0].text)


# WebSockets.


def talking(micro: Grelmicro, *, accept_first: bool = False) -> FastAPI:
    """An app that holds a lock for a whole connection."""
    app = micro.install(FastAPI())

    if accept_first:

        @app.websocket("/")
        async def late(websocket: WebSocket) -> None:
            await websocket.accept()
            await Lock("mic").acquire(timeout=0)

    else:

        @app.websocket("/")
        async def talk(websocket: WebSocket, mic: Annotated[LockHandle, Depends(held_lock("mic", timeout=0))]) -> None:
            await websocket.accept()
            async for text in websocket.iter_text():
                mic.ensure()
                await websocket.send_text(text)

    return app


async def test_a_busy_lock_denies_the_connection_like_a_request(micro: Grelmicro, store: MemoryHarness) -> None:
    """78."""
    app = talking(micro)
    exchange = Exchange(app, "/", websocket=True, extensions=[DENIAL])
    async with started(app), held_elsewhere(store, "mic"), exchange:
        await exchange.ended()
        assert exchange.status == 423
        assert b"lock-busy" in exchange.body
        assert b"retry-after" in dict(exchange.sent[0]["headers"])


@pytest.mark.parametrize("accept_first", [False, True], ids=["before accept", "after accept"])
async def test_a_busy_lock_closes_the_connection_where_it_cannot_be_denied(
    micro: Grelmicro, store: MemoryHarness, accept_first: bool
) -> None:
    """78."""
    app = talking(micro, accept_first=accept_first)
    exchange = Exchange(app, "/", websocket=True, extensions=[DENIAL] if accept_first else [])
    async with started(app), held_elsewhere(store, "mic"), exchange:
        await exchange.ended()
        assert exchange.task.exception() is None
        assert exchange.closed == (1013, "lock-busy")


async def test_a_connection_holds_its_lock_and_is_closed_when_it_is_lost(
    micro: Grelmicro, store: MemoryHarness
) -> None:
    """78."""
    app = talking(micro)
    lock = Lock("mic", backend=store.provider().lock())
    async with started(app), Exchange(app, "/", websocket=True) as exchange:
        exchange.say(type="websocket.receive", text="hello")
        await until_sent(exchange, "websocket.send")
        assert await lock.locked()
        await store.advance(70)
        await exchange.ended()
        assert exchange.task.exception() is None
        assert exchange.closed == (1011, "lock-lost")
        assert not await lock.locked()


async def test_a_connection_that_ends_gives_its_lock_back(micro: Grelmicro, store: MemoryHarness) -> None:
    """56."""
    app = talking(micro)
    lock = Lock("mic", backend=store.provider().lock())
    async with started(app), Exchange(app, "/", websocket=True) as exchange:
        exchange.say(type="websocket.receive", text="hello")
        await until_sent(exchange, "websocket.send")
        exchange.leave()
        await exchange.ended()
        assert not await lock.locked()


async def test_a_connection_to_an_app_that_closes_is_told_so(micro: Grelmicro) -> None:
    """78."""
    app = talking(micro)
    async with started(app):
        micro.begin_shutdown()
        async with Exchange(app, "/", websocket=True) as exchange:
            await exchange.ended()
            assert exchange.closed == (1012, "shutting-down")


async def until_sent(exchange: Exchange, kind: str) -> None:
    """Wait until the app has sent a message of that kind."""
    await eventually(lambda: any(message["type"] == kind for message in exchange.sent))
