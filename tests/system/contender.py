"""One process of several that want the same lock: `python -m tests.system.contender WHERE TASKS SECONDS LOG`.

It says "ready", waits for a line on its standard input, and appends `token start end process task` to the log for each
time it was inside. `WHERE` is a URL of Redis or PostgreSQL, or the path of a SQLite file.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from grel_core.coordination import Lock
from grel_core.providers.base import Provider
from tests.harness import work

HOLD = 0.01


def provider_for(where: str) -> Provider:
    """The provider that `where` stands for."""
    if where.startswith("postgresql://"):
        from grel_core.providers.postgres import PostgresProvider

        return PostgresProvider(where)
    if "://" in where:
        from grel_core.providers.redis import RedisProvider

        return RedisProvider(where)
    from grel_core.providers.sqlite import SQLiteProvider

    return SQLiteProvider(where)


async def contend(provider: Provider, task: int, until: float, log: int) -> None:
    """Come in as often as possible."""
    lock = Lock("one", backend=provider.lock())
    while (left := until - time.monotonic()) > 0:
        try:
            handle = await lock.acquire(timeout=left)
        except TimeoutError:
            return
        start = time.monotonic_ns()
        await work(HOLD)
        line = f"{handle.fencing_token} {start} {time.monotonic_ns()} {os.getpid()} {task}\n"
        os.write(log, line.encode())
        await handle.release()


async def main(where: str, tasks: int, seconds: float, log: Path) -> None:
    """Contend with so many tasks for so many seconds."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with provider_for(where) as provider:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        until = time.monotonic() + seconds
        await asyncio.gather(*(contend(provider, task, until, out) for task in range(tasks)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])))
