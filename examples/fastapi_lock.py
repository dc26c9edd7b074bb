"""A lock around a request: twenty buyers, five pieces, and nobody gets one that is not there.

Serve it yourself with `uvicorn examples.fastapi_lock:app --workers 3`: all workers share the leases and the stock.

Prints:

    5 buyers got a piece, 15 were told that it is sold out
    a basket that is busy: 423 urn:grel:problem:lock-busy
    sku:7 and sku:007 are one lock
"""

import asyncio
import sqlite3
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, closing
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from fastapi.testclient import TestClient

from grel_core import Grelmicro
from grel_core.coordination import Lock, LockHandle
from grel_core.providers.sqlite import SQLiteProvider
from grel_fastapi import held_lock, lock

micro = Grelmicro(uses=[SQLiteProvider("leases.db")])  # one file for all workers of this host
app = micro.install(FastAPI())


def stock() -> "closing[sqlite3.Connection]":
    """The shop's own database: what a lock protects must be shared by all workers, too."""
    shop = sqlite3.connect("shop.db", isolation_level=None)
    shop.execute("CREATE TABLE IF NOT EXISTS stock (sku INTEGER PRIMARY KEY, pieces INTEGER NOT NULL)")
    shop.execute("INSERT OR IGNORE INTO stock VALUES (7, 5)")
    return closing(shop)


@app.post("/skus/{sku}/buy")
async def buy(sku: int, held: Annotated[LockHandle, Depends(held_lock("sku:{sku}"))]) -> str:
    """Read, think, write: protected from the first line to the last."""
    with stock() as shop:
        row = shop.execute("SELECT pieces FROM stock WHERE sku = ?", (sku,)).fetchone()
        if row is None or row[0] == 0:
            raise HTTPException(409, "sold out")
        await asyncio.sleep(0.001)
        shop.execute("UPDATE stock SET pieces = ? WHERE sku = ?", (row[0] - 1, sku))
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
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        main()
