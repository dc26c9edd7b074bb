"""Health and coordination endpoints."""

import asyncio
import warnings
from typing import Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from starlette.applications import Starlette

from grel_core import Grelmicro
from grel_core.coordination import LeaderElection, LockAcquireError
from grel_fastapi import (
    HealthCheck,
    coordination_router,
    coordination_routes,
    health_router,
    health_routes,
    leader_only,
)
from tests.fastapi.serving import broken, client_of, leading, passing, serving, started
from tests.harness import MemoryHarness, eventually

pytestmark = pytest.mark.anyio

PROBES = ("/livez", "/readyz", "/startupz", "/leaderz", "/healthz")


def worker(store: MemoryHarness, name: str, *elections: str) -> Grelmicro:
    """A worker of that name that takes part in those elections."""
    made = [LeaderElection(one, worker=name) for one in elections or ["default"]]
    return Grelmicro(uses=[store.provider(), *made])


def probed(micro: Grelmicro, **options: Any) -> FastAPI:
    """An app with every probe."""
    app = micro.install(FastAPI())
    app.include_router(health_router(**options))
    app.include_router(coordination_router())
    return app


async def statuses(client: Any, *paths: str) -> list[int]:
    """What these paths answer."""
    return [(await client.get(path)).status_code for path in paths or PROBES]


async def test_a_leader_and_a_follower_are_ready_and_only_one_leads(store: MemoryHarness) -> None:
    """84, 86."""
    ann, bob = worker(store, "ann"), worker(store, "bob")
    apps = [probed(ann), probed(bob)]
    async with serving(apps[0]) as led:
        await leading(ann)
        async with serving(apps[1]) as following:
            assert await statuses(led) == [200, 200, 200, 200, 200]
            assert await statuses(following) == [200, 200, 200, 503, 200]


async def test_probes_before_the_start_and_while_closing(store: MemoryHarness) -> None:
    """86."""
    ann = worker(store, "ann")
    app = probed(ann)
    async with client_of(app) as client:
        assert await statuses(client) == [200, 503, 503, 503, 503]
        async with started(app):
            await leading(ann)
            assert await statuses(client) == [200, 200, 200, 200, 200]
            ann.begin_shutdown()
            await eventually(lambda: not ann.election().is_leader())
            assert await statuses(client) == [200, 503, 200, 503, 503]


async def test_a_backend_that_is_down_degrades_and_takes_no_worker_away(store: MemoryHarness) -> None:
    """84, 85, 86."""
    ann = worker(store, "ann")
    apps = [probed(ann, show_details=True), FastAPI()]
    apps[1].include_router(health_router(ann, critical=["coordination"]))
    async with serving(apps[0]) as client, client_of(apps[1]) as strict:
        await leading(ann)
        with broken(store.provider()):
            await passing(11)
            assert (await client.get("/leaderz")).status_code == 503
            async with ann:
                with pytest.raises(LockAcquireError):
                    await ann.coordination.lock("any").acquire(timeout=0.5)
            assert await statuses(client) == [200, 200, 200, 503, 200]
            body = (await client.get("/healthz")).json()
            assert body["status"] == "degraded"
            assert [name for name, check in body["checks"].items() if check["status"] != "ok"] == [
                "coordination:_Memory"
            ]
            assert "password" not in str(body)
            assert (await strict.get("/readyz")).status_code == 503
        await leading(ann)
        assert (await client.get("/leaderz")).status_code == 200


async def test_readiness_comes_back_with_the_backend_and_without_traffic(store: MemoryHarness) -> None:
    """84."""
    micro = Grelmicro(uses=[store.provider()])
    async with serving(probed(micro, critical=["coordination"])) as client:
        with broken(store.provider()):
            with pytest.raises(LockAcquireError):
                await micro.coordination.lock("any").acquire(timeout=0.5)
            assert await statuses(client, "/readyz") == [503]
            await passing(5)
            assert await statuses(client, "/readyz") == [503]
        await passing(2)
        assert await statuses(client, "/readyz") == [200]


