"""`lock` and `held_lock`: when a request holds a lock, and what happens when it cannot."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Annotated, Any, Literal

import anyio
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from grel_core import Grelmicro
from grel_core.coordination import Lock, LockHandle
from grel_core.threads import EventLoopDeadlockError
from grel_fastapi import held_lock, lock
from tests.fastapi.serving import Exchange, broken, passing, serving, started
from tests.harness import MemoryHarness, eventually

pytestmark = pytest.mark.anyio

Cart = Annotated[LockHandle, Depends(held_lock("cart"))]
Now = Annotated[LockHandle, Depends(held_lock("cart", timeout=0))]
ToTheEnd = Annotated[LockHandle, Depends(held_lock("cart", hold="response"))]


@pytest.fixture
def app(micro: Grelmicro) -> FastAPI:
    return micro.install(FastAPI())


@asynccontextmanager
async def held_elsewhere(store: MemoryHarness, name: str = "cart") -> AsyncIterator[LockHandle]:
    """Somebody else holds the lock."""
    handle = await Lock(name, backend=store.provider().lock()).acquire(timeout=0)
    try:
        yield handle
    finally:
        await handle.release()


async def locked(store: MemoryHarness, name: str = "cart") -> bool:
    """Whether anybody holds the lock."""
    return await Lock(name, backend=store.provider().lock()).locked()


async def free(store: MemoryHarness, name: str = "cart") -> bool:
    """Whether nobody holds the lock."""
    return not await locked(store, name)


async def never() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()


# Until when it is held.


async def test_a_lock_is_free_again_before_the_response_begins(app: FastAPI, store: MemoryHarness) -> None:
    """21, 24."""
    seen: list[bool] = []

    async def note() -> None:
        seen.append(await locked(store))

    @app.get("/")
    async def take(cart: Cart, later: BackgroundTasks) -> None:
        await note()
        later.add_task(note)

    async with started(app), Exchange(app, "/") as exchange:
        exchange.reading.clear()  # a client that does not read
        await eventually(lambda: len(seen) == 1)
        await eventually(lambda: free(store))
        assert exchange.sent == []
        exchange.reading.set()
        await exchange.ended()
    assert seen == [True, False]


async def test_hold_response_holds_to_the_last_byte_and_the_last_background_task(
    app: FastAPI, store: MemoryHarness
) -> None:
    """22."""
    seen: list[bool] = []

    async def note() -> None:
        seen.append(await locked(store))

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (b"a", b"b"):
            await note()
            yield chunk

    @app.get("/")
    async def take(cart: ToTheEnd, later: BackgroundTasks) -> StreamingResponse:
        later.add_task(note)
        return StreamingResponse(chunks(), background=later)

    async with serving(app) as client:
        assert (await client.get("/")).content == b"ab"
        assert seen == [True, True, True]
        assert await free(store)


async def test_whatever_an_endpoint_raises_frees_the_lock(app: FastAPI, store: MemoryHarness) -> None:
    """23."""

    @app.get("/refused")
    async def refused(cart: Cart) -> None:
        raise HTTPException(418)

    @app.get("/broken")
    async def broken(cart: Cart) -> None:
        raise ValueError("broken")

    @app.get("/model")
    async def model(cart: Cart) -> int:
        return "no number"  # type: ignore[return-value]  # the mistake under test

    @app.get("/invalid")
    async def invalid(cart: Cart, number: int) -> None: ...

    async with serving(app) as client:
        for path, status in {"/refused": 418, "/broken": 500, "/model": 500, "/invalid?number=x": 422}.items():
            assert (await client.get(path)).status_code == status
            assert await free(store), path


async def test_a_lock_outlives_its_lease_by_renewal(app: FastAPI, store: MemoryHarness) -> None:
    """29."""

    @app.get("/")
    async def take(cart: Annotated[LockHandle, Depends(held_lock("cart", lease_duration=3))]) -> bool:
        await passing(20)
        cart.ensure()
        return await locked(store)

    async with serving(app) as client:
        assert (await client.get("/")).json() is True


async def test_max_hold_ends_it(app: FastAPI, store: MemoryHarness) -> None:
    """29."""

    @app.get("/")
    async def take(cart: Annotated[LockHandle, Depends(held_lock("cart", max_hold=2))]) -> None:
        await never()

    async with serving(app) as client:
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await client.get("/")).status_code == 500
        assert loop.time() - began == pytest.approx(2, abs=0.1)
        assert await free(store)


# Losing it.


async def test_losing_the_lease_cancels_an_async_endpoint_and_answers_500(app: FastAPI, store: MemoryHarness) -> None:
    """25, 27."""
    inside, cancelled = asyncio.Event(), asyncio.Event()

    @app.get("/")
    async def take(cart: Cart) -> None:
        inside.set()
        try:
            await never()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with started(app), Exchange(app, "/") as exchange:
        await inside.wait()
        await store.advance(70)
        await exchange.ended()
        assert cancelled.is_set()
        assert exchange.status == 500
        assert b"urn:grel:problem:lock-lost" in exchange.body
        assert b"retry-after" not in dict(exchange.sent[0]["headers"])


@pytest.mark.parametrize(("on_lost", "status"), [("error", 500), ("ignore", 200), ("cancel", 500)])
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_on_lost_decides_what_a_lost_lease_means_to_an_endpoint_that_ends(
    app: FastAPI, store: MemoryHarness, on_lost: Any, status: int, kind: str
) -> None:
    """25."""
    held = Annotated[LockHandle, Depends(held_lock("cart", on_lost=on_lost))]
    inside, lost = threading.Event(), threading.Event()

    async def on_the_loop(cart: held) -> str:
        inside.set()
        if on_lost == "cancel":
            await never()
        await cart.lost.wait()
        return "done"

    def in_a_thread(cart: held) -> str:
        inside.set()
        assert lost.wait(60)
        return "done"

    app.get("/")(on_the_loop if kind == "async" else in_a_thread)
    async with started(app), Exchange(app, "/") as exchange:
        await eventually(inside.is_set)
        await store.advance(70)
        await passing(30)
        if kind == "sync":
            assert not exchange.task.done(), "it was answered while its thread was at work"
        lost.set()
        assert (await exchange.ended()).status == status


async def test_an_endpoints_own_error_counts_more_than_a_lost_lease(
    app: FastAPI, store: MemoryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """26."""
    inside = asyncio.Event()

    @app.get("/")
    async def take(cart: Annotated[LockHandle, Depends(held_lock("cart", on_lost="error"))]) -> None:
        inside.set()
        await cart.lost.wait()
        raise HTTPException(418)

    async with started(app), Exchange(app, "/") as exchange:
        await inside.wait()
        await store.advance(70)
        assert (await exchange.ended()).status == 418
    assert any(record.levelno == logging.WARNING for record in caplog.records)


async def test_a_lease_lost_behind_a_response_that_began_is_only_logged(
    app: FastAPI, store: MemoryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """28."""
    streaming = asyncio.Event()

    async def chunks(cart: LockHandle) -> AsyncIterator[bytes]:
        yield b"a"
        streaming.set()
        await cart.lost.wait()
        yield b"b"

    @app.get("/")
    async def take(cart: ToTheEnd) -> StreamingResponse:
        return StreamingResponse(chunks(cart))

    async with started(app), Exchange(app, "/") as exchange:
        await streaming.wait()
        await store.advance(70)
        await exchange.ended()
        assert (exchange.status, exchange.body) == (200, b"ab")
        assert exchange.task.exception() is None
    assert "lost before the response was sent" in caplog.text


async def test_a_backend_that_fails_at_the_release_does_not_spoil_the_answer(
    app: FastAPI, store: MemoryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    outage = ExitStack()

    @app.get("/")
    async def take(cart: Cart) -> str:
        outage.enter_context(broken(store.provider()))
        return "done"

    async with serving(app) as client:
        with outage:
            answer = await client.get("/")
        assert (answer.status_code, answer.json()) == (200, "done")
    assert "could not be given back (ConnectionError)" in caplog.text


# Once a request.


async def test_a_request_takes_a_lock_once_however_often_it_asks(app: FastAPI, store: MemoryHarness) -> None:
    """30, 32."""
    tokens: list[int] = []

    async def below(cart: Cart) -> int:
        return cart.fencing_token

    router = APIRouter(dependencies=[Depends(held_lock("cart"))])

    @router.get("/", dependencies=[Depends(held_lock("cart"))])
    async def take(
        cart: Cart,
        token: Annotated[int, Depends(below)],
        again: Annotated[LockHandle, Depends(held_lock("cart"), use_cache=False)],
        another: Annotated[LockHandle, Depends(held_lock("cart", timeout=1))],
    ) -> None:
        tokens.extend([cart.fencing_token, token, again.fencing_token, another.fencing_token])

    app.include_router(router)
    async with serving(app) as client:
        assert (await client.get("/")).status_code == 200
        assert len(set(tokens)) == 1
        assert await free(store)


@pytest.mark.parametrize("order", ["endpoint first", "response first"])
async def test_both_kinds_of_hold_share_one_claim_until_the_later_end(
    app: FastAPI, store: MemoryHarness, order: str
) -> None:
    """31."""
    seen: list[bool] = []

    async def chunks() -> AsyncIterator[bytes]:
        seen.append(await locked(store))
        yield b""

    both: list[Any] = [Depends(held_lock("cart")), Depends(held_lock("cart", hold="response"))]

    @app.get("/", dependencies=both if order == "endpoint first" else both[::-1])
    async def take() -> StreamingResponse:
        return StreamingResponse(chunks())

    async with serving(app) as client:
        assert (await client.get("/")).status_code == 200
        assert seen == [True]
        assert await free(store)


@pytest.mark.parametrize(
    ("hold", "scope", "order", "inside"),
    [
        ("endpoint", "function", "lock, session", True),
        ("endpoint", "function", "session, lock", False),
        ("endpoint", "request", "lock, session", False),
        ("response", "function", "session, lock", True),
        ("response", "request", "lock, session", True),
        ("response", "request", "session, lock", False),
    ],
)
async def test_a_session_commits_under_the_lock_only_in_the_right_order(
    app: FastAPI,
    store: MemoryHarness,
    hold: Literal["endpoint", "response"],
    scope: Literal["function", "request"],
    order: str,
    inside: bool,
) -> None:
    """35. Rule: commit in the endpoint; else declare the lock before the session, and give both the same life."""
    commits: list[bool] = []

    async def session() -> AsyncIterator[None]:
        yield
        commits.append(await locked(store))

    needs: list[Any] = [Depends(held_lock("cart", hold=hold)), Depends(session, scope=scope)]
    one, two = needs if order == "lock, session" else needs[::-1]

    @app.get("/")
    async def take(first: Annotated[Any, one], second: Annotated[Any, two]) -> None: ...

    async with serving(app) as client:
        assert (await client.get("/")).status_code == 200
    assert commits == [inside]


async def test_who_may_not_come_in_takes_no_lock(app: FastAPI, store: MemoryHarness) -> None:
    """36."""

    async def user() -> str:
        raise HTTPException(401)

    @app.get("/", dependencies=[Depends(user), Depends(held_lock("cart"))])
    async def take() -> None: ...

    async with serving(app) as client:
        assert (await client.get("/")).status_code == 401
        assert await store.keys() == 0


# Waiting.


async def test_a_request_waits_as_long_as_it_was_told(app: FastAPI, store: MemoryHarness) -> None:
    """38."""

    @app.get("/now")
    async def now(cart: Now) -> None: ...

    @app.get("/soon")
    async def soon(cart: Annotated[LockHandle, Depends(held_lock("cart", timeout=3))]) -> None: ...

    async with serving(app) as client, held_elsewhere(store):
        loop = asyncio.get_running_loop()
        for path, seconds in {"/now": 0, "/soon": 3}.items():
            began = loop.time()
            assert (await client.get(path)).status_code == 423
            assert loop.time() - began == pytest.approx(seconds, abs=0.2)


async def test_a_request_gets_the_lock_as_soon_as_it_is_free(app: FastAPI, store: MemoryHarness) -> None:
    @app.get("/")
    async def take(cart: Cart) -> int:
        return cart.fencing_token

    async with started(app), Exchange(app, "/") as exchange:
        async with held_elsewhere(store):
            await waiting(store)
        assert (await exchange.ended()).status == 200
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name() in {"grel: look", "grel: watch"}]


async def waiting(store: MemoryHarness, count: int = 1) -> None:
    """Until so many wait, and have done so for long enough to be looked after."""
    await eventually(lambda: store.provider().lines.total() == count)
    await passing(0.2)


@pytest.mark.parametrize("once", [False, True], ids=["says it again", "says it once"])
async def test_a_client_that_leaves_while_it_waits_gets_no_lock(app: FastAPI, store: MemoryHarness, once: bool) -> None:
    """39, 42."""
    ran: list[bool] = []

    @app.post("/")
    async def take(cart: Cart) -> None:
        ran.append(True)

    async with started(app), held_elsewhere(store) as holder:
        async with Exchange(app, "/", method="POST", once=once) as exchange:
            await waiting(store)
            exchange.leave()
            assert (await exchange.ended()).status == 499
        assert store.provider().lines.total() == 0
        assert holder.expires_in > 0
    assert ran == []
    assert await free(store)


async def test_a_websocket_that_leaves_while_it_waits_gets_no_lock(app: FastAPI, store: MemoryHarness) -> None:
    """39."""

    @app.websocket("/")
    async def talk(cart: Cart) -> None:
        pytest.fail("it came in")

    async with started(app), held_elsewhere(store), Exchange(app, "/", websocket=True) as exchange:
        await waiting(store)
        exchange.leave()
        await exchange.ended()
        assert exchange.task.exception() is None
        assert exchange.closed == (1001, "")


@pytest.mark.parametrize("once", [False, True], ids=["says it again", "says it once"])
async def test_what_is_sent_while_waiting_is_read_afterwards(app: FastAPI, store: MemoryHarness, once: bool) -> None:
    """40, 42."""
    gone: list[bool] = []

    @app.post("/")
    async def take(cart: Cart, request: Request) -> bytes:
        body = b"".join([chunk async for chunk in request.stream()])
        await eventually(request.is_disconnected)
        gone.append(await request.is_disconnected())
        return body

    chunks = [b"one ", b"two ", b"three"]
    async with started(app), Exchange(app, "/", method="POST", body=chunks, once=once) as exchange:
        async with held_elsewhere(store):
            await waiting(store)
        await eventually(lambda: free(store) if exchange.task.done() else locked(store))
        exchange.leave()
        await exchange.ended()
        assert exchange.body == b'"one two three"'
        assert gone == [True]


async def test_a_long_body_stops_the_look_and_is_still_complete(app: FastAPI, store: MemoryHarness) -> None:
    """40."""

    @app.post("/")
    async def take(cart: Cart, request: Request) -> int:
        return len(await request.body())

    chunks = [b"x" * 30_000] * 10
    async with started(app), Exchange(app, "/", method="POST", body=chunks) as exchange:
        async with held_elsewhere(store):
            await waiting(store)
            assert len(exchange.inbox) > 5, "it was read ahead without limit"
        await exchange.ended()
        assert exchange.body == b"300000"


async def test_a_client_that_leaves_while_it_holds_is_served_to_the_end(app: FastAPI, store: MemoryHarness) -> None:
    """41."""
    inside, go = asyncio.Event(), asyncio.Event()

    @app.get("/")
    async def take(cart: Cart) -> str:
        inside.set()
        await go.wait()
        return "done"

    async with started(app), Exchange(app, "/") as exchange:
        await inside.wait()
        exchange.leave()
        go.set()
        await exchange.ended()
        assert exchange.body == b'"done"'
        assert await free(store)


async def test_too_many_waiters_are_turned_away(app: FastAPI, store: MemoryHarness) -> None:
    """47."""

    @app.get("/")
    async def take(cart: Annotated[LockHandle, Depends(held_lock("cart", max_waiters=2))]) -> None: ...

    async with serving(app) as client:
        async with held_elsewhere(store):
            tasks = [asyncio.create_task(client.get("/")) for _ in range(5)]
            await eventually(lambda: sum(task.done() for task in tasks) == 3)
            refused = [task.result() for task in tasks if task.done()]
            assert {answer.json()["type"] for answer in refused} == {"urn:grel:problem:lock-queue-full"}
            assert {answer.status_code for answer in refused} == {423}
        assert sorted(answer.status_code for answer in await asyncio.gather(*tasks)) == [200, 200, 423, 423, 423]


async def test_sixty_sync_endpoints_take_turns(app: FastAPI, store: MemoryHarness) -> None:
    """48."""
    inside: list[int] = []
    most: list[int] = []

    @app.get("/")
    def take(cart: Annotated[LockHandle, Depends(held_lock("cart", timeout=None))]) -> None:
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    async with serving(app) as client:
        answers = await asyncio.gather(*(client.get("/") for _ in range(60)))
    assert [answer.status_code for answer in answers] == [200] * 60
    assert max(most) == 1


# Being cancelled.


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_request_gives_its_lock_back(app: FastAPI, store: MemoryHarness, times: int) -> None:
    """43."""
    inside = asyncio.Event()

    @app.get("/")
    async def take(cart: Cart) -> None:
        inside.set()
        await never()

    async with started(app), Exchange(app, "/") as exchange:
        await inside.wait()
        store.delay.longest = 0.2
        for _ in range(times):
            exchange.task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([exchange.task])
        assert exchange.task.cancelled()
        store.delay.longest = 0
        await eventually(lambda: free(store), within=1)


async def test_a_timeout_around_the_app_gives_the_lock_back(micro: Grelmicro, store: MemoryHarness) -> None:
    """44."""

    class Impatient:
        def __init__(self, inner: ASGIApp) -> None:
            self._inner = inner

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await self._inner(scope, receive, send)
                return
            with anyio.move_on_after(0.5):
                await self._inner(scope, receive, send)

    app = micro.install(FastAPI())
    app.add_middleware(Impatient)
    inside = asyncio.Event()

    @app.get("/")
    async def take(cart: Cart) -> None:
        inside.set()
        await never()

    async with started(app), Exchange(app, "/") as exchange:
        await inside.wait()
        assert (await exchange.ended()).status is None
        await eventually(lambda: free(store), within=1)


async def test_a_request_cancelled_on_its_way_in_leaves_nothing_behind(app: FastAPI, store: MemoryHarness) -> None:
    """45."""

    @app.get("/")
    async def take(cart: Cart) -> None:
        await never()

    async with started(app):
        store.delay.longest = 0.3
        for step in range(60):
            async with Exchange(app, "/") as exchange:
                await passing(step / 100)
                exchange.task.cancel()
                await asyncio.wait([exchange.task])
        await eventually(lambda: free(store), within=2)


async def test_middleware_of_starlettes_own_kind_changes_nothing(micro: Grelmicro, store: MemoryHarness) -> None:
    """46."""

    async def passing(request: Request, call_next: Any) -> Any:
        return await call_next(request)

    app = FastAPI()
    app.add_middleware(BaseHTTPMiddleware, dispatch=passing)
    micro.install(app)
    app.add_middleware(BaseHTTPMiddleware, dispatch=passing)
    ran: list[bool] = []

    @app.post("/")
    async def take(cart: Cart, request: Request) -> bytes:
        ran.append(await locked(store))
        return await request.body()

    async with started(app):
        async with Exchange(app, "/", method="POST", body=[b"a", b"b"]) as exchange:
            async with held_elsewhere(store):
                await waiting(store)
            await exchange.ended()
            assert exchange.body == b'"ab"'
            assert await free(store)
        async with held_elsewhere(store), Exchange(app, "/", method="POST") as exchange:
            await waiting(store)
            exchange.leave()
            await exchange.ended()
    assert ran == [True]


async def test_a_sync_endpoint_that_is_cancelled_keeps_its_lease_while_its_thread_works(
    app: FastAPI, store: MemoryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """52."""
    inside, go = threading.Event(), threading.Event()

    @app.get("/")
    def take(cart: Annotated[LockHandle, Depends(held_lock("cart", lease_duration=20))]) -> None:
        inside.set()
        assert go.wait(60)

    async with started(app), Exchange(app, "/") as exchange:
        await eventually(inside.is_set)
        exchange.task.cancel()
        await asyncio.wait([exchange.task])
        assert await locked(store)
        assert "its thread is at work" in caplog.text
        await passing(18)
        assert await locked(store)
        await passing(3)
        assert await free(store)
        go.set()


async def test_no_request_gets_a_lock_from_an_app_that_closes(
    app: FastAPI, micro: Grelmicro, store: MemoryHarness
) -> None:
    """54."""

    @app.get("/")
    async def take(cart: Cart) -> None: ...

    async with serving(app) as client, held_elsewhere(store):
        early = asyncio.create_task(client.get("/"))
        await waiting(store)
        micro.begin_shutdown()
        late = await client.get("/")
        for answer in (late, await early):
            assert answer.status_code == 503
            assert answer.json()["type"] == "urn:grel:problem:shutting-down"
            assert answer.headers["Connection"] == "close"
            assert int(answer.headers["Retry-After"]) >= 1


# The lock itself.


async def test_an_endpoint_may_take_the_lock_itself_for_as_short_as_it_likes(
    app: FastAPI, store: MemoryHarness
) -> None:
    @app.get("/{item}")
    async def take(item: int, cart: Annotated[Lock, Depends(lock("cart:{item}"))]) -> str:
        before = await locked(store, cart.name)
        async with cart.hold(timeout=0):
            return f"{cart.name} {before} {await locked(store, cart.name)}"

    async with serving(app) as client:
        assert (await client.get("/007")).json() == "cart:7 False True"
        async with held_elsewhere(store, "cart:7"):
            assert (await client.get("/7")).status_code == 423


async def test_a_sync_endpoint_takes_the_lock_through_from_thread(app: FastAPI, store: MemoryHarness) -> None:
    """50."""

    @app.get("/thread")
    def in_a_thread(cart: Annotated[Lock, Depends(lock("cart"))]) -> int:
        with cart.from_thread.hold(timeout=2) as handle:
            return handle.fencing_token

    @app.get("/loop")
    async def on_the_loop(cart: Annotated[Lock, Depends(lock("cart"))]) -> str:
        try:
            cart.from_thread.acquire(timeout=2)
        except EventLoopDeadlockError as error:
            return str(error)
        return "no error"

    async with serving(app) as client:
        assert (await client.get("/thread")).json() > 0
        assert "await the async method instead" in (await client.get("/loop")).json()
        assert await free(store)


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_sync_yield_dependency_may_hold_the_lock(app: FastAPI, store: MemoryHarness, kind: str) -> None:
    """18 of the peer's faults: it is left in another thread than it was entered in."""
    inside: list[int] = []

    def cart() -> Iterator[LockHandle]:
        with Lock("cart").from_thread as handle:
            inside.append(handle.fencing_token)
            assert len(inside) == 1
            yield handle
            inside.pop()

    async def on_the_loop(cart: Annotated[LockHandle, Depends(cart)]) -> None:
        await passing(0.01)

    def in_a_thread(cart: Annotated[LockHandle, Depends(cart)]) -> None:
        cart.ensure()

    app.get("/")(on_the_loop if kind == "async" else in_a_thread)
    async with serving(app) as client:
        answers = await asyncio.gather(*(client.get("/") for _ in range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        assert await free(store)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"timeout": -1}),
        (TypeError, {"timeout": "5"}),
        (ValueError, {"max_hold": 0}),
        (ValueError, {"hold": "ever"}),
        (ValueError, {"hold": []}),
        (ValueError, {"on_lost": "shrug"}),
        (ValueError, {"on_lost": {}}),
        (ValueError, {"max_waiters": 0}),
        (TypeError, {"max_waiters": 1.5}),
        (TypeError, {"max_waiters": True}),
        (TypeError, {"max_waiters": "5"}),
        (TypeError, {"on_busy": []}),
        (TypeError, {"on_busy": True}),
        (ValueError, {"on_busy": 200}),
        (ValueError, {"lease_duration": -1}),
        (ValueError, {"lease_duration": float("nan")}),
        (TypeError, {"lease_duration": "5"}),
        (TypeError, {"lease_duration": []}),
        (TypeError, {"backend": 5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["cart", "cart:{item}", never])
def test_impossible_options_are_refused_where_they_stand(error: Any, options: dict[str, Any], name: Any) -> None:
    option = "LockBackend" if "backend" in options else next(iter(options))
    with pytest.raises(error, match=option):
        held_lock(name, **options)
    if option in {"lease_duration", "LockBackend"}:
        with pytest.raises(error, match=option):
            lock(name, **options)


@pytest.mark.parametrize("make", [lock, held_lock])
@pytest.mark.parametrize("name", [5, None, b"cart"])
def test_a_name_that_is_no_text_is_refused_where_it_stands(make: Any, name: Any) -> None:
    with pytest.raises(TypeError, match="a name is text"):
        make(name)
