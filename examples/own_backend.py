"""A store of your own: four methods, and every `Lock` works on it.

Prints:

    renewed, the token stays the same
    ran out: lock 'cart': its lease ran out; the protected work may have overlapped
    a token of another holder gives nothing back
"""

import asyncio
import time
from dataclasses import dataclass

from grel_core import Grelmicro
from grel_core.coordination import Coordination, Lock, LockBackend, LockNotOwnedError


@dataclass
class Row:
    """What the store keeps for one name. It outlives the lease, so that the fencing tokens go on rising."""

    fence: int = 0
    token: str | None = None
    until: float = 0.0


class TableBackend:
    """A `LockBackend` on a dict, which stands for your table or service.

    Each method must be atomic in the store, and must go by the store's clock. Such a backend is polled: a waiter asks
    again every `retry_interval`.
    """

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def live(self, name: str) -> Row:
        """The row of `name`, without a claim that ran out."""
        row = self.rows.setdefault(name, Row())
        if row.until <= time.monotonic():
            row.token = None
        return row

    async def acquire(self, *, name: str, token: str, duration: float) -> int | None:
        """Take or renew. Only a new holder gets a new fencing token."""
        row = self.live(name)
        if row.token not in {None, token}:
            return None
        if row.token is None:
            row.fence += 1
        row.token, row.until = token, time.monotonic() + duration
        return row.fence

    async def release(self, *, name: str, token: str) -> bool:
        """Only the holder gives anything back."""
        row = self.live(name)
        if row.token != token:
            return False
        row.token = None
        return True

    async def locked(self, *, name: str) -> bool:
        return self.live(name).token is not None

    async def owned(self, *, name: str, token: str) -> bool:
        return self.live(name).token == token


async def main() -> None:
    """The usual lock, on the unusual backend."""
    backend: LockBackend = TableBackend()
    async with Grelmicro(uses=[Coordination(lock=backend)]):
        lock = Lock("cart", lease_duration=0.1)
        handle = await lock.acquire()
        before = handle.fencing_token
        await handle.extend()
        print(f"renewed, the token {'stays the same' if handle.fencing_token == before else 'changed'}")

        await asyncio.sleep(0.15)
        try:
            await handle.extend()
        except LockNotOwnedError as error:
            print(f"ran out: {error}")

        async with lock:
            given_back = await backend.release(name="cart", token="somebody else")
            print(f"a token of another holder gives {'something' if given_back else 'nothing'} back")


if __name__ == "__main__":
    asyncio.run(main())
