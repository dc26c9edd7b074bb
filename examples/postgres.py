"""Two processes on one PostgreSQL: while one changes the prices, the other waits, and is told when its turn has come.

Needs a server: `POSTGRES_URL=postgresql://user:password@host/database python examples/postgres.py`. It says:

    north changes the prices
    south is told within a second
    south changes the prices, with a higher fencing token
    south read the prices together with north
"""

import asyncio

from grel_core import Grelmicro
from grel_core.coordination import Lock, ReadWriteLock
from grel_core.providers.postgres import PostgresProvider


class Shop:
    """Stands for one process of your service: each opens the same database."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.postgres = PostgresProvider()  # where POSTGRES_URL says; the schema "grel" is made at the first start
        self.micro = Grelmicro(uses=[self.postgres])
        self.lock = Lock("prices", backend=self.postgres.lock())
        self.prices = ReadWriteLock("prices", backend=self.postgres.readwritelock())


async def main() -> None:
    """Change in turns, then read together."""
    north, south = Shop("north"), Shop("south")
    async with north.micro, south.micro:
        async with north.lock.hold(timeout=5) as first:
            print("north changes the prices")
            waiting = asyncio.create_task(south.lock.acquire(timeout=5))
            while not south.postgres.lines.total():
                await asyncio.sleep(0.01)
        async with asyncio.timeout(1):
            second = await waiting
        print("south is told within a second")
        higher = "higher" if second.fencing_token > first.fencing_token else "LOWER"
        print(f"south changes the prices, with a {higher} fencing token")
        await second.release()
        async with north.prices.read, south.prices.read:
            print("south read the prices together with north")


if __name__ == "__main__":
    asyncio.run(main())
