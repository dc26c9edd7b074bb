"""Cancelled callers, by the thousand: nothing stays held, nobody is in twice, no task is left."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from grel_core.coordination import (
    Lock,
    LockAcquireError,
    LockBackendError,
    LockHandle,
    LockTimeoutError,
    ReadWriteLock,
    TaskLock,
    WouldBlockError,
)
from grel_core.lease.names import LOCK, READWRITELOCK, TASKLOCK, Key
from grel_core.providers.base import Provider
from tests.harness import Harness, eventually, work

pytestmark = pytest.mark.anyio

CANCELS = int(os.environ.get("GREL_CANCELS", "1000"))
NAMES = ("a", "b", "c")
DELAY = 0.004
"""Seconds, at most, that a request and an answer take."""


class Shop:
    """Counts who is inside, from outside of the locks."""

    def __init__(self, providers: list[Provider], chance: random.Random) -> None:
        self.providers = providers
        self.chance = chance
        self.inside: Counter[str] = Counter()
        self.overlaps = 0
        self.done: Counter[str] = Counter()

    async def visit(self, name: str) -> None:
        """Be inside for a moment."""
        self.inside[name] += 1
        self.overlaps += self.inside[name] > 1
        try:
            await work(self.chance.uniform(0, 0.003))
        finally:
            self.inside[name] -= 1

    def lock(self) -> Lock:
        """A random lock of a random process."""
        provider = self.chance.choice(self.providers)
        return Lock(self.chance.choice(NAMES), backend=provider.lock(), lease_duration=60)

    async def plain(self) -> None:
        async with (lock := self.lock()):
            await self.visit(lock.name)

    async def held(self) -> None:
        async with (lock := self.lock()).hold():
            await self.visit(lock.name)

    async def extended(self) -> None:
        lock = self.lock()
        handle = await lock.acquire()
        try:
            await lock.extend()
            await self.visit(lock.name)
            await handle.extend()
        finally:
            await handle.release()

    async def impatient(self) -> None:
        try:
            async with asyncio.timeout(self.chance.uniform(0, 0.03)):
                async with (lock := self.lock()):
                    await self.visit(lock.name)
        except TimeoutError:
            pass

    async def bounded(self) -> None:
        lock = self.lock()
        try:
            handle: LockHandle = await lock.acquire(timeout=self.chance.uniform(0.001, 0.03))
        except (LockTimeoutError, LockAcquireError):
            return  # held elsewhere, or not even an answer in so short a time
        try:
            await self.visit(lock.name)
        finally:
            await handle.release()

    def book(self) -> ReadWriteLock:
        """The one read-write lock, by way of a random process."""
        return ReadWriteLock("book", backend=self.chance.choice(self.providers).readwritelock())

    async def writing(self) -> None:
        async with self.book().write as writer:
            self.overlaps += self.inside["readers"] > 0
            await self.visit("writer")
            if self.chance.random() < 0.3:
                await writer.downgrade()

    async def reading(self) -> None:
        async with self.book().read:
            self.inside["readers"] += 1
            self.overlaps += self.inside["writer"] > 0
            try:
                await work(self.chance.uniform(0, 0.003))
            finally:
                self.inside["readers"] -= 1

    async def ticking(self) -> None:
        provider = self.chance.choice(self.providers)
        try:
            async with TaskLock("tick", backend=provider.lock(), min_hold_duration=0):
                await self.visit("tick")
        except WouldBlockError:
            pass

    async def cancelled(self) -> None:
        """Do one thing, and be cancelled somewhere in it, once or twice."""
        deeds: list[Callable[[], Awaitable[None]]] = [
            self.plain, self.held, self.extended, self.impatient, self.bounded,
            self.writing, self.reading, self.reading, self.ticking,
        ]  # fmt: skip
        deed = self.chance.choice(deeds)
        task = asyncio.ensure_future(deed())
        for _ in range(self.chance.choice([1, 1, 2])):
            await work(self.chance.uniform(0, 0.03))
            task.cancel()
        await asyncio.wait([task])
        self.done["cancelled" if task.cancelled() else "ended"] += 1
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, LockBackendError), error
            self.done[type(error).__name__] += 1


async def test_a_thousand_cancels_leave_nothing_behind(harness: Harness) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    async with harness.provider() as one, harness.provider() as two:
        shop = Shop([one, two], random.Random(seed))
        for name in NAMES:
            async with Lock(name, backend=one.lock()):
                pass
        harness.delay.longest = DELAY
        before = asyncio.all_tasks()

        async def visitor() -> None:
            while shop.done["cancelled"] < CANCELS:
                await shop.cancelled()

        await asyncio.gather(*(visitor() for _ in range(24)))

        async def free() -> bool:
            keys = [Key(READWRITELOCK, "book"), Key(TASKLOCK, "tick"), *(Key(LOCK, name) for name in NAMES)]
            records = [(await one.peek(key))[0] for key in keys]
            return not any(record.holder or record.readers or record.waiters for record in records)

        await eventually(free, within=2, what="every lock free of everyone")
        await eventually(lambda: asyncio.all_tasks() <= before, within=2, what="no task left")
        harness.delay.longest = 0
    print(dict(shop.done))
    assert shop.overlaps == 0
    assert shop.done.keys() <= {"cancelled", "ended"}
