"""Waiting inside one process: tasks stand in line, and only the first of them talks to the store."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from typing import Self

from grel_core.lease.names import Key

READERS = 16
"""So many readers of one process wait at the store at once: it has to know of each, and must not drown in them."""


class Lines:
    """The lines of one store: for each key and side, the tasks of this process that wait, first come first served."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Key, bool], deque[asyncio.Event]] = {}

    def waiting(self, key: Key, *, shared: bool = False) -> int:
        """How many tasks of this process wait for `key`."""
        return len(self._lines.get((key, shared), ()))

    def total(self) -> int:
        """How many tasks of this process wait at all."""
        return sum(map(len, self._lines.values()))

    def wake_all(self) -> None:
        """Let everyone in line look whether it may still stand there."""
        for line in self._lines.values():
            for place in line:
                place.set()

    @asynccontextmanager
    async def turn(self, key: Key, check: Callable[[], None], *, shared: bool = False) -> AsyncIterator[None]:
        """Stand in line for as long as `check` does not raise; the body runs while its task is in front.

        Only one is in front, or so many readers. However it ends, the next one is called up.
        """
        line = self._lines.setdefault((key, shared), deque())
        width = READERS if shared else 1
        place = asyncio.Event()
        line.append(place)
        try:
            while place not in islice(line, width):
                await place.wait()
                place.clear()
                check()
            yield
        finally:
            line.remove(place)
            if not line:
                del self._lines[key, shared]
            elif len(line) >= width:
                line[width - 1].set()


class Watch:
    """A hint that a key may be free. A hint may come for nothing; the next try is the truth."""

    def __init__(self, watches: "Watches", key: Key, pace: float) -> None:
        self._watches = watches
        self._key = key
        self.pace = pace
        """Seconds between two looks, where a store has to look for itself."""
        self._hint = asyncio.Event()

    def __enter__(self) -> Self:
        self._watches.add(self._key, self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._watches.discard(self._key, self)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Hear nothing of the store while the body runs."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def hint(self) -> None:
        """Wake the one who waits here."""
        self._hint.set()

    async def wait(self, seconds: float) -> None:
        """Return at the next hint, at one that came since the last wait, or after `seconds`."""
        if not self._hint.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._hint.wait()
            except TimeoutError:
                return
        self._hint.clear()


class Watches:
    """Who in this process wants a hint about which key."""

    def __init__(self) -> None:
        self._watches: dict[Key, list[Watch]] = {}

    def __bool__(self) -> bool:
        return bool(self._watches)

    def keys(self) -> list[Key]:
        """What is watched right now; may be asked from any thread."""
        return list(self._watches)

    def pace(self) -> float | None:
        """Seconds between two looks for the most impatient; None when nobody watches. May be asked from any thread."""
        return min((watch.pace for watches in list(self._watches.values()) for watch in watches[:1]), default=None)

    def watch(self, key: Key, pace: float) -> Watch:
        """A watch on `key`; it listens while it is entered."""
        return Watch(self, key, pace)

    def add(self, key: Key, watch: Watch) -> None:
        """Let `watch` hear about `key`."""
        self._watches.setdefault(key, []).append(watch)

    def discard(self, key: Key, watch: Watch) -> None:
        """Let `watch` hear no more about `key`."""
        watches = self._watches[key]
        watches.remove(watch)
        if not watches:
            del self._watches[key]

    def wake(self, key: Key) -> None:
        """Hint to everyone who watches `key`."""
        for watch in self._watches.get(key, ()):
            watch.hint()

    def wake_all(self) -> None:
        """Hint to everyone: the channel was down, and anything may have been missed."""
        for key in list(self._watches):
            self.wake(key)
