"""Which lock a template or a key function means."""

import asyncio
from typing import Annotated, Any
from uuid import UUID

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Path, WebSocket

from grel_core import Grelmicro
from grel_core.coordination import Lock, LockHandle, lock_name
from grel_fastapi import held_lock, lock
from tests.fastapi.serving import Exchange, serving, started
from tests.harness import MemoryHarness

pytestmark = pytest.mark.anyio

Order = Annotated[LockHandle, Depends(held_lock("order:{order_id}"))]


@pytest.fixture
def app(micro: Grelmicro) -> FastAPI:
    return micro.install(FastAPI())


def show(app: FastAPI, path: str, endpoint: Any) -> None:
    """Serve `endpoint` at `path`."""
    app.get(path)(endpoint)


async def test_one_value_spelled_in_many_ways_is_one_lock(app: FastAPI) -> None:
    """57."""

    @app.get("/n/{order_id}")
    async def number(order_id: int, order: Order) -> str:
        return order.name

    @app.get("/uuid/{order_id}")
    async def uuid(order_id: UUID, order: Order) -> str:
        return order.name

    @app.get("/converter/{order_id:int}")
    async def converter(order_id: int, order: Order) -> str:
        return order.name

    @app.get("/bare/{order_id}")
    async def bare(order: Order) -> str:
        return order.name

    @app.get("/annotated/{order_id}")
    async def annotated(order_id: Annotated[int, Path(ge=1)], order: Order) -> str:
        return order.name

    uuids = ["6F9619FF-8B86-D011-B42D-00CF4FC964FF", "6f9619ff8b86d011b42d00cf4fc964ff"]
    async with serving(app) as client:
        for path in ("/n/7", "/n/007", "/n/+7", "/n/%37", "/converter/007", "/annotated/07", "/bare/7"):
            assert (await client.get(path)).json() == "order:7", path
        assert {(await client.get(f"/uuid/{one}")).json() for one in uuids} == {f"order:{UUID(uuids[0])}"}


async def test_a_dependency_may_be_the_one_that_declares_the_type(app: FastAPI) -> None:
    """57."""

    async def loaded(order_id: int) -> int:
        return order_id

    router = APIRouter(prefix="/tenants/{tenant}")

    @router.get("/orders/{order_id}")
    async def take(
        tenant: UUID,
        order: Annotated[int, Depends(loaded)],
        handle: Annotated[LockHandle, Depends(held_lock("{tenant}:{order_id}"))],
    ) -> str:
        return handle.name

    app.include_router(router)
    async with serving(app) as client:
        tenant = "6F9619FF-8B86-D011-B42D-00CF4FC964FF"
        assert (await client.get(f"/tenants/{tenant}/orders/007")).json() == f"{tenant.lower()}:7"


async def test_an_impossible_value_is_422_and_takes_nothing(app: FastAPI, store: MemoryHarness) -> None:
    """58."""

    @app.get("/{order_id}")
    async def take(order_id: int, order: Order) -> None: ...

    @app.websocket("/ws/{order_id}")
    async def talk(websocket: WebSocket, order_id: int, order: Order) -> None: ...

    async with serving(app) as client:
        answer = await client.get("/seven")
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"] == ["path", "order_id"]
        async with Exchange(app, "/ws/seven", websocket=True) as exchange:
            await exchange.ended()
            assert exchange.closed is not None
            assert exchange.closed[0] == 1008
        assert await store.keys() == 0


def line(text: str = "") -> str:
    """A name that the client chooses."""
    return text


@pytest.mark.parametrize("kind", ["lock", "held_lock"])
async def test_a_value_that_no_name_can_hold_is_422_and_takes_nothing(
    app: FastAPI, store: MemoryHarness, kind: str
) -> None:
    """58."""
    make: Any = lock if kind == "lock" else held_lock

    def taking(*names: Any) -> Any:
        needs: list[Any] = [Annotated[Any, Depends(make(name))] for name in names]

        async def take(first: needs[0], last: needs[-1]) -> str:  # type: ignore[valid-type]  # made for each path
            return str(last.name)  # type: ignore[attr-defined]  # as above

        return take

    app.get("/s/{sku}")(taking("s:{sku}"))
    app.get("/p/{sku:path}")(taking("{sku}"))
    app.get("/two/{a}/{b}")(taking("two", "two:{a}:{b}"))
    app.get("/many/" + "/".join(f"{{x{number}}}" for number in range(9)))(
        taking(":".join(f"{{x{number}}}" for number in range(9)))
    )
    app.get("/key")(taking(line))
    app.websocket("/ws/{sku}")(taking("s:{sku}"))
    refused = {
        "/s/%00": "sku",
        "/s/%0A": "sku",
        "/s/%C2%85": "sku",
        "/p/": "sku",
        "/two/x/%7F": "b",
        "/two/%1B/x": "a",
        f"/many/{'/'.join('x' * 100 for _ in range(9))}": "x8",
        "/key": None,
        "/key?text=%00": None,
        f"/key?text={'x' * 600}": None,
    }
    async with serving(app) as client:
        for path, field in refused.items():
            answer = await client.get(path)
            assert answer.status_code == 422, path[:20]
            (wrong,) = answer.json()["detail"]
            assert wrong["loc"] == (["path", field] if field else ["key"])
            assert "name" in wrong["msg"]
        assert (await client.get("/s/\u2028%20")).json() == "s:\u2028 "
        async with Exchange(app, "/ws/\0", websocket=True) as exchange:
            await exchange.ended()
            assert exchange.closed is not None
            assert exchange.closed[0] == 1008
        for name in ("two", "s:\u2028 "):
            assert not await Lock(name, backend=store.provider().lock()).locked()


