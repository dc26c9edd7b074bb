"""Probes, and who leads, for Kubernetes, dashboards and people. Answered from memory: nothing waits for a backend."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, params
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grel_core.app import Grelmicro
from grel_core.coordination import LeaderElection
from grel_core.health import Check, Report, alive, report
from grel_core.lease.backend import positive
from grel_fastapi.binding import visit_of
from grel_fastapi.responses import NO_STORE


@dataclass(frozen=True)
class HealthCheck:
    """Something else that decides the health of the app: an async function that says whether all is well.

    One that raises, or takes longer than `timeout` seconds, says no. Only a `critical` one decides readiness.
    """

    name: str
    function: Callable[[], Awaitable[bool]]
    critical: bool = False
    timeout: float = 2.0

    def __post_init__(self) -> None:
        positive("timeout", self.timeout)

    async def run(self) -> Check:
        """Ask it."""
        try:
            async with asyncio.timeout(self.timeout):
                return Check("ok" if await self.function() else "error", self.critical)
        except Exception as error:  # noqa: BLE001 - whatever a stranger's check raises is its answer
            return Check("error", self.critical, "timeout" if isinstance(error, TimeoutError) else "failed")


def health_router(
    micro: Grelmicro | None = None,
    *,
    checks: Iterable[HealthCheck] = (),
    critical: Iterable[str] = (),
    show_details: bool | params.Depends = False,
    dependencies: Sequence[params.Depends] = (),
) -> APIRouter:
    """`/livez`, `/readyz`, `/startupz`, `/leaderz[/{election}]` and `/healthz`, for `app.include_router(...)`.

    Readiness is 503 before the start, while the app closes, and when a critical check fails; followers are ready, and
    a backend that is down is no reason unless `critical` names it (`"coordination"`, or a check by its full name).
    `show_details` lets `/healthz` list the checks: always, or when a dependency returns true, as in
    `Depends(is_admin)`. `micro` defaults to the one that is installed on the app.
    """
    asked, vital = list(checks), list(critical)
    if isinstance(critical, str) or not all(isinstance(name, str) for name in vital):
        raise TypeError("critical is a list of names, as in ['coordination']")
    allowed = show_details if isinstance(show_details, params.Depends) else Depends(lambda: show_details)

    async def livez(request: Request) -> Response:
        """Whether this process works; restart it if not."""
        return _status(alive(_app(request, micro)))

    async def startupz(request: Request) -> Response:
        """Whether the app has started."""
        return _status(_app(request, micro).started)

    async def readyz(request: Request) -> Response:
        """Whether requests may come."""
        return _status((await _report(_app(request, micro), [one for one in asked if one.critical], vital)).ready)

    async def leaderz(request: Request) -> Response:
        """Whether this worker leads, as the backend confirmed within the renew deadline."""
        one = _election(request, micro)
        return _status(None if one is None else one.is_leader_confirmed_within(one.config.renew_deadline))

    async def healthz(request: Request, details: Annotated[bool, allowed]) -> Response:
        """What is well and what is not."""
        found = await _report(_app(request, micro), asked, vital)
        body = {"status": found.status, **asdict(found)}
        if not details:
            del body["checks"]
        return JSONResponse(body, 200 if found.ready else 503, NO_STORE)

    probes = {f"/{probe.__name__}": probe for probe in (livez, startupz, readyz, leaderz, healthz)}
    return _router("health", {**probes, "/leaderz/{election}": leaderz}, dependencies)


def coordination_router(
    dependencies: Sequence[params.Depends] = (), prefix: str = "/coordination", *, micro: Grelmicro | None = None
) -> APIRouter:
    """An overview, `/leader` and `/leader/{election}` below `prefix`, for `app.include_router(...)`.

    They show who leads by public identity; give `dependencies` to decide who may see that. `micro` defaults to the one
    that is installed on the app.
    """

    async def overview(request: Request) -> Response:
        """What this worker takes part in, and how it is."""
        app = _app(request, micro)
        found = report(app)
        elections = {name: _describe(election) for name, election in app.elections.items()}
        return JSONResponse({"status": found.status, **asdict(found), "elections": elections}, headers=NO_STORE)

    async def leader(request: Request) -> Response:
        """Who leads."""
        if (election := _election(request, micro)) is None:
            return JSONResponse({"detail": "no such election runs here"}, 404, NO_STORE)
        return JSONResponse(_describe(election), headers=NO_STORE)

    paths = {"": overview, "/leader": leader, "/leader/{election}": leader}
    return _router("coordination", paths, dependencies, prefix)


def health_routes(micro: Grelmicro, **options: Any) -> list[Route]:
    """`health_router` for Starlette: `Starlette(routes=[*health_routes(micro), ...])`."""
    return _plain(health_router(micro, **options))


def coordination_routes(micro: Grelmicro, **options: Any) -> list[Route]:
    """`coordination_router` for Starlette: `Starlette(routes=[*coordination_routes(micro), ...])`."""
    return _plain(coordination_router(micro=micro, **options))


def _app(request: Request, micro: Grelmicro | None) -> Grelmicro:
    return micro or visit_of(request).micro


def _election(request: Request, micro: Grelmicro | None) -> LeaderElection | None:
    return _app(request, micro).elections.get(request.path_params.get("election", "default"))


def _status(good: bool | None) -> Response:
    return Response(status_code=404 if good is None else 200 if good else 503, headers=NO_STORE)


async def _report(app: Grelmicro, asked: Iterable[HealthCheck], critical: list[str]) -> Report:
    """What is known of `app`, and what the checks say."""
    known = report(app)
    answers = await asyncio.gather(*(check.run() for check in asked))
    checks = known.checks | {check.name: answer for check, answer in zip(asked, answers, strict=True)}
    for name, check in checks.items():
        if name in critical or name.partition(":")[0] in critical:
            checks[name] = replace(check, critical=True)
    return replace(known, checks=checks)


def _describe(election: LeaderElection) -> dict[str, Any]:
    """What this worker knows about `election`: public identities, and nothing that a backend would accept."""
    leading, record, age = election.is_leader(), election.record, election.record_age()
    stale = age is None or age > election.config.lease_duration
    known = "unknown" if stale else "following" if record else "vacant"
    leader = record and {
        "identity": record.holder,
        "since": record.acquired_at.isoformat(),
        "renewed_at": record.renewed_at.isoformat(),
        "term": record.transitions,
        "url": None,
    }
    return {
        "election": election.name,
        "state": "leading" if leading else known,
        "is_leader": leading,
        "self": {"identity": election.identity},
        "leader": leader,
        "confirmed_age": None if age is None else round(age, 3),
        "stale": stale,
    }


def _router(
    tag: str, endpoints: Mapping[str, Callable[..., Any]], dependencies: Sequence[params.Depends], prefix: str = ""
) -> APIRouter:
    """`endpoints` by path. HEAD and OPTIONS, which load balancers send, stay out of the schema."""
    router = APIRouter(prefix=prefix, dependencies=list(dependencies), tags=[tag])
    of_election = {"parameters": [{"name": "election", "in": "path", "required": True, "schema": {"type": "string"}}]}
    for path, endpoint in endpoints.items():
        extra = of_election if "{election}" in path else None
        router.add_api_route(path, endpoint, response_class=Response, openapi_extra=extra)
        router.add_api_route(path, endpoint, methods=["HEAD", "OPTIONS"], include_in_schema=False)
    return router


def _plain(router: APIRouter) -> list[Route]:
    """What `router` serves, as routes of Starlette."""
    app = FastAPI(openapi_url=None)
    app.include_router(router)
    return [Route(route.path, app, methods=route.methods) for route in router.routes if isinstance(route, Route)]
