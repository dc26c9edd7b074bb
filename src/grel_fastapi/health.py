"""Probes for Kubernetes, load balancers and people. They answer from memory: no request here waits for a backend."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, params
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grel_core.app import Grelmicro
from grel_core.health import Check, Report, alive, report
from grel_fastapi.binding import visit_of
from grel_fastapi.responses import NO_STORE

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class HealthCheck:
    """Something else that decides the health of the app: an async function that says whether all is well.

    One that raises, or takes longer than `timeout` seconds, says no. Only a `critical` one decides readiness.
    """

    name: str
    function: Callable[[], Awaitable[bool]]
    critical: bool = False
    timeout: float = 2.0

    async def run(self) -> Check:
        """Ask it."""
        try:
            async with asyncio.timeout(self.timeout):
                well = await self.function()
        except TimeoutError:
            return Check("error", self.critical, "timeout")
        except Exception:  # noqa: BLE001 - whatever a stranger's check raises is its answer
            return Check("error", self.critical, "failed")
        return Check("ok" if well else "error", self.critical)


class Probes:
    """The answers to all the probes of one app."""

    def __init__(self, micro: Grelmicro | None, checks: Iterable[HealthCheck], critical: Iterable[str]) -> None:
        self._micro = micro
        self._checks = list(checks)
        self._critical = frozenset(critical)
        self.endpoints: dict[str, Endpoint] = {
            "/livez": self.livez,
            "/startupz": self.startupz,
            "/readyz": self.readyz,
            "/leaderz": self.leaderz,
            "/leaderz/{election}": self.leaderz,
        }

    async def livez(self, request: Request) -> Response:
        """Whether this process works; restart it if not."""
        return _status(alive(app_of(request, self._micro)))

    async def startupz(self, request: Request) -> Response:
        """Whether the app has started."""
        return _status(app_of(request, self._micro).started)

    async def readyz(self, request: Request) -> Response:
        """Whether requests may come."""
        return _status((await self._report(request, critical_only=True)).ready)

    async def leaderz(self, request: Request) -> Response:
        """Whether this worker leads, as the backend confirmed within the renew deadline."""
        election = app_of(request, self._micro).elections.get(request.path_params.get("election", "default"))
        if election is None:
            return Response(status_code=404, headers=NO_STORE)
        return _status(election.is_leader_confirmed_within(election.config.renew_deadline))

    async def healthz(self, request: Request, *, details: bool) -> Response:
        """What is well and what is not."""
        found = await self._report(request)
        body: dict[str, Any] = {"status": found.status, "started": found.started, "draining": found.draining}
        if details:
            body["checks"] = {name: asdict(check) for name, check in found.checks.items()}
        return JSONResponse(body, 200 if found.ready else 503, NO_STORE)

    async def _report(self, request: Request, *, critical_only: bool = False) -> Report:
        known = report(app_of(request, self._micro))
        asked = [check for check in self._checks if check.critical or not critical_only]
        answers = await asyncio.gather(*(check.run() for check in asked))
        checks = known.checks | {check.name: answer for check, answer in zip(asked, answers, strict=True)}
        for name, check in checks.items():
            if self._critical & {name, name.partition(":")[0]}:
                checks[name] = replace(check, critical=True)
        return replace(known, checks=checks)


def _status(good: bool) -> Response:
    return Response(status_code=200 if good else 503, headers=NO_STORE)


def app_of(request: Request, micro: Grelmicro | None) -> Grelmicro:
    """`micro`, else the one that is installed on the app that `request` came to."""
    return micro or visit_of(request).micro


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
    probes = Probes(micro, checks, critical)
    allowed = show_details if isinstance(show_details, params.Depends) else Depends(lambda: show_details)

    async def healthz(request: Request, details: Annotated[bool, allowed]) -> Response:
        return await probes.healthz(request, details=details)

    router = APIRouter(dependencies=list(dependencies), tags=["health"])
    return filled(router, {**probes.endpoints, "/healthz": healthz})


def health_routes(
    micro: Grelmicro, *, checks: Iterable[HealthCheck] = (), critical: Iterable[str] = (), show_details: bool = False
) -> list[Route]:
    """`health_router` for Starlette: `Starlette(routes=[*health_routes(micro), ...])`."""
    probes = Probes(micro, checks, critical)

    async def healthz(request: Request) -> Response:
        return await probes.healthz(request, details=show_details)

    return plain_routes({**probes.endpoints, "/healthz": healthz})


def filled(router: APIRouter, endpoints: Mapping[str, Callable[..., Any]]) -> APIRouter:
    """`router` with `endpoints` by path. HEAD and OPTIONS, which load balancers send, stay out of the schema."""
    of_election = {"parameters": [{"name": "election", "in": "path", "required": True, "schema": {"type": "string"}}]}
    for path, endpoint in endpoints.items():
        extra = of_election if "{election}" in path else None
        router.add_api_route(path, endpoint, response_class=Response, openapi_extra=extra)
        router.add_api_route(path, endpoint, methods=["HEAD", "OPTIONS"], include_in_schema=False)
    return router


def plain_routes(endpoints: Mapping[str, Endpoint]) -> list[Route]:
    """`endpoints` by path, as routes of Starlette."""
    return [Route(path, endpoint, methods=["GET", "OPTIONS"]) for path, endpoint in endpoints.items()]