@pytest.mark.parametrize(
    ("error", "what", "make"),
    [
        (TypeError, "critical", lambda: health_router(critical="coordination")),
        (TypeError, "critical", lambda: health_router(critical=[5])),  # type: ignore[list-item]  # the mistake under test
        (ValueError, "timeout", lambda: HealthCheck("mail", nothing, timeout=0)),
    ],
)
def test_impossible_options_are_refused_where_they_stand(error: Any, what: str, make: Any) -> None:
    with pytest.raises(error, match=what):
        make()


async def nothing() -> bool:
    """A check that is content."""
    return True


async def test_a_renew_loop_that_is_stuck_fails_liveness(store: MemoryHarness) -> None:
    """85."""
    ann = worker(store, "ann")

    async def stuck(*_: object) -> Any:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if released.is_set():
                    raise

    released = asyncio.Event()
    async with serving(probed(ann)) as client:
        await leading(ann)
        with broken(store.provider(), stuck):
            await passing(30)
            assert (await client.get("/livez")).status_code == 200
            await passing(30)
            assert (await client.get("/livez")).status_code == 503
            released.set()
        for task in asyncio.all_tasks():
            if task.get_name().startswith("grel") and "default" in task.get_name():
                task.cancel()


async def test_checks_of_the_user_decide_readiness_only_when_they_are_critical(store: MemoryHarness) -> None:
    """86."""
    answers = {"cache": True, "database": True}

    async def cache() -> bool:
        return answers["cache"]

    async def database() -> bool:
        if not answers["database"]:
            raise ConnectionError("postgres://user:password@host")
        return True

    async def slow() -> bool:
        await asyncio.Event().wait()
        return True

    checks = [HealthCheck("cache", cache), HealthCheck("database", database, critical=True), HealthCheck("slow", slow)]
    async with serving(probed(worker(store, "ann"), checks=checks, show_details=True)) as client:
        assert await statuses(client, "/readyz", "/healthz") == [200, 200]
        answers["cache"] = False
        body = (await client.get("/healthz")).json()
        assert body["checks"]["cache"] == {"status": "error", "critical": False, "detail": None}
        assert body["checks"]["slow"] == {"status": "error", "critical": False, "detail": "timeout"}
        assert await statuses(client, "/readyz", "/healthz") == [200, 200]
        answers["database"] = False
        assert await statuses(client, "/readyz", "/healthz") == [503, 503]
        answer = await client.get("/healthz")
        assert answer.json()["status"] == "error"
        assert "password" not in answer.text


async def test_details_are_shown_to_those_who_may_see_them(store: MemoryHarness) -> None:
    async def is_admin(admin: bool = False) -> bool:
        return admin

    async with serving(probed(worker(store, "ann"), show_details=Depends(is_admin))) as client:
        assert "checks" not in (await client.get("/healthz")).json()
        assert "checks" in (await client.get("/healthz?admin=1")).json()
        assert (await client.head("/healthz")).status_code == 200


async def test_head_and_options_answer_like_get(store: MemoryHarness) -> None:
    """84."""
    ann, bob = worker(store, "ann"), worker(store, "bob")
    async with ann, serving(probed(bob)) as client:
        await leading(ann)
        for path in PROBES:
            get = await client.get(path)
            for method in ("HEAD", "OPTIONS"):
                answer = await client.request(method, path)
                assert (path, answer.status_code) == (path, get.status_code)
                assert answer.headers["Cache-Control"] == "no-store"


async def test_who_leads_is_told_by_identity(store: MemoryHarness) -> None:
    """83."""
    ann, bob = worker(store, "ann"), worker(store, "bob")
    async with serving(probed(ann)) as led:
        await leading(ann)
        async with serving(probed(bob)) as following:
            await eventually(lambda: bob.election().record is not None)
            ours, theirs = [(await client.get("/coordination/leader")).json() for client in (led, following)]
            for body, state, me in ((ours, "leading", "ann"), (theirs, "following", "bob")):
                assert (body["election"], body["state"], body["self"]) == ("default", state, {"identity": me})
                assert body["leader"]["identity"] == "ann"
                assert body["leader"]["term"] == 0
                assert body["stale"] is False
            assert (await led.get("/coordination/leader/default")).json()["state"] == "leading"
            assert (await led.get("/coordination/leader/other")).status_code == 404
            assert (await led.get("/leaderz/other")).status_code == 404
            overview = (await following.get("/coordination")).json()
            assert overview["elections"]["default"]["state"] == "following"
            assert (overview["started"], overview["draining"]) == (True, False)


