"""Come in: one try, or waiting for as long as it takes, so that nothing stays behind however it ends."""

import asyncio
from typing import Generic, Protocol, TypeVar

from grel_core.component import check_admission
from grel_core.coordination.handle import MARGIN, Holder, LockHandle, failing_as
from grel_core.coordination.owner import new_token
from grel_core.errors import LockAcquireError, LockQueueFullError, LockTimeoutError, WouldBlockError
from grel_core.lease.backend import SAFETY, LeaseBackend
from grel_core.lease.names import Key
from grel_core.lease.rules import Busy

Handle = TypeVar("Handle", bound=LockHandle)

PLACE = 3.0
"""Seconds for which a waiter keeps its place in the store's line unless it asks again: the dead leave soon."""


class Wish(Protocol):
    """The part of a lock's configuration that an attempt reads."""

    @property
    def identity(self) -> str: ...

    @property
    def lease_duration(self) -> float: ...


class Door(Holder, Protocol[Handle]):
    """What an attempt comes in by: a lock."""

    handle_type: type[Handle]

    def pause(self) -> float: ...


class Attempt(Generic[Handle]):
    """One caller's way to one claim.

    The token is fresh and used for this claim alone. However the attempt ends without a handle, whatever the token
    may hold is given back in the background.
    """

    def __init__(self, lock: Door[Handle], store: LeaseBackend, key: Key, owner: object, wish: Wish) -> None:
        self._lock, self._store, self._key, self._owner, self._wish = lock, store, key, owner, wish
        self._duration = wish.lease_duration
        self._loop = store.check_loop()
        self._token = new_token(wish.identity)
        self._doubt = False
        """Whether the store may know the token: a call went out and brought no refusal."""
        self._heard = self._lost = False
        """Whether there ever was an answer, and whether one got lost."""
        self._sent: float | None = None
        """When the last request went out."""
        self._began = self._loop.time()
        self._error: Exception | None = None

    async def run(self, timeout: float | None, max_waiters: int | None = None) -> Handle:
        """The claim, waiting for it at most `timeout` seconds: None for ever, 0 not at all.

        Raises:
            LockQueueFullError: `max_waiters` of this process wait already.
            WouldBlockError: held elsewhere, with a timeout of 0.
            LockTimeoutError: held elsewhere until the timeout.
            LockAcquireError: the backend failed, for as long as the caller would wait.
        """
        what = f"{self._key.kind} {self._key.name!r}"
        self._max_waiters = max_waiters
        try:
            with failing_as(LockAcquireError, what):
                if timeout == 0:
                    answer = await self._once()
                    if isinstance(answer, Busy):
                        raise WouldBlockError(f"{what} is held elsewhere; wait with a timeout, or try again later")
                    return answer
                if timeout is None:
                    return await self._patiently(None)
                return await self._within(timeout, what)
        except BaseException as error:
            if self._doubt:
                late = self._error is not None or isinstance(error, LockAcquireError)
                self._store.give_back(self._key, self._token, self._duration, late=late)
            raise

    async def _within(self, timeout: float, what: str) -> Handle:
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                return await self._patiently(self._loop.time() + timeout)
        except TimeoutError:
            if not scope.expired():
                raise
        if self._error is not None:
            raise self._error
        # Not for a request that has only just gone out, after a long time in this process's own line.
        if not self._heard and self._sent is not None and self._loop.time() - self._sent >= timeout / 2:
            raise LockAcquireError(f"{what}: the backend gave no answer within {timeout} s")
        raise LockTimeoutError(f"{what} was held elsewhere for the {timeout} s that the caller would wait")

    async def _patiently(self, deadline: float | None) -> Handle:
        if not self._store.lines.waiting(self._key, shared=self._lock.shared):
            try:
                answer = await self._once()
            except Exception as error:
                if not self._tolerable(error, deadline):
                    raise
            else:
                if not isinstance(answer, Busy):
                    return answer
        waiting = self._store.lines.waiting(self._key, shared=self._lock.shared)
        if self._max_waiters is not None and waiting >= self._max_waiters:
            raise LockQueueFullError(f"{self._key.kind} {self._key.name!r}: {waiting} callers wait already; try later")
        async with self._store.lines.turn(self._key, check_admission, shared=self._lock.shared):
            return await self._in_turn(deadline)

    async def _in_turn(self, deadline: float | None) -> Handle:
        with self._store.watch(self._key) as watch:
            while True:
                check_admission()
                pause = self._lock.pause()
                try:
                    hears = await self._store.listen()
                    answer = await self._once(queue=PLACE)
                except Exception as error:
                    if not self._tolerable(error, deadline):
                        raise
                else:
                    if not isinstance(answer, Busy):
                        return answer
                    if hears:
                        # One millisecond more, since the store refuses until the very end of a lease.
                        pause = min(answer.remaining / 1_000_000 + 0.001, SAFETY)
                await watch.wait(pause)

    async def _once(self, *, queue: float = 0) -> Handle | Busy:
        sent = self._sent = self._loop.time()
        self._doubt = True
        answer = await self._store.take(self._key, self._token, self._duration, shared=self._lock.shared, queue=queue)
        self._lost = self._lost or self._error is not None
        self._error = None
        self._heard = True
        if isinstance(answer, Busy):
            self._doubt = bool(queue)
            return answer
        if self._loop.time() >= sent + self._duration * (1 - MARGIN):
            # The answer took a whole lease: someone else may be in by now, and this token must not come back.
            self._store.give_back(self._key, self._token, self._duration)
            self._token, self._doubt = new_token(self._wish.identity), False
            return Busy(0)
        handle = self._lock.handle_type(
            self._lock, self._store, self._key, self._token, answer, self._owner, sent, self._duration
        )
        handle.late = self._lost
        return handle

    def _tolerable(self, error: Exception, deadline: float | None) -> bool:
        """Whether trying again could still help."""
        if not self._store.transient(error):
            return False
        self._error = error
        self._store.failed()
        # Those who stood in line meanwhile give up together; an old failure says nothing to a newcomer.
        now, failing_since = self._loop.time(), self._store.failing_since
        since = max(now if failing_since is None else failing_since, self._began)
        return deadline is not None or now - since < self._duration
