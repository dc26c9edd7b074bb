"""Holding a lease: the one implementation behind `Lock`, both sides of a `ReadWriteLock`, and `TaskLock`.

Each operation has one body, which is told who asks: the async face passes the running task, `from_thread` the thread.
"""

import random
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import Field

from grel_core.component import check_admission, current_app
from grel_core.config import LONGEST, BaseLockConfig, Reconfigurable, Seconds
from grel_core.coordination.attempt import Attempt
from grel_core.coordination.handle import LockHandle, failing_as, held_by
from grel_core.coordination.hold import Hold, ThreadLockAdapter, check_timeout
from grel_core.coordination.owner import current_task
from grel_core.errors import (
    CoordinationError,
    LockLockedCheckError,
    LockNotOwnedError,
    LockOwnedCheckError,
    LockReentrantError,
)
from grel_core.lease.backend import LeaseBackend
from grel_core.lease.foreign import lease_backend
from grel_core.lease.names import Key, check_name
from grel_core.lease.protocols import LockBackend

Handle = TypeVar("Handle", bound=LockHandle)


class LockConfig(BaseLockConfig):
    """What a lock can be told."""

    lease_duration: Seconds = 60
    """Seconds after which the store frees the lock by itself, counted from each acquire or extend."""
    retry_interval: float = Field(default=0.1, ge=0.001, le=LONGEST, allow_inf_nan=False)
    """Seconds between tries where the backend sends no wake-ups, or failed."""
    retry_jitter: float = Field(default=0.1, ge=0, lt=1)
    """Share by which each of these pauses varies; 0 for none."""


class LockPrimitive(Generic[Handle]):
    """A name that is held, alone or shared, by a task or a thread, until its lease ends: the bodies of every lock."""

    kind: ClassVar[str]
    shared: ClassVar[bool] = False
    """Whether others who want it `shared`, too, may hold the name at the same time."""
    kept: ClassVar[str] = "lock_backend"
    """Where an app's coordination says that it is kept."""
    protocol: ClassVar[type] = LockBackend
    handle_type: type[Handle]

    def _set(self, name: str, backend: Any, config: Any) -> None:
        self._name = check_name(name)
        if backend is not None and not isinstance(backend, str):
            lease_backend(backend, self.protocol)
        self._backend = backend
        self._config = config
        self._key = Key(self.kind, name)

    @property
    def name(self) -> str:
        """The name that is locked."""
        return self._name

    @property
    def backend(self) -> Any:
        """Where it is kept: the one given, else that of the current app, looked up at every access.

        Raises:
            OutOfContextError: no app is open here.
            CoordinationBackendError: the app keeps no locks under that name.
        """
        if self._backend is None or isinstance(self._backend, str):
            return getattr(current_app().get("coordination", self._backend or "default"), self.kept)
        return self._backend

    @property
    def store(self) -> LeaseBackend:
        """The inside interface of `backend`."""
        return lease_backend(self.backend, self.protocol)

    @property
    def lease_duration(self) -> float:
        """Seconds that the next acquire or extend asks for."""
        duration: float = self._config.lease_duration
        return duration

    def pause(self) -> float:
        """Seconds between two tries where the backend sends no wake-ups, or failed."""
        return 0.1

    async def locked(self) -> bool:
        """Whether anyone holds the lock.

        Raises:
            LockLockedCheckError: the backend failed.
        """
        store = self.store
        store.check_loop()
        with failing_as(LockLockedCheckError, self._what):
            return await store.locked(self._key)

    async def acquire_for(self, owner: object, timeout: float | None, max_waiters: int | None = None) -> Handle:
        """Come in on behalf of `owner`."""
        check_admission()
        store = self.store
        for handle in held_by(owner, self._key):
            if handle.store is store and handle.reason is None:
                raise self._nested(handle)
        return await Attempt(self, store, self._key, owner, self._config).run(timeout, max_waiters)

    def _nested(self, handle: LockHandle) -> CoordinationError:
        """Why the owner of `handle` may not come in again."""
        return LockReentrantError(f"{self._what} is held by this caller already; pass {handle!r} along instead")

    async def owned_by(self, owner: object) -> bool:
        """Whether `owner` holds the lock, by the store's word."""
        store = self.store
        store.check_loop()
        handles = [handle for handle in held_by(owner, self._key) if handle.store is store]
        with failing_as(LockOwnedCheckError, self._what):
            return bool(handles) and await store.owned(self._key, handles[-1].token)

    def handle_of(self, owner: object) -> LockHandle:
        """The claim that `owner` took through this lock, else through another one of its name and backend."""
        handles = held_by(owner, self._key)
        for handle in reversed(handles):
            if handle.lock is self:
                return handle
        for handle in reversed(handles):
            if handle.store is self.store:
                return handle
        raise LockNotOwnedError(f"{self._what} is not held by this caller; it was never acquired, or given back before")

    @property
    def _what(self) -> str:
        return f"{self.kind} {self._name!r}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}>"