async def test_a_lead_that_nobody_has_is_vacant_and_one_that_cannot_be_seen_is_unknown(store: MemoryHarness) -> None:
    """83."""
    ann = worker(store, "ann")
    async with serving(probed(ann)) as client:
        await leading(ann)
        await ann.election().step_down(stay_out=5)
        body = (await client.get("/coordination/leader")).json()
        assert (body["state"], body["leader"]) == ("vacant", None)
        with broken(store.provider()):
            await passing(20)
            body = (await client.get("/coordination/leader")).json()
            assert (body["state"], body["stale"]) == ("unknown", True)


async def test_no_probe_asks_the_backend(store: MemoryHarness) -> None:
    """83, 84."""
    ann = worker(store, "ann")
    async with serving(probed(ann)) as client:
        await leading(ann)
        asked: list[object] = []

        async def counting(*arguments: object) -> Any:
            asked.append(arguments)

        with broken(store.provider(), counting):
            await statuses(client, *PROBES, "/coordination", "/coordination/leader")
    assert asked == []


async def nobody() -> None:
    """Nobody may see it."""
    raise HTTPException(401)


async def test_dependencies_protect_every_method(store: MemoryHarness) -> None:
    """87."""
    app = worker(store, "ann").install(FastAPI())
    app.include_router(coordination_router([Depends(nobody)], "/inside"))
    app.include_router(health_router(dependencies=[Depends(nobody)]))
    async with serving(app) as client:
        for path in (*PROBES, "/inside", "/inside/leader", "/inside/leader/default"):
            for method in ("GET", "HEAD", "OPTIONS"):
                assert (await client.request(method, path)).status_code == 401, (method, path)


async def test_two_elections_are_two_things(store: MemoryHarness) -> None:
    """88."""
    ann, bob = worker(store, "ann", "jobs", "mail"), worker(store, "bob", "jobs", "mail")
    async with serving(probed(ann)) as led:
        await leading(ann, "jobs")
        await leading(ann, "mail")
        async with serving(probed(bob)) as following:
            await ann.election("mail").step_down(stay_out=60)
            await leading(bob, "mail")
            assert await statuses(led, "/leaderz/jobs", "/leaderz/mail") == [200, 503]
            assert await statuses(following, "/leaderz/jobs", "/leaderz/mail") == [503, 200]


async def test_the_schema_is_complete_and_says_nothing_twice(store: MemoryHarness) -> None:
    """70."""
    app = probed(worker(store, "ann"))

    @app.get("/guarded")
    @leader_only
    async def guarded() -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = app.openapi()["paths"]
    assert all(set(operations) == {"get"} for operations in paths.values())
    for path in ("/leaderz/{election}", "/coordination/leader/{election}"):
        assert [one["name"] for one in paths[path]["get"]["parameters"]] == ["election"]


async def test_starlette_has_the_same_routes(store: MemoryHarness) -> None:
    ann = worker(store, "ann")
    inside = coordination_routes(ann, prefix="/inside", dependencies=[Depends(nobody)])
    routes = [*health_routes(ann, show_details=True), *coordination_routes(ann), *inside]
    app = ann.install(Starlette(routes=routes))
    async with serving(app) as client:
        await leading(ann)
        assert await statuses(client) == [200] * 5
        for method in ("HEAD", "OPTIONS"):
            assert (await client.request(method, "/leaderz/default")).status_code == 200
        assert "checks" in (await client.get("/healthz")).json()
        assert (await client.get("/coordination/leader/default")).json()["state"] == "leading"
        assert (await client.get("/coordination")).json()["status"] == "ok"
        assert (await client.get("/inside/leader/default")).status_code == 401
