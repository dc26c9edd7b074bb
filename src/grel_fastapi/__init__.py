"""Coordination for FastAPI and Starlette: `micro.install(app)`, and what routes need."""

from grel_fastapi.decorators import leader_only
from grel_fastapi.dependencies import election, held_lock, leader, lock
from grel_fastapi.lifespan import lifespan
from grel_fastapi.routers import HealthCheck, coordination_router, coordination_routes, health_router, health_routes

__all__ = [
    "HealthCheck",
    "coordination_router",
    "coordination_routes",
    "election",
    "health_router",
    "health_routes",
    "held_lock",
    "leader",
    "leader_only",
    "lifespan",
    "lock",
]
