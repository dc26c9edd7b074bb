"""Holding a lock around a body of code: from a task, and from a worker thread."""

import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from grel_core.coordination.handle import LockHandle
from grel_core.coordination.keeper import Keeper
from grel_core.coordination.owner import current_task, current_thread
from grel_core.coordination.tether import Tether
from grel_core.errors import LockLostError, LockNotOwnedError
from grel_core.lease.backend import LeaseBackend, positive
from grel_core.threads import call_in_loop

T = TypeVar("T")
logger = logging.getLogger("grel")


Handle = TypeVar("Handle", bound=LockHandle)
Handle_co = TypeVar("Handle_co", bound=LockHandle, covariant=True)


class Body(Protocol[Handle_co]):
    """A lock's operations, told who asks."""

    async def acquire_for(self, owner: object, timeout: float | None) -> Handle_co: ...

    async def owned_by(self, owner: object) -> bool: ...

    async def locked(self) -> bool: ...

    def handle_of(self, owner: object) -> LockHandle: ...

    @property
    def store(self) -> LeaseBackend: ...


def check_timeout(timeout: float | None, *, what: str = "timeout", zero: bool = True) -> float | None:
    """Return `timeout` if it is None, or a finite number of seconds from 0 on (above 0 unless `zero`)."""
    if timeout is None or (zero and timeout == 0 and not isinstance(timeout, bool)):
        return timeout
    return positive(what, timeout)


class Hold(Generic[Handle]):
    """`async with lock.hold() as handle:`; see `Lock.hold`."""

    def __init__(self, lock: Body[Handle], timeout: float | None, max_hold: float | None) -> None:
        self._lock, self._timeout, self._max_hold = lock, timeout, max_hold
        self._tether = Tether()
        self._entered = False

    async def __aenter__(self) -> Handle:
        if self._entered:
            raise RuntimeError("a hold() guards one body; call hold() again for the next one")
        self._entered = True
        self._handle = await self._lock.acquire_for(current_task(), self._timeout)
        self._tether.__enter__()
        self._keeper = Keeper(self._handle, self._lose, max_hold=self._max_hold)
        return self._handle

    def _lose(self, reason: str) -> None:
        self._tether.cut(lost_error(self._handle, reason))

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._tether.__exit__(exc_type, exc, traceback)
        except LockLostError as lost:
            await end(self._keeper, lost)
            raise
        await end(self._keeper, exc)


async def end(keeper: Keeper, exc: BaseException | None) -> None:
    """Stop renewing, then give back what was kept; both, however often this is cancelled.

    Raises:
        LockLostError: the lease was lost meanwhile, and no error of the body says more.
        LockReleaseError: the backend failed, likewise.
    """
    try:
        await keeper.stop()
    finally:
        handle = keeper.handle
        reason = handle.reason
        try:
            await handle.leave(exc)
        except LockNotOwnedError as error:
            raise lost_error(handle, reason or handle.reason or "it was given back") from error
    if exc is None and reason is not None:
        raise lost_error(handle, reason)


def lost_error(handle: LockHandle, reason: str) -> LockLostError:
    """What is raised when `handle` was lost."""
    return LockLostError(
        f"{handle.key.kind} {handle.name!r}: {reason} while the work ran; the protected work may have overlapped"
    )


class ThreadLockAdapter(Generic[Handle]):
    """A lock for a worker thread: the same calls, without `await`. The thread is the holder.

    Raises:
        EventLoopDeadlockError: from every call, on the event loop's own thread.
        NotStartedError: from every call, before the backend is open.
    """

    def __init__(self, lock: Body[Handle]) -> None:
        self._lock = lock
        self._entered: list[Handle] = []

    def __enter__(self) -> Handle:
        self._entered.append(self.acquire())
        return self._entered[-1]

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not what this thread holds: a body may be left in another thread than it was entered in.
        handle = self._entered.pop()
        self._call(lambda: handle.leave(exc))

    def acquire(self, *, timeout: float | None = None) -> Handle:
        """As `Lock.acquire`. Give a timeout in a web framework's thread pool: a waiting thread is one less for all."""
        if check_timeout(timeout) is None:
            _mention_pool()
        owner = current_thread()
        return self._call(lambda: self._lock.acquire_for(owner, timeout))

    def acquire_nowait(self) -> Handle:
        """As `Lock.acquire_nowait`."""
        owner = current_thread()
        return self._call(lambda: self._lock.acquire_for(owner, 0))

    def extend(self) -> LockHandle:
        """As `Lock.extend`."""
        return self._call(self._lock.handle_of(current_thread()).extend)

    def release(self) -> None:
        """As `Lock.release`."""
        self._call(self._lock.handle_of(current_thread()).release)

    def locked(self) -> bool:
        """As `Lock.locked`."""
        return self._call(self._lock.locked)

    def owned(self) -> bool:
        """As `Lock.owned`, for this thread."""
        owner = current_thread()
        return self._call(lambda: self._lock.owned_by(owner))

    @contextmanager
    def hold(self, *, timeout: float | None = None, max_hold: float | None = None) -> Iterator[Handle]:
        """Hold the lock, renewed in the background, until the body ends.

        A thread cannot be cancelled: look at `handle.lost.is_set()` or call `handle.ensure()` between steps.

        Raises:
            LockLostError: at the end of the body, when the lease was lost meanwhile.
        """
        check_timeout(max_hold, what="max_hold", zero=False)
        handle = self.acquire(timeout=timeout)
        keeper = self._call(lambda: _keep(handle, max_hold))
        try:
            yield handle
        except BaseException as exc:
            self._call(lambda exc=exc: end(keeper, exc))  # type: ignore[misc]  # mypy cannot type the default
            raise
        self._call(lambda: end(keeper, None))

    def _call(self, body: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return call_in_loop(self._lock.store.loop, body)


async def _keep(handle: LockHandle, max_hold: float | None) -> Keeper:
    return Keeper(handle, max_hold=max_hold)


@lru_cache(maxsize=1)
def _warn_pool() -> None:
    logger.warning(
        "from_thread.acquire() waits without a timeout in the framework's thread pool; waiters can use up the pool "
        "until the holder gets no thread. Give a timeout, or wait in an async dependency"
    )


def _mention_pool() -> None:
    if threading.current_thread().name.startswith("AnyIO worker thread"):
        _warn_pool()
