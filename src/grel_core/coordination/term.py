"""A term of office: what one leader may rely on, and the work that must end with it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grel_core.coordination.tether import Tether
from grel_core.errors import NotLeaderError


class Term:
    """From the grant of a lead to its end. Leading is a deadline, not a flag."""

    def __init__(self, token: str, fence: int, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
        self.token = token
        self.fence = fence
        self.confirmed = 0.0
        """Loop time at which the request was sent that the store last answered with yes."""
        self.deadline = 0.0
        """Loop time at which the lead is given up unless it is confirmed again."""
        self.lease_end = 0.0
        """Loop time at which the store may give the lead to somebody else."""
        self.over = False
        self._loop = loop
        self._ended = ended
        self._timer: asyncio.TimerHandle | None = None
        self._guarded: dict[asyncio.Future[None], Callable[[], object]] = {}

    def confirm(self, sent: float, *, renew_deadline: float, lease_duration: float) -> None:
        """Count the lead from `sent`, the moment before the request went out."""
        self.confirmed = sent
        self.deadline = sent + renew_deadline
        self.lease_end = sent + lease_duration
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self.deadline, self.end)

    @property
    def leads(self) -> bool:
        """Whether the lead lasts right now."""
        return not self.over and self._loop.time() < self.deadline

    @property
    def age(self) -> float:
        """Seconds since the lead was last confirmed."""
        return self._loop.time() - self.confirmed

    def end(self) -> None:
        """Lead no more: stop all guarded work at once. Nothing is given back yet."""
        if self.over:
            return
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        for stop in list(self._guarded.values()):
            stop()
        self._ended()

    def guard(self, work: asyncio.Task[Any]) -> None:
        """Cancel `work` when the term ends."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._guarded[done] = work.cancel

        def finish(_: object) -> None:
            del self._guarded[done]
            done.set_result(None)

        work.add_done_callback(finish)

    @contextmanager
    def tethered(self, what: str) -> Iterator[None]:
        """Cancel the body when the term ends.

        Raises:
            NotLeaderError: it did.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        try:
            with Tether() as tether:
                error = NotLeaderError(f"{what}: the lead was lost while the work ran; it was cancelled")
                self._guarded[done] = lambda: tether.cut(error)
                yield
        finally:
            del self._guarded[done]
            done.set_result(None)

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Count the body as guarded work that cannot be cancelled. In any thread."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._guarded[done] = lambda: None

        def finish() -> None:
            del self._guarded[done]
            done.set_result(None)

        try:
            yield
        finally:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(finish)

    async def quiet(self, within: float) -> bool:
        """Wait until all guarded work has ended, at most `within` seconds. False: some of it goes on."""
        if not self._guarded:
            return True
        _, late = await asyncio.wait(set(self._guarded), timeout=max(within, 0))
        return not late
