"""One acquisition: what its holder can ask of it, and what keeps it alive."""

import asyncio
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from grel_core.errors import (
    GrelmicroError,
    LockAcquireError,
    LockBackendError,
    LockLostError,
    LockNotOwnedError,
    LockReleaseError,
)
from grel_core.lease.backend import LeaseBackend, describe
from grel_core.lease.names import Key
from grel_core.lease.rules import Grant
from grel_core.threads import call_in_loop

logger = logging.getLogger("grel")

MARGIN = 0.01
"""Share of a lease by which its holder stops early: the two clocks may run at different speeds."""


@contextmanager
def failing_as(error: type[LockBackendError], what: str) -> Iterator[None]:
    """Turn whatever a backend raises into `error`, with the original as its cause."""
    try:
        yield
    except GrelmicroError:
        raise
    except Exception as cause:
        raise error(f"{what}: the backend failed ({describe(cause)}); see the cause, and try again") from cause


class Holder(Protocol):
    """The lock that a handle came from."""

    @property
    def lease_duration(self) -> float:
        """Seconds that a renewal asks for."""
        ...

    @property
    def shared(self) -> bool:
        """Whether it may be held by several."""
        ...


class Keeping(Protocol):
    """Who keeps a lease alive."""

    def moved(self) -> None:
        """The deadline is another one."""

    def gone(self, reason: str) -> None:
        """The lease was lost, and why."""

    def follow(self, successor: "LockHandle") -> None:
        """Another handle stands for the same claim now."""


_holdings: WeakKeyDictionary[object, list["LockHandle"]] = WeakKeyDictionary()
"""What each task and thread of this process holds. An owner that ends takes its entry along."""


def held_by(owner: object, key: Key) -> list["LockHandle"]:
    """The handles that `owner` holds on `key`, on any backend."""
    return [handle for handle in _holdings.get(owner, ()) if handle.key == key]


def held_on(store: LeaseBackend) -> list[tuple[object, "LockHandle"]]:
    """Every owner and handle that this process holds on `store`."""
    # Another event loop in another thread may add to the dict meanwhile; `keyrefs` copies it in one step.
    owners = [owner for reference in _holdings.keyrefs() if (owner := reference()) is not None]
    return [(owner, handle) for owner in owners for handle in _holdings.get(owner, ()) if handle.store is store]


class Lost:
    """The event that a lease ended before its holder gave it back."""

    def __init__(self, handle: "LockHandle") -> None:
        self._handle = handle

    def is_set(self) -> bool:
        """Whether it happened. Also true from the moment at which the lease may have run out unnoticed."""
        return self._handle.reason is not None

    async def wait(self) -> None:
        """Return once it happened; never, if the lock is given back in time."""
        handle = self._handle
        while not self.is_set():
            try:
                async with asyncio.timeout(max(handle.expires_in, 0.001)):
                    await handle.settled.wait()
            except TimeoutError:
                continue
            if handle.released:
                await asyncio.get_running_loop().create_future()


