"""Who still holds something, and waiting until nobody does: a backend goes away after those who need it."""

import asyncio
from collections.abc import Iterable

from grel_core.coordination.handle import LockHandle, held_on
from grel_core.lease.backend import LeaseBackend


def holders(stores: Iterable[LeaseBackend]) -> list[tuple[object, LockHandle]]:
    """Who in this process holds something on `stores`, but for the task that asks."""
    mine = asyncio.current_task()
    return [pair for store in stores for pair in held_on(store) if pair[0] is not mine and pair[1].reason is None]


async def settled(stores: Iterable[LeaseBackend], deadline: float) -> None:
    """Wait until this process holds nothing on `stores`, or until `deadline` on the loop's clock."""
    loop = asyncio.get_running_loop()
    stores = list(stores)
    while (late := holders(stores)) and (left := deadline - loop.time()) > 0:
        waits = [loop.create_task(handle.settled.wait()) for _, handle in late]
        try:
            await asyncio.wait(waits, timeout=left)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
