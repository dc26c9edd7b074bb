"""Work that only the leader does, again and again."""

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from grel_core.coordination.election import LeaderElection

logger = logging.getLogger("grel")


class LeaderLoop:
    """A background task that calls `function` every so many seconds while this worker leads `election`."""

    def __init__(self, election: LeaderElection, function: Callable[[], Any], every: float) -> None:
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self.election = election
        self._function = function
        self._every = every

    async def run(self) -> None:
        """Work in every term, until cancelled."""
        await self.election.lead(self._loop, repeat=True)

    async def _loop(self) -> None:
        while True:
            try:
                if inspect.iscoroutinefunction(self._function):
                    await self._function()
                else:
                    await asyncio.to_thread(self._function)
            except Exception:
                logger.exception("leader loop %r failed; it goes on in %s s", self.name, self._every)
            await asyncio.sleep(self._every)
