"""A lock on a SQLite file: one caller at a time, in this process and in any other on this host.

Prints:

    20 customers, 20 numbers, none given out twice
    every fencing token is higher than the one before
    busy: lock 'counter' is held elsewhere; wait with a timeout, or try again later
"""

import asyncio
import tempfile
from pathlib import Path

from grel_core import Grelmicro
from grel_core.coordination import Lock, WouldBlockError
from grel_core.providers.sqlite import SQLiteProvider

lock = Lock("counter", lease_duration=10)  # finds its backend when it is used, not here
given_out: list[int] = []
tokens: list[int] = []


async def next_number() -> int:
    """Read, think, write: two of these at once would give out the same number."""
    async with lock.hold(timeout=5) as handle:  # renewed for as long as the body runs
        number = len(given_out) + 1
        await asyncio.sleep(0.001)
        handle.ensure()  # raises if the lease was lost meanwhile
        given_out.append(number)
        tokens.append(handle.fencing_token)
    return number


async def refused() -> str:
    """What a caller that does not wait is told while another task holds the lock."""
    try:
        await lock.acquire_nowait()
    except WouldBlockError as error:
        return f"busy: {error}"
    return "free"


async def main(path: Path) -> None:
    """Twenty customers at once."""
    async with Grelmicro(uses=[SQLiteProvider(path)]):
        numbers = await asyncio.gather(*(next_number() for _ in range(20)))
        print(f"20 customers, {len(set(numbers))} numbers, none given out twice")
        print("every fencing token is higher than the one before" if tokens == sorted(set(tokens)) else tokens)
        async with lock:
            print(await asyncio.create_task(refused()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "leases.db"))
