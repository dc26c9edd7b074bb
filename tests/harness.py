"""What the suites know of a backend: how to reach it, and how to let time pass in it."""

import asyncio
import random
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from grel_core.lease.backend import T
from grel_core.lease.names import Key
from grel_core.lease.rules import Instant, Rule
from grel_core.providers.base import Provider
from grel_core.providers.memory import MemoryProvider
from grel_core.providers.sqlite import SQLiteProvider
from grel_core.providers.sqlite_file import File


class Delay:
    """How long a store takes to take a request, and to answer it: a random time up to `longest` seconds."""

    longest = 0.0

    def draw(self) -> float:
        """Seconds for the next one."""
        return random.uniform(0, self.longest)


class Clock:
    """A store's clock: the real one plus what a test skipped, or one that stands still."""

    def __init__(self) -> None:
        self.skipped = 0
        self.fixed: Instant | None = None

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass in the store."""
        step = round(seconds * 1_000_000)
        self.skipped += step
        if self.fixed is not None:
            self.fixed = Instant(self.fixed.now + step, self.fixed.wall + step)

    def read(self, real: Instant) -> Instant:
        """What the store sees in the place of `real`."""
        return self.fixed or Instant(real.now + self.skipped, real.wall + self.skipped)


class Harness(ABC):
    """One backend under test. `provider()` gives a client; each stands for a process of its own."""

    name: str
    shared = True
    """Whether several clients see one store."""
    reaps = True
    """Whether idle records are forgotten."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.delay = Delay()

    async def start(self) -> None:  # noqa: B027 - most have nothing to start
        """Make the store."""

    async def stop(self) -> None:  # noqa: B027 - most have nothing to stop
        """Take the store down."""

    @abstractmethod
    def provider(self, **options: Any) -> Provider:
        """A new client of the store, not open yet."""

    async def advance(self, seconds: float) -> None:
        """Let time pass in the store, and only there: whoever holds something does not notice."""
        self.clock.advance(seconds)

    async def freeze(self, now: int = 1_000_000_000_000_000, wall: int = 1_800_000_000_000_000) -> None:
        """Stop the store's clocks, so that only `advance` moves them."""
        self.clock.fixed = Instant(now, wall)

    @abstractmethod
    async def keys(self) -> int:
        """How many records the store keeps."""


class _Memory(MemoryProvider):
    def __init__(self, clock: Clock, delay: Delay, **options: Any) -> None:
        super().__init__(**options)
        self._clock, self._delay = clock, delay
        self._last: asyncio.Task[Any] | None = None

    def _instant(self) -> Instant:
        return self._clock.read(super()._instant())

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        if not self._delay.longest:
            return await super().apply(key, rule)
        self._last = asyncio.create_task(self._slowly(self._last, key, rule))
        return await asyncio.shield(self._last)

    async def _slowly(self, before: asyncio.Task[Any] | None, key: Key, rule: Rule[T]) -> T:
        """As over a wire: first come first served, and nothing that was sent can be taken back."""
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(self._delay.draw())
        answer = await super().apply(key, rule)
        await asyncio.sleep(self._delay.draw())
        return answer


class MemoryHarness(Harness):
    name = "memory"
    shared = False

    def __init__(self) -> None:
        super().__init__()
        self._provider: _Memory | None = None

    def provider(self, **options: Any) -> Provider:
        options.pop("prefix", None)
        options.pop("backend_timeout", None)
        if self._provider is None or options:
            self._provider = _Memory(self.clock, self.delay, **options)
        return self._provider

    async def keys(self) -> int:
        return len(self._provider._records) if self._provider else 0


class _TickingFile(File):
    def __init__(self, clock: Clock, delay: Delay, *arguments: Any, **options: Any) -> None:
        self._clock, self._delay = clock, delay
        super().__init__(*arguments, **options)

    def run(self, work: Any, *, durable: bool) -> Any:
        time.sleep(self._delay.draw())
        answer = super().run(work, durable=durable)
        time.sleep(self._delay.draw())
        return answer

    def instant(self) -> Instant:
        return self._clock.read(super().instant())


class _SQLite(SQLiteProvider):
    def __init__(self, clock: Clock, delay: Delay, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._clock, self._delay = clock, delay

    def _file(self) -> File:
        return _TickingFile(
            self._clock, self._delay, self.path, prefix=self.prefix, keep=self.keep, timeout=self.backend_timeout * 0.8
        )

    def identity(self) -> Any:
        return id(self)


class SQLiteHarness(Harness):
    name = "sqlite"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.path = directory / "leases.db"

    def provider(self, **options: Any) -> Provider:
        return _SQLite(self.clock, self.delay, self.path, **options)

    async def keys(self) -> int:
        with sqlite3.connect(self.path) as database:
            (count,) = database.execute("SELECT count(*) FROM grel_lease").fetchone()
        database.close()
        return int(count)


async def work(seconds: float) -> None:
    """Be at work for a moment. What a test does inside a lock takes time; what it waits for is `eventually` there."""
    await asyncio.sleep(seconds)


async def eventually(
    condition: Callable[[], Awaitable[bool] | bool], within: float = 5.0, what: str = "the condition"
) -> float:
    """Wait until `condition` holds, asking often; the seconds that it took. Fails after `within` seconds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        answer = condition()
        if await answer if isinstance(answer, Awaitable) else answer:
            return loop.time() - began
        assert loop.time() - began < within, f"{what} did not hold within {within} s"
        await asyncio.sleep(0.005)
