"""A service in a cluster: one pod refreshes the prices, and orders are changed by one request at a time.

Build it into an image, run it with `uvicorn examples.kubernetes:app`, and let the pods use Leases:

    python -m grel_core schema kubernetes --namespace shop | kubectl apply -f -
    kubectl --namespace shop scale deployment shop --replicas 3
    kubectl --namespace shop get leases

On your own machine it takes the cluster of your kubeconfig.
"""

from typing import Annotated

from fastapi import Depends, FastAPI

from grel_core import Grelmicro
from grel_core.coordination import LockHandle
from grel_core.providers.kubernetes import KubernetesProvider
from grel_fastapi import health_router, held_lock

micro = Grelmicro(uses=[KubernetesProvider(prefix="shop")])
app = micro.install(FastAPI())
app.include_router(health_router())


@micro.leader_loop("prices", every=30)
async def refresh_prices() -> None:
    """Runs on one pod, every 30 seconds; when that one goes, another goes on."""


@app.post("/shops/{shop_id}/close")
async def close(shop_id: str, handle: Annotated[LockHandle, Depends(held_lock("shop:{shop_id}"))]) -> dict[str, int]:
    """A few names with little traffic, since each is an object in the cluster: for busy locks, take Redis."""
    return {shop_id: handle.fencing_token}
