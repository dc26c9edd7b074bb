"""TaskLock: a lock for scheduled work, which nobody else repeats too soon."""

import logging
from types import TracebackType
from typing import ClassVar, Self
from uuid import UUID
from weakref import WeakKeyDictionary

from pydantic import Field, model_validator

from grel_core.config import BaseLockConfig, Reconfigurable, Seconds, checked, load_config
from grel_core.coordination.handle import LockHandle, failing_as
from grel_core.coordination.hold import lost_error
from grel_core.coordination.keeper import Keeper
from grel_core.coordination.leased import LockPrimitive
from grel_core.coordination.owner import ThreadOwner, current_task, current_thread
from grel_core.coordination.tether import Tether
from grel_core.errors import LockAcquireError, LockReleaseError
from grel_core.lease.names import TASKLOCK
from grel_core.lease.protocols import LockBackend
from grel_core.lease.rules import Grant
from grel_core.threads import call_in_loop

logger = logging.getLogger("grel")

WARN_AT = 0.8
"""Share of the lease after which a body that still runs is worth a warning."""


class TaskLockConfig(BaseLockConfig):
    """What a task lock can be told."""

    min_hold_duration: float = Field(default=1, ge=0, allow_inf_nan=False)
    """Seconds from the acquire, on the store's clock, for which nobody else gets the lock, however short the work."""
    lease_duration: Seconds = 60
    """Seconds after which the store frees the lock by itself."""
    keep_alive: bool = False
    """Whether the lease is renewed while the work runs, and the work cancelled when it is lost."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_hold_duration > self.lease_duration:
            raise ValueError(
                f"min_hold_duration ({self.min_hold_duration}) must not be longer than lease_duration "
                f"({self.lease_duration}); the lease would end first"
            )
        return self


class TaskLock(LockPrimitive[LockHandle], Reconfigurable[TaskLockConfig]):
    """`async with task_lock:` around scheduled work: one try, and nobody repeats the work too soon.

    Entering never waits. Leaving keeps the lock until `min_hold_duration` is over, so that a worker whose clock is
    behind does not run the same tick again. One object may be used by many tasks.
    """

    kind: ClassVar[str] = TASKLOCK
    handle_type = LockHandle

    def _set(self, name: str, backend: LockBackend | str | None, config: TaskLockConfig) -> None:
        super()._set(name, backend, config)
        self._stays: WeakKeyDictionary[LockHandle, Stay] = WeakKeyDictionary()

    def __init__(
        self,
        name: str = "default",
        *,
        backend: LockBackend | str | None = None,
        worker: str | UUID | None = None,
        min_hold_duration: float | None = None,
        lease_duration: float | None = None,
        keep_alive: bool | None = None,
        env_prefix: str | None = None,
        env_load: bool | None = None,
    ) -> None:
        arguments = {
            "worker": worker,
            "min_hold_duration": min_hold_duration,
            "lease_duration": lease_duration,
            "keep_alive": keep_alive,
        }
        config = load_config(TaskLockConfig, "TASKLOCK", name, arguments, env_prefix=env_prefix, env_load=env_load)
        self._set(name, backend, config)

    @classmethod
    def from_config(cls, name: str, config: TaskLockConfig, *, backend: LockBackend | str | None = None) -> Self:
        """A task lock with `config` as it is; the environment is not read."""
        lock = cls.__new__(cls)
        lock._set(name, backend, checked(TaskLockConfig, config))
        return lock

    async def __aenter__(self) -> LockHandle:
        """Take the lock in one try.

        Raises:
            WouldBlockError: it is held elsewhere, or was until a moment ago.
            LockReentrantError: this task holds it already.
            LockAcquireError: the backend failed.
        """
        return (await self.enter_for(current_task())).handle

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.exit_for(current_task(), exc)

    async def refresh(self) -> None:
        """Hold the lock for another `lease_duration`, counted from now. Never takes it anew.

        Raises:
            LockNotOwnedError: this task does not hold it, or the lease ran out: someone else may have run.
            LockAcquireError: the backend failed. The old lease still runs; try again.
        """
        await self.handle_of(current_task()).extend()

    @property
    def from_thread(self) -> "ThreadTaskLockAdapter":
        """The same lock for a worker thread, without `await`."""
        return ThreadTaskLockAdapter(self)

    # The bodies, told who asks.

    async def enter_for(self, owner: object) -> "Stay":
        """Come in on behalf of `owner`."""
        config = self.config
        stay = Stay(await self.acquire_for(owner, 0), config, owner)
        self._stays[stay.handle] = stay
        return stay

    async def exit_for(self, owner: object, exc: BaseException | None) -> None:
        """Leave on behalf of `owner`, under the configuration that it came in with."""
        await self._stays.pop(self.handle_of(owner)).end(exc)

    # The operations under the names of the reference: for the faces to build on, not to be called.

    async def do_acquire(self, token: str, *, duration: float) -> bool:
        """Take the lock for `token`, in one try."""
        with failing_as(LockAcquireError, self._what):
            return isinstance(await self.store.take(self._key, token, duration), Grant)

    async def do_release(self, token: str) -> bool:
        """Give back what `token` holds."""
        with failing_as(LockReleaseError, self._what):
            return await self.store.drop(self._key, token)

    async def do_reacquire(self, token: str, duration: float) -> bool:
        """Let the lease of `token` end `duration` seconds from now. False when it has lapsed: it is not taken again."""
        with failing_as(LockReleaseError, self._what):
            return await self.store.renew(self._key, token, duration) is not None

    async def do_exit(self, token: str, *, min_hold_duration: float) -> None:
        """Give back what `token` holds once the minimum is over."""
        with failing_as(LockReleaseError, self._what):
            await self.store.drop(self._key, token, least=min_hold_duration)

    async def do_thread_enter(self) -> None:
        """Come in on behalf of a thread that is not told apart from others."""
        await self.enter_for(_SOME_THREAD)

    async def do_thread_exit(self) -> None:
        """Leave on behalf of that thread."""
        await self.exit_for(_SOME_THREAD, None)


_SOME_THREAD = ThreadOwner()


class Stay:
    """One time inside: it warns when it gets long, keeps the lease alive if asked, and leaves no sooner than it may."""

    def __init__(self, handle: LockHandle, config: TaskLockConfig, owner: object) -> None:
        self.handle = handle
        handle.least = config.min_hold_duration
        self._config = config
        loop = handle.store.loop
        self._warning = loop.call_later(config.lease_duration * WARN_AT, self._warn)
        self._tether = Tether()
        self._keeper: Keeper | None = None
        if config.keep_alive:
            if not isinstance(owner, ThreadOwner):
                self._tether.__enter__()
            self._keeper = Keeper(handle, lambda reason: self._tether.cut(lost_error(handle, reason)))

    def _warn(self) -> None:
        if not self._config.keep_alive:
            logger.warning(
                "task lock %r: the work took %.0f %% of its lease of %s s; make the lease longer, or keep it alive",
                self.handle.name,
                WARN_AT * 100,
                self._config.lease_duration,
            )

    async def end(self, exc: BaseException | None) -> None:
        """Leave; errors of the body count more than those of leaving."""
        self._warning.cancel()
        try:
            if self._keeper is not None:
                self._tether.__exit__(type(exc) if exc else None, exc, None)
                await self._keeper.stop()
        finally:
            await self.handle.leave(exc)


class ThreadTaskLockAdapter:
    """A `TaskLock` for a worker thread; the thread is the holder. Errors as `ThreadLockAdapter`."""

    def __init__(self, lock: TaskLock) -> None:
        self._lock = lock

    def __enter__(self) -> LockHandle:
        owner = current_thread()
        return call_in_loop(self._lock.store.loop, lambda: self._lock.enter_for(owner)).handle

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        owner = current_thread()
        call_in_loop(self._lock.store.loop, lambda: self._lock.exit_for(owner, exc))

    def refresh(self) -> None:
        """As `TaskLock.refresh`."""
        call_in_loop(self._lock.store.loop, self._lock.handle_of(current_thread()).extend)

    def locked(self) -> bool:
        """As `TaskLock.locked`."""
        return call_in_loop(self._lock.store.loop, self._lock.locked)
