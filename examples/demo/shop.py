"""A shop with several workers: what a service looks like that holds a lock around a request and elects a leader.

It runs by itself, too: `uvicorn examples.demo.shop:app --workers 3`.
"""

import asyncio
import os
import sqlite3
import time
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException

from grel_core import Grelmicro
from grel_core.coordination import LockHandle
from grel_core.providers.redis import RedisProvider
from grel_core.providers.sqlite import SQLiteProvider
from grel_fastapi import coordination_router, health_router, held_lock, leader_only

# The one line that says where leases are kept: a server, if REDIS_URL names one, else the file SQLITE_PATH.
micro = Grelmicro(uses=[RedisProvider if "REDIS_URL" in os.environ else SQLiteProvider])

app = micro.install(FastAPI(title="Shop"))
app.include_router(coordination_router())
app.include_router(health_router(micro))

OneBuyerAtATime = Annotated[LockHandle, Depends(held_lock("sku:{sku}"))]

# The shop's own tables, in a file of their own: they have nothing to do with the leases.
shop = sqlite3.connect(os.environ.get("SHOP_PATH", "shop.db"))
shop.execute("CREATE TABLE IF NOT EXISTS stock (sku TEXT PRIMARY KEY, pieces INTEGER NOT NULL)")
shop.execute("CREATE TABLE IF NOT EXISTS sale (id INTEGER PRIMARY KEY, sku TEXT, worker INTEGER, token INTEGER)")
shop.execute("CREATE TABLE IF NOT EXISTS books (id INTEGER PRIMARY KEY, at REAL, worker INTEGER, token INTEGER)")


async def sell(sku: str, token: int | None = None) -> dict[str, int]:
    """Read, think, write: right only if nobody else does the same meanwhile."""
    row = shop.execute("SELECT pieces FROM stock WHERE sku = ?", (sku,)).fetchone()
    if row is None or row[0] == 0:
        raise HTTPException(409, "sold out")
    await asyncio.sleep(0.005)  # a price to look up, a card to charge
    with shop:
        shop.execute("UPDATE stock SET pieces = ? WHERE sku = ?", (row[0] - 1, sku))
        shop.execute("INSERT INTO sale (sku, worker, token) VALUES (?, ?, ?)", (sku, os.getpid(), token))
    return {"left": row[0] - 1}


@app.put("/skus/{sku}")
async def deliver(sku: str, pieces: int) -> None:
    """Put pieces of a new SKU on the shelf."""
    with shop:
        shop.execute("INSERT INTO stock VALUES (?, ?)", (sku, pieces))


@app.post("/skus/{sku}/buy-unlocked")
async def buy_unlocked(sku: str) -> dict[str, int]:
    """Sells more than there is: two buyers read the same number of pieces."""
    return await sell(sku)


@app.post("/skus/{sku}/buy")
async def buy(sku: str, lock: OneBuyerAtATime) -> dict[str, int]:
    """Sells what there is: one buyer of a SKU at a time, on whichever worker."""
    return await sell(sku, lock.fencing_token)


@micro.leader_loop(every=0.2)
async def keep_books() -> None:
    """Work that one worker does for all of them."""
    entry = (time.monotonic(), os.getpid(), micro.election().fencing_token)
    with shop:
        shop.execute("INSERT INTO books (at, worker, token) VALUES (?, ?, ?)", entry)


@app.get("/books")
@leader_only
async def books() -> dict[str, int | str]:
    """Who keeps the books, answered by the leader; every other worker says 503 `not-leader`."""
    (sold,) = shop.execute("SELECT count(*) FROM sale").fetchone()
    return {"worker": os.getpid(), "identity": micro.election().identity, "sold": sold}