class LockHandle:
    """One acquisition of a lock.

    Pass `fencing_token` along with every write that the lock protects: a lease is a hint, the token is the proof.
    """

    def __init__(
        self,
        lock: Holder,
        store: LeaseBackend,
        key: Key,
        token: str,
        grant: Grant,
        owner: object,
        sent: float,
        duration: float,
    ) -> None:
        self.name = key.name
        self.lost = Lost(self)
        self.lock, self.store, self.key = lock, store, key
        self.released = False
        self.duration = duration
        """Seconds that the lease was last granted for."""
        self.deadline = sent + duration * (1 - MARGIN)
        """Loop time until which the lease is surely ours: counted from before the request was sent."""
        self.keeper: Keeping | None = None
        """Who keeps the lease alive, if anybody does."""
        self._loop = asyncio.get_running_loop()
        self.least = 0.0
        """Seconds, from the acquire on, before whose end the name is not given back."""
        self.late = False
        """Whether a request for it got lost and may arrive after the release: then it is given back once more."""
        self._told = False
        self._token = token
        self._grant = grant
        self._owner = weakref.ref(owner)
        self._reason: str | None = None
        self._settled: asyncio.Event | None = None
        _holdings.setdefault(owner, []).append(self)

    @property
    def fencing_token(self) -> int:
        """Rises with every holder of the name; the same for as long as it is held."""
        return self._grant.fence

    @property
    def token(self) -> str:
        """The ownership token: a secret between this process and the store."""
        return self._token

    @property
    def owner(self) -> object | None:
        """The task or thread that took it; None when it is gone."""
        return self._owner()

    @property
    def expires_in(self) -> float:
        """Seconds for which the lease surely lasts, on this process's monotonic clock; 0 once lost or given back."""
        return 0.0 if self.released or self._reason else max(0.0, self.deadline - self._loop.time())

    @property
    def reason(self) -> str | None:
        """Why the lease was lost, in a few words; None while it is held or after it was given back."""
        if self._reason is None and not self.released and self._loop.time() >= self.deadline:
            self._reason = "its lease ran out"
        return self._reason

    @property
    def settled(self) -> asyncio.Event:
        """Set once the handle is lost or given back."""
        if self._settled is None:
            self._settled = asyncio.Event()
        return self._settled

    def ensure(self) -> None:
        """Do nothing while the lock is surely held.

        Raises:
            LockLostError: it is lost, or was given back.
        """
        if self.released or self.reason is not None:
            raise LockLostError(f"{self._what}: {self.reason or 'it was given back'}; stop writing under it")

    async def extend(self) -> "LockHandle":
        """Hold the lock for another lease, counted from now on the store's clock. From any task.

        Raises:
            LockNotOwnedError: the lease ran out first. Stop: someone else may be inside.
            LockAcquireError: the backend failed. The old lease still runs; try again.
        """
        duration = self.lock.lease_duration
        sent = self.store.check_loop().time()
        with failing_as(LockAcquireError, self._what):
            grant = (
                None
                if self.released
                else await self.store.renew(self.key, self._token, duration, shared=self.lock.shared)
            )
        if grant is None or grant.fence != self.fencing_token:
            if grant is not None:
                # A backend without a true renewal took the lock anew: the work before it is no longer covered.
                self.store.give_back(self.key, self._token, duration)
            self.lose("its lease ran out")
            raise LockNotOwnedError(f"{self._what}: its lease ran out; the protected work may have overlapped")
        self.duration, self.deadline = duration, sent + duration * (1 - MARGIN)
        if self.keeper is not None:
            self.keeper.moved()
        return self

    async def release(self) -> None:
        """Give the lock back. From any task; a cancelled release is finished before the cancellation goes on.

        Raises:
            LockNotOwnedError: it was given back before, or its lease ran out: the protected work may have overlapped.
            LockReleaseError: the backend failed. It is still held as far as anyone knows; release again.
        """
        if self.released:
            raise LockNotOwnedError(f"{self._what}: it was given back before")
        self.store.check_loop()
        try:
            with failing_as(LockReleaseError, self._what):
                gone = not await self.store.drop(self.key, self._token, least=self.least)
        except asyncio.CancelledError:
            await finish(self._give_back(self.store.backend_timeout))
            raise
        # Only once the backend has answered: a release that failed can then be tried again.
        self.forget()
        if self.late:
            self.store.give_back(self.key, self._token, self.duration, late=True)
        if gone:
            self._reason = self._reason or "its lease ran out"
            raise LockNotOwnedError(f"{self._what}: its lease ran out; the protected work may have overlapped")

    async def leave(self, exc: BaseException | None) -> None:
        """Give the lock back at the end of a body that failed with `exc`, if it did: then that counts more.

        Nobody tries again after this, so what fails now goes on in the background.

        Raises:
            LockNotOwnedError, LockReleaseError: as `release`, if the body did not fail.
        """
        try:
            await self.release()
        except LockBackendError as error:
            if not self.released:
                self._give_back(self.duration)
            if exc is None:
                raise
            logger.warning("%s (raised while another error was on its way)", error)

    def _give_back(self, within: float) -> asyncio.Task[bool]:
        self.forget()
        return self.store.give_back(self.key, self._token, within, least=self.least)

    @property
    def from_thread(self) -> "ThreadHandle":
        """The same handle for a worker thread, without `await`."""
        return ThreadHandle(self)

    def lose(self, reason: str) -> None:
        """Mark the lease as lost, and tell whoever keeps it before whoever waits on `lost`: first the body ends."""
        if self._told or self.released:
            return
        self._told = True
        self._reason = self._reason or reason
        if self.keeper is not None:
            self.keeper.gone(self._reason)
        self._settle()

    def forget(self) -> None:
        """Mark the lease as given back, whoever owned it."""
        self.released = True
        owner = self.owner
        if owner is not None and self in (handles := _holdings.get(owner, [])):
            handles.remove(self)
        self._settle()

    def _settle(self) -> None:
        if self._settled is not None:
            self._settled.set()

    @property
    def _what(self) -> str:
        return f"{self.key.kind} {self.name!r}"

    def __repr__(self) -> str:
        state = "released" if self.released else self.reason or f"{self.expires_in:.1f} s left"
        return f"<LockHandle {self.name!r} fencing_token={self.fencing_token} {state}>"


class ThreadHandle:
    """A `LockHandle` for a worker thread."""

    def __init__(self, handle: LockHandle) -> None:
        self._handle = handle

    def extend(self) -> LockHandle:
        """As `LockHandle.extend`."""
        return call_in_loop(self._handle.store.loop, self._handle.extend)

    def release(self) -> None:
        """As `LockHandle.release`."""
        call_in_loop(self._handle.store.loop, self._handle.release)


async def finish(task: asyncio.Task[Any]) -> None:
    """Wait until `task` has ended, however often the caller is cancelled meanwhile. The task bounds itself.

    Raises:
        CancelledError: the caller was cancelled meanwhile.
    """
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
