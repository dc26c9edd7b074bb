"""Background tasks that are started again when they crash, and that say so."""

import asyncio
import logging
from collections import deque

from grel_core.component import Task

logger = logging.getLogger("grel")

WINDOW = 60.0
"""Seconds for which a crash counts."""
TOO_MANY = 3
"""Crashes within the window from which on the app is not ready any more."""
_LONGEST_PAUSE = 15.0


class Supervised:
    """One background task of an app: owned, restarted with back-off, awaited at the end."""

    def __init__(self, work: Task) -> None:
        self.work = work
        self._crashes: deque[float] = deque()
        self._loop = asyncio.get_running_loop()
        self.task = self._loop.create_task(self._run(), name=f"grel: {work.name}")

    @property
    def crashes(self) -> int:
        """How often it crashed within the last minute."""
        while self._crashes and self._crashes[0] < self._loop.time() - WINDOW:
            self._crashes.popleft()
        return len(self._crashes)

    async def _run(self) -> None:
        while True:
            try:
                await self.work.run()
                return
            except (Exception, asyncio.CancelledError):
                # A cancellation that nobody asked this task for is what the work awaited: a crash like any other.
                if self.task.cancelling():
                    raise
                self._crashes.append(self._loop.time())
                pause = min(0.1 * 4 ** (self.crashes - 1), _LONGEST_PAUSE)
                logger.exception("background task %r crashed; it starts again in %.1f s", self.work.name, pause)
                await asyncio.sleep(pause)
