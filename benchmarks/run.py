"""How much a lock costs beside the floor below which nothing can get: `make bench`.

A case and its floor run in turns, block by block, in one process: what disturbs the machine disturbs both. Judge the
ratio, not the microseconds. The floor is the same number of round trips with nothing around them: two bare PINGs for
Redis, two hops to a bare thread for SQLite, an `asyncio.Lock` for memory.
"""

import argparse
import asyncio
import json
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grel_core.coordination import Lock
from grel_core.providers.base import Provider
from grel_core.providers.memory import MemoryProvider
from grel_core.providers.sqlite import SQLiteProvider
from tests.servers import valkey

Body = Callable[[], Awaitable[object]]


@dataclass
class Result:
    """One case: microseconds a call, and how often its floor fits into it."""

    case: str
    tasks: int
    microseconds: float
    floor: float
    ratio: float
    low: float
    high: float


async def timed(body: Body, calls: int, tasks: int) -> float:
    """Seconds that `calls` calls take, spread over so many tasks."""

    async def work() -> None:
        for _ in range(calls // tasks):
            await body()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(tasks)))
    return time.perf_counter() - began


async def compare(case: str, floor: Body, body: Callable[[], Body], *, tasks: int, seconds: float) -> Result:
    """Run blocks of the floor and of the case in turns for about so many seconds."""
    bodies = [body() for _ in range(tasks)]
    turn = iter(range(10**12))

    async def one() -> None:
        await bodies[next(turn) % tasks]()

    calls = max(tasks, 200 // tasks * tasks)
    await timed(one, calls, tasks)
    pairs: list[tuple[float, float]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(pairs) < 5:
        pairs.append((await timed(floor, calls, tasks), await timed(one, calls, tasks)))
    ratios = sorted(mine / base for base, mine in pairs)
    return Result(
        case=case,
        tasks=tasks,
        microseconds=statistics.median(mine for _, mine in pairs) / calls * 1e6,
        floor=statistics.median(base for base, _ in pairs) / calls * 1e6,
        ratio=statistics.median(ratios),
        low=ratios[len(ratios) // 4],
        high=ratios[-1 - len(ratios) // 4],
    )


class Ping(asyncio.Protocol):
    """A connection that does nothing but PING."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    def data_received(self, data: bytes) -> None:
        for _ in range(data.count(b"+PONG")):
            self.waiting.pop(0).set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def twice(self) -> None:
        """Two round trips."""
        for _ in range(2):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(future)
            self.transport.write(b"*1\r\n$4\r\nPING\r\n")
            await future


class Hop:
    """A thread that does nothing but answer."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[asyncio.Future[None] | None] = queue.SimpleQueue()
        self.loop = asyncio.get_running_loop()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while (future := self.jobs.get()) is not None:
            self.loop.call_soon_threadsafe(future.set_result, None)

    async def twice(self) -> None:
        """Two hops there and back."""
        for _ in range(2):
            future: asyncio.Future[None] = self.loop.create_future()
            self.jobs.put(future)
            await future


def cycles(provider: Provider) -> Callable[[], Body]:
    """Makes bodies that take and give back a lock, each one a lock of its own."""
    numbers = iter(range(10**12))

    def made() -> Body:
        lock = Lock(f"bench-{next(numbers)}", backend=provider.lock())

        async def cycle() -> None:
            async with lock:
                pass

        return cycle

    return made


@asynccontextmanager
async def backends(directory: Path) -> AsyncIterator[list[tuple[str, Body, Provider]]]:
    """Name, floor and provider of everything that is measured."""
    from grel_core.providers.redis import RedisProvider

    loop = asyncio.get_running_loop()
    plain = asyncio.Lock()

    async def locked() -> None:
        async with plain:
            pass

    async with AsyncExitStack() as stack:
        server = stack.enter_context(valkey(directory))
        transport, ping = await loop.create_connection(Ping, "127.0.0.1", server.port)
        stack.callback(transport.close)
        hop = Hop()
        stack.callback(hop.jobs.put, None)
        yield [
            ("memory", locked, await stack.enter_async_context(MemoryProvider())),
            ("sqlite", hop.twice, await stack.enter_async_context(SQLiteProvider(directory / "bench.db"))),
            ("redis", ping.twice, await stack.enter_async_context(RedisProvider(server.url))),
        ]


async def main(seconds: float, out: Path | None) -> None:
    """Measure everything, print a table, and write the figures to `out`."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as directory:
        async with backends(Path(directory)) as measured:
            for name, floor, provider in measured:
                for tasks in (1, 16, 128) if name != "memory" else (1,):
                    case = f"{name}: acquire and release"
                    results.append(await compare(case, floor, cycles(provider), tasks=tasks, seconds=seconds))
    table = Table("case", "tasks", "µs a cycle", "floor µs", "ratio", "middle half of the ratios")
    for r in results:
        middle = f"{r.low:.2f} to {r.high:.2f}"
        table.add_row(r.case, str(r.tasks), f"{r.microseconds:.0f}", f"{r.floor:.1f}", f"{r.ratio:.2f}", middle)
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--seconds", type=float, default=4, help="for each case")
    arguments.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    asyncio.run(main(**vars(arguments.parse_args())))
