"""Keep a lease alive in the background for as long as its owner lives, and say at once when it is lost."""

import asyncio
import logging
import random
from collections.abc import Callable

from grel_core.coordination.handle import LockHandle
from grel_core.errors import LockAcquireError, LockNotOwnedError, OutOfContextError

logger = logging.getLogger("grel")


class Keeper:
    """Renews a handle at a third of its lease.

    A renewal that fails leaves the lease *unknown*: it is tried again until the deadline. Only the deadline, or an
    answer that says so, makes it *lost*, and the deadline does not wait for a backend call that hangs.
    """

    def __init__(
        self, handle: LockHandle, lost: Callable[[str], None] | None = None, *, max_hold: float | None = None
    ) -> None:
        self.handle = handle
        """What is kept alive: the first one, or what it was downgraded to."""
        self._lost = lost
        self._loop = handle.store.loop
        self._task: asyncio.Task[None] | None = None
        self._renewal = self._loop.call_later(self._interval(), self._begin)
        self._end = self._loop.call_at(handle.deadline, self._check)
        limit = f"max_hold of {max_hold} s is over"
        self._limit = self._loop.call_later(max_hold, lambda: self.handle.lose(limit)) if max_hold else None
        handle.keeper = self

    def _interval(self) -> float:
        return self.handle.duration / 3 * random.uniform(0.8, 1.0)

    def _begin(self) -> None:
        owner = self.handle.owner
        if owner is None or (isinstance(owner, asyncio.Task) and owner.done()):
            self._halt()
        elif self._task is None or self._task.done():
            self._task = self._loop.create_task(self._renew(), name=f"grel: renew {self.handle.name!r}")

    async def _renew(self) -> None:
        try:
            await self.handle.extend()
        except LockNotOwnedError:
            self._halt()  # the handle has told everyone
        except LockAcquireError as error:
            logger.warning("%s; held for another %.1f s at most", error, self.handle.expires_in)
            self._renewal = self._loop.call_later(min(self._interval() / 2, 1.0), self._begin)
        except OutOfContextError:
            logger.warning("%r: its backend is closed; the lease is left to run out", self.handle)

    def follow(self, successor: LockHandle) -> None:
        """Keep `successor` alive instead: it stands for the same claim."""
        self.handle.keeper, self.handle = None, successor
        successor.keeper = self
        self.moved()

    def moved(self) -> None:
        """Count from the new deadline."""
        self._renewal.cancel()
        self._end.cancel()
        self._renewal = self._loop.call_later(self._interval(), self._begin)
        self._end = self._loop.call_at(self.handle.deadline, self._check)

    def _check(self) -> None:
        if self.handle.reason is not None:
            self.handle.lose(self.handle.reason)
        elif not self.handle.released:
            self._end = self._loop.call_at(self.handle.deadline, self._check)

    def gone(self, reason: str) -> None:
        """Stop, and tell whoever wants to know."""
        self._halt()
        if self._lost is not None:
            self._lost(reason)

    def _halt(self) -> None:
        self.handle.keeper = None
        self._renewal.cancel()
        self._end.cancel()
        if self._limit is not None:
            self._limit.cancel()

    async def stop(self) -> None:
        """Renew no more. A renewal under way is cancelled and waited for, so that none comes after a release."""
        self._halt()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