class BaseLock(LockPrimitive[Handle], Reconfigurable[LockConfig]):
    """The vocabulary of a lock that can be waited for."""

    def pause(self) -> float:
        """As configured, jittered."""
        config = self.config
        return config.retry_interval * random.uniform(1 - config.retry_jitter, 1 + config.retry_jitter)

    async def __aenter__(self) -> Handle:
        return await self.acquire_for(current_task(), None)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.handle_of(current_task()).leave(exc)

    def hold(self, *, timeout: float | None = None, max_hold: float | None = None) -> "Hold[Handle]":
        """`async with lock.hold() as handle:` holds the lock, renewed in the background, until the body ends.

        `timeout`: seconds to wait for the lock, as in `acquire`. `max_hold`: seconds after which renewal stops and
        the lock counts as lost.

        Raises:
            LockLostError: the lease was lost; the body was cancelled at once.
        """
        return Hold(self, check_timeout(timeout), check_timeout(max_hold, what="max_hold", zero=False))

    async def acquire(self, *, timeout: float | None = None, max_waiters: int | None = None) -> Handle:
        """Wait for the lock, at most `timeout` seconds: None for ever, 0 for a single try.

        The timeout bounds the whole call, a backend that hangs included.

        Raises:
            LockQueueFullError: `max_waiters` callers of this process wait for it already.
            LockReentrantError: this task holds it already.
            LockTimeoutError: it was held elsewhere for that long (also a builtin `TimeoutError`).
            LockAcquireError: the backend failed for as long as the caller would wait, at most one lease.
        """
        return await self.acquire_for(current_task(), check_timeout(timeout), max_waiters)

    async def acquire_nowait(self) -> Handle:
        """Take the lock if it is free right now; one try.

        Raises:
            WouldBlockError: it is held elsewhere.
            LockReentrantError: this task holds it already.
            LockAcquireError: the backend failed.
        """
        return await self.acquire_for(current_task(), 0)

    async def extend(self) -> LockHandle:
        """Hold the lock for another `lease_duration`, counted from now on the store's clock.

        The fencing token stays the same.

        Raises:
            LockNotOwnedError: this task does not hold it, or the lease ran out first. Stop: someone may be inside.
            LockAcquireError: the backend failed. The old lease still runs; try again.
        """
        return await self.handle_of(current_task()).extend()

    async def release(self) -> None:
        """Give the lock back.

        Raises:
            LockNotOwnedError: this task does not hold it, or its lease ran out: the work may have overlapped.
            LockReleaseError: the backend failed; releasing again is safe.
        """
        await self.handle_of(current_task()).release()

    async def owned(self) -> bool:
        """Whether this task holds the lock, by the store's word.

        Raises:
            LockBackendError: the backend failed.
        """
        return await self.owned_by(current_task())

    @property
    def from_thread(self) -> "ThreadLockAdapter[Handle]":
        """The same lock for a worker thread, without `await`."""
        return ThreadLockAdapter(self)
