"""Let the work that holds something end before its backend goes away."""

import asyncio
import logging
from collections.abc import Iterable

from grel_core.coordination.handle import LockHandle, held_on
from grel_core.lease.backend import LeaseBackend

logger = logging.getLogger("grel")

_LAST_SHARE = 0.2
"""Share of the time that is kept for cancelled work to end in."""


async def drain(stores: Iterable[LeaseBackend], timeout: float) -> None:
    """Wait until this process holds nothing on `stores`, at most `timeout` seconds; then cancel who still does.

    What a thread holds, or work that does not end, keeps its lease until it runs out: it may still be at work.
    """
    stores = list(stores)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    for store in stores:
        store.watches.wake_all()
    await _empty(stores, deadline - timeout * _LAST_SHARE)
    late = [owner for owner, _ in _holders(stores) if isinstance(owner, asyncio.Task)]
    for task in late:
        task.cancel()
    if late:
        logger.warning("shutting down: %d tasks still held a lock and were cancelled", len(late))
        await asyncio.wait(late, timeout=max(deadline - loop.time(), 0))
    for _, handle in _holders(stores):
        logger.warning(
            "shutting down: %s %r is still at work; its lease is left to run out", handle.key.kind, handle.name
        )


def _holders(stores: Iterable[LeaseBackend]) -> list[tuple[object, LockHandle]]:
    """Who holds something, but for the task that asks."""
    mine = asyncio.current_task()
    return [pair for store in stores for pair in held_on(store) if pair[0] is not mine and pair[1].reason is None]


async def _empty(stores: Iterable[LeaseBackend], deadline: float) -> None:
    loop = asyncio.get_running_loop()
    while (holders := _holders(stores)) and (left := deadline - loop.time()) > 0:
        waits = [loop.create_task(handle.settled.wait()) for _, handle in holders]
        try:
            await asyncio.wait(waits, timeout=left)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
