"""A service for real servers: `uvicorn tests.system.service:app`.

`GREL_WHERE` is a Redis URL or the path of a SQLite file, `GREL_LOG` a file to which each process appends a line of JSON
for whatever it did, with the time of the host's monotonic clock.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.responses import StreamingResponse

from grel_core import Grelmicro
from grel_core.coordination import LockHandle
from grel_fastapi import coordination_router, health_router, held_lock, leader_only
from tests.system.contender import provider_for

micro = Grelmicro(uses=[provider_for(os.environ["GREL_WHERE"])])
app = micro.install(FastAPI())
app.include_router(coordination_router())
app.include_router(health_router())


def log(what: str, **more: Any) -> None:
    """Write down what happened, whole lines only."""
    line = json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **more})
    with open(os.environ["GREL_LOG"], "a", encoding="utf-8") as file:  # noqa: PTH123 - one write, at the end of the file
        file.write(line + "\n")


@micro.leader_loop("default", every=0.02)
async def reign() -> None:
    """Say who leads, often."""
    log("reign")


@app.post("/work")
async def work(handle: Annotated[LockHandle, Depends(held_lock("work", timeout=30))], seconds: float = 0.005) -> int:
    """Something that must not happen twice at once."""
    began = time.monotonic()
    log("begin", token=handle.fencing_token)
    await asyncio.sleep(seconds)
    log("work", token=handle.fencing_token, began=began)
    return handle.fencing_token


@app.get("/lead")
@leader_only
async def lead() -> int:
    """Who leads."""
    return os.getpid()


@app.get("/events")
async def events() -> StreamingResponse:
    """A stream that nobody ends."""

    async def forever() -> AsyncIterator[str]:
        yield f"data: {os.getpid()}\n\n"
        while True:
            await asyncio.sleep(0.2)
            yield ": still here\n\n"

    return StreamingResponse(forever(), media_type="text/event-stream")
