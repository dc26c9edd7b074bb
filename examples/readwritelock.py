"""Many readers at once, or one writer alone: a price list that is read in parallel and rewritten without a gap.

Prints:

    five readers were inside at once
    same generation: what was read before is still right
    a new generation: read it again
    rewritten and checked, with no other writer in between
    a reader cannot become the writer: LockUpgradeError
    the writer died half-way: the next one is told, and starts over
"""

import asyncio
import tempfile
from pathlib import Path

from grel_core import Grelmicro
from grel_core.coordination import LockLostError, LockUpgradeError, ReadWriteLock
from grel_core.providers.sqlite import SQLiteProvider

lock = ReadWriteLock("prices", lease_duration=10)  # finds its backend when it is used, not here
prices = {"tea": 3}
inside = 0


async def read(everybody: asyncio.Barrier) -> dict[str, int]:
    """Holds nobody up but a writer."""
    global inside  # noqa: PLW0603 - what the example counts
    async with lock.read:
        inside += 1
        await everybody.wait()
        return dict(prices)


async def generation() -> int:
    """The number of what is there: the fencing token of the writer that wrote it."""
    async with lock.read as guard:
        return guard.generation


async def rewrite() -> None:
    """Alone while it writes; then one reader among others, before another writer can come in."""
    async with lock.write as guard:
        prices["tea"] += 1
        await guard.downgrade()
        assert prices["tea"] == 4
    print("rewritten and checked, with no other writer in between")


async def die_half_way() -> None:
    """Stands for a writer whose process is killed: its lease runs out, and nobody gave it back."""
    dead = ReadWriteLock("prices", lease_duration=0.1)
    guard = await dead.write.acquire()
    prices.clear()
    await guard.lost.wait()
    try:
        print(f"never shown: {guard.fencing_token}")
    except LockLostError:
        return  # a guard that proves nothing any more gives out no token


async def main(path: Path) -> None:
    """Read, write, and clean up after a writer that died."""
    async with Grelmicro(uses=[SQLiteProvider(path)]):
        everybody = asyncio.Barrier(5)  # passed by five at once, or by none
        await asyncio.gather(*(read(everybody) for _ in range(5)))
        print(f"{'five' if inside == 5 else inside} readers were inside at once")

        first = await generation()
        print("same generation: what was read before is still right" if await generation() == first else "changed")
        async with lock.write:
            ...
        print("a new generation: read it again" if await generation() > first else "the same generation")
        await rewrite()

        async with lock.read:
            try:
                await lock.write.acquire()
            except LockUpgradeError as error:
                print(f"a reader cannot become the writer: {type(error).__name__}")

        await asyncio.create_task(die_half_way())
        async with lock.write as guard:
            if guard.poisoned:
                prices.update(tea=3)
                print("the writer died half-way: the next one is told, and starts over")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "leases.db"))
