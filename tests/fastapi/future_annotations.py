"""A user's module whose annotations are strings: `from __future__ import annotations`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from grel_core.coordination import LeaderElection, LockHandle
from grel_fastapi import held_lock, leader, leader_only

router = APIRouter()
Order = Annotated[LockHandle, Depends(held_lock("order:{order_id}"))]
Lead = Annotated[LeaderElection, Depends(leader())]


@router.get("/orders/{order_id}")
async def take(order_id: int, order: Order, lead: Lead) -> str:
    """Its path parameter is an int, as a string."""
    return f"{order.name} {lead.name}"


@router.get("/guarded/{order_id}")
@leader_only
async def guarded(order_id: int, order: Order, request: Request, response: Response) -> str:
    """Names that a guard might want to add itself are the user's."""
    response.headers["seen"] = request.url.path
    return order.name


@router.get("/sync/{order_id}")
@leader_only
def guarded_sync(order_id: int, order: Order) -> str:
    """The same in a thread."""
    return order.name
