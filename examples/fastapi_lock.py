"""A lock around a request: twenty buyers, five pieces, and nobody gets one that is not there.

Serve it yourself with `uvicorn examples.fastapi_lock:app --workers 3`.

Prints:

    5 buyers got a piece, 15 were told that it is sold out
    a basket that is busy: 423 urn:grel:problem:lock-busy
    sku:7 and sku:007 are one lock
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from fastapi.testclient import TestClient

from grel_core import Grelmicro
from grel_core.coordination import Lock, LockHandle
from grel_core.providers.memory import MemoryProvider
from grel_fastapi import held_lock, lock

micro = Grelmicro(uses=[MemoryProvider()])  # SQLiteProvider("leases.db") for several workers
app = micro.install(FastAPI())
stock = {7: 5}


@app.post("/skus/{sku}/buy")
async def buy(sku: int, held: Annotated[LockHandle, Depends(held_lock("sku:{sku}"))]) -> str:
    """Read, think, write: protected from the first line to the last."""
    if not (left := stock[sku]):
        raise HTTPException(409, "sold out")
    await asyncio.sleep(0.001)
    stock[sku] = left - 1
    return held.name


@app.post("/baskets/{basket_id}/pay")
async def pay(basket_id: str, basket: Annotated[Lock, Depends(lock("basket:{basket_id}"))]) -> str:
    """The endpoint takes the lock itself, for as short as it can; who comes second is told to come again."""
    async with basket.hold(timeout=0):
        await asyncio.sleep(0.2)
    return f"basket {basket_id} is paid"


def main() -> None:
    """Many clients at once."""
    with TestClient(app) as client, ThreadPoolExecutor(20) as clients:
        answers = list(clients.map(lambda number: client.post(f"/skus/{'7' if number % 2 else '007'}/buy"), range(20)))
        sold = [answer for answer in answers if answer.status_code == 200]
        print(f"{len(sold)} buyers got a piece, {20 - len(sold)} were told that it is sold out")

        payments = list(clients.map(lambda _: client.post("/baskets/ann/pay"), range(2)))
        busy = next(answer for answer in payments if answer.status_code == 423)
        print(f"a basket that is busy: {busy.status_code} {busy.json()['type']}")

        names = {answer.json() for answer in sold}
        print(f"sku:7 and sku:007 are {'one lock' if names == {'sku:7'} else names}")


if __name__ == "__main__":
    main()