async def test_values_cannot_run_into_each_other(app: FastAPI) -> None:
    """59."""

    @app.get("/{a}/{b:path}")
    async def take(a: str, held: Annotated[LockHandle, Depends(held_lock("p:{a}:{b}"))]) -> str:
        return held.name

    async with serving(app) as client:
        names = [
            (await client.get(f"/{path}")).json()
            for path in ("1:2/3", "1/2:3", "1%253A2/3", "ü/{}", "ü/%7B%7D", "a/b/c", f"{'x' * 10_000}/1")
        ]
    assert len(set(names)) == len(names) - 1, "only the two spellings of braces are one"
    assert all(len(name.encode()) <= 512 for name in names)
    assert names[0] == "p:1%3A2:3"


async def test_a_template_gives_the_name_that_lock_name_gives(app: FastAPI, store: MemoryHarness) -> None:
    @app.get("/{order_id}")
    async def take(order_id: int, order: Annotated[Lock, Depends(lock("order:{order_id}"))]) -> str:
        return order.name

    async with serving(app) as client:
        assert (await client.get("/07")).json() == lock_name("order:{order_id}", order_id=7) == "order:7"


async def user(authorization: Annotated[str, Header()] = "") -> str:
    """Who asks."""
    if not authorization:
        raise HTTPException(401)
    return authorization


def cart_key(user: Annotated[str, Depends(user)], tenant: Annotated[int, Header()]) -> str:
    """The lock of one user's cart."""
    return f"cart:{tenant}:{user}"


async def test_a_key_function_is_a_dependency(app: FastAPI, store: MemoryHarness) -> None:
    """60."""
    seen: list[str] = []

    @app.post("/")
    async def take(cart: Annotated[LockHandle, Depends(held_lock(cart_key))]) -> None:
        seen.append(cart.name)

    async with serving(app) as client:
        assert (await client.post("/", headers={"tenant": "1"})).status_code == 401
        assert (await client.post("/", headers={"tenant": "x", "authorization": "ann"})).status_code == 422
        assert await store.keys() == 0
        assert (await client.post("/", headers={"tenant": "01", "authorization": "ann"})).status_code == 200
        parameters = (await client.get("/openapi.json")).json()["paths"]["/"]["post"]["parameters"]
    assert seen == ["cart:1:ann"]
    assert sorted(one["name"] for one in parameters) == ["authorization", "tenant"]


async def test_a_placeholder_that_the_path_lacks_is_a_mistake_of_the_program(
    app: FastAPI, store: MemoryHarness
) -> None:
    """61."""

    @app.get("/{id}")
    async def take(id: int, order: Order) -> None: ...  # noqa: A002 - as people do

    async with started(app), Exchange(app, "/7") as exchange:
        with pytest.raises(ValueError, match="'order_id'"):
            await exchange.task
    assert await store.keys() == 0


@pytest.mark.parametrize(
    "template", ["", "order:{order.id}", "order:{order_id!r}", "a\nb", "a\nb{order_id}", "x" * 513 + "{order_id}"]
)
def test_an_impossible_template_is_refused_where_it_stands(template: str) -> None:
    with pytest.raises(ValueError, match="name"):
        held_lock(template)


def test_equal_arguments_make_equal_dependencies() -> None:
    assert held_lock("cart", timeout=1) == held_lock("cart", timeout=1)
    assert hash(held_lock(cart_key)) == hash(held_lock(cart_key))
    assert held_lock("cart") != held_lock("cart", timeout=1)
    assert lock("cart") == lock("cart")


async def test_a_lock_dependency_can_be_overridden(app: FastAPI, store: MemoryHarness) -> None:
    """77."""

    @app.get("/")
    async def take(cart: Annotated[Any, Depends(held_lock("cart"))]) -> str:
        return str(cart)

    app.dependency_overrides[held_lock("cart")] = lambda: "a fake"
    async with serving(app) as client:
        assert (await client.get("/")).json() == "a fake"
    assert await store.keys() == 0


async def test_two_coordination_components_keep_their_locks_apart(store: MemoryHarness) -> None:
    """88."""
    from grel_core.coordination import Coordination
    from grel_core.providers.memory import MemoryProvider

    micro = Grelmicro(uses=[Coordination(MemoryProvider()), Coordination(MemoryProvider(), name="analytics")])
    app = micro.install(FastAPI())
    both, inside = asyncio.Barrier(2), []

    @app.get("/")
    async def one(cart: Annotated[LockHandle, Depends(held_lock("cart", timeout=0))]) -> None:
        inside.append(cart.fencing_token)
        await both.wait()

    @app.get("/analytics")
    async def other(cart: Annotated[LockHandle, Depends(held_lock("cart", timeout=0, backend="analytics"))]) -> None:
        inside.append(cart.fencing_token)
        await both.wait()

    async with serving(app) as client:
        answers = await asyncio.gather(client.get("/"), client.get("/analytics"))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(inside) == 2
