"""Work that only the leader does, again and again."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable

from grel_core.coordination.election import LeaderElection

logger = logging.getLogger("grel")


class LeaderLoop:
    """A background task that calls `function` every so many seconds while this worker leads `election`."""

    def __init__(self, election: LeaderElection, function: Callable[[], Awaitable[object]], every: float) -> None:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} is no async function; nothing could stop it when the lead is lost")
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self.election = election
        self._function = function
        self._every = every

    async def run(self) -> None:
        """Work in every term, until cancelled."""
        await self.election.lead(self._loop, repeat=True)

    async def _loop(self) -> None:
        # Asked again each time: a function that swallows its cancellation must not go on beside the next leader.
        while self.election.is_leader():
            try:
                await self._function()
            except Exception:
                logger.exception("leader loop %r failed; it goes on in %s s", self.name, self._every)
            await asyncio.sleep(self._every)
