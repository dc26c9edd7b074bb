"""Who leads, for people and dashboards. Answered from what each worker knows; the backend is not asked."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, params
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grel_core.app import Grelmicro
from grel_core.coordination import LeaderElection
from grel_core.health import report
from grel_fastapi.health import Endpoint, app_of, filled, plain_routes
from grel_fastapi.responses import NO_STORE


def describe(election: LeaderElection) -> dict[str, Any]:
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


def _endpoints(micro: Grelmicro | None) -> dict[str, Endpoint]:
    async def overview(request: Request) -> Response:
        """What this worker takes part in, and how it is."""
        app = app_of(request, micro)
        found = report(app)
        body = {
            "status": found.status,
            "started": found.started,
            "draining": found.draining,
            "elections": {name: describe(election) for name, election in app.elections.items()},
            "checks": {name: asdict(check) for name, check in found.checks.items()},
        }
        return JSONResponse(body, headers=NO_STORE)

    async def leader(request: Request) -> Response:
        """Who leads."""
        election = app_of(request, micro).elections.get(request.path_params.get("election", "default"))
        if election is None:
            return JSONResponse({"detail": "no such election runs here"}, 404, NO_STORE)
        return JSONResponse(describe(election), headers=NO_STORE)

    return {"": overview, "/leader": leader, "/leader/{election}": leader}


def coordination_router(
    dependencies: Sequence[params.Depends] = (), prefix: str = "/coordination", *, micro: Grelmicro | None = None
) -> APIRouter:
    """An overview, `/leader` and `/leader/{election}` below `prefix`, for `app.include_router(...)`.

    They show who leads by public identity; give `dependencies` to decide who may see that. `micro` defaults to the one
    that is installed on the app.
    """
    router = APIRouter(prefix=prefix, dependencies=list(dependencies), tags=["coordination"])
    return filled(router, _endpoints(micro))


def coordination_routes(micro: Grelmicro, prefix: str = "/coordination") -> list[Route]:
    """`coordination_router` for Starlette: `Starlette(routes=[*coordination_routes(micro), ...])`."""
    return plain_routes({prefix + path: endpoint for path, endpoint in _endpoints(micro).items()})
