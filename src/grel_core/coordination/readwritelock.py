"""ReadWriteLock: many readers at once, or one writer alone, on any worker."""

from typing import Any, ClassVar, Self
from uuid import UUID

from grel_core.config import Reconfigurable, checked, load_config
from grel_core.coordination.handle import LockHandle, failing_as
from grel_core.coordination.leased import BaseLock, LockConfig
from grel_core.coordination.owner import current_task
from grel_core.errors import (
    CoordinationError,
    LockAcquireError,
    LockLockedCheckError,
    LockNotOwnedError,
    LockUpgradeError,
)
from grel_core.lease.names import READWRITELOCK
from grel_core.lease.protocols import ReadWriteLockBackend, ReadWriteState


class ReadWriteLockConfig(LockConfig):
    """What a read-write lock can be told: the same as a lock, for both of its sides."""


class _Guard(LockHandle):
    """A handle that proves something only while it is valid."""

    @property
    def fencing_token(self) -> int:
        """The fencing token, while the claim is surely held.

        Raises:
            LockLostError: it was lost or given back: what it would prove is not true any more.
        """
        self.ensure()
        return self._grant.fence


class ReadGuard(_Guard):
    """One reader inside: no writer is, until it is given back or its lease ends."""

    @property
    def generation(self) -> int:
        """Fencing token of the last writer: the same number means the same content. Errors as `fencing_token`."""
        return self.fencing_token


class WriteGuard(_Guard):
    """The writer, alone."""

    @property
    def poisoned(self) -> bool:
        """Whether the writer before this one never gave its lease back: what it wrote may be half done."""
        return self._grant.lapsed

    async def downgrade(self) -> ReadGuard:
        """Become a reader, with no moment in between at which another writer could come in.

        This guard is over then; leaving its `async with` gives the read claim back.

        Raises:
            LockNotOwnedError: the lease ran out first.
            LockAcquireError: the backend failed; nothing changed as far as anyone knows.
        """
        lock, owner = self.lock, self.owner or current_task()
        duration, sent = lock.lease_duration, self.store.check_loop().time()
        with failing_as(LockAcquireError, f"{self.key.kind} {self.name!r}"):
            grant = None if self.released else await self.store.downgrade(self.key, self.token, duration)
        if grant is None:
            self.lose("its lease ran out")
            raise LockNotOwnedError(f"{self.key.kind} {self.name!r}: its lease ran out; the work may have overlapped")
        self.forget()
        reader = ReadGuard(lock, self.store, self.key, self.token, grant, owner, sent, duration)
        if self.keeper is not None:
            self.keeper.follow(reader)
        return reader


class _Side(Reconfigurable[LockConfig]):
    """What both views share: everything but who is let in."""

    kind: ClassVar[str] = READWRITELOCK
    kept: ClassVar[str] = "rwlock_backend"
    protocol: ClassVar[type] = ReadWriteLockBackend
    whole: "ReadWriteLock"

    @classmethod
    def of(cls, whole: "ReadWriteLock", backend: Any) -> Self:
        """One view of `whole`."""
        side = cls()
        side.whole = whole
        side._set(whole.name, backend, whole.config)  # type: ignore[attr-defined]  # of the lock it is mixed into
        return side

    def reconfigure(self, new_config: LockConfig) -> None:
        """Reconfigure the whole lock."""
        self.whole.reconfigure(new_config)  # type: ignore[arg-type]  # which says so when it is of the wrong type


class ReadSide(_Side, BaseLock[ReadGuard]):
    """`lock.read`: whoever is in here shares the name with other readers."""

    shared: ClassVar[bool] = True
    handle_type = ReadGuard


class WriteSide(_Side, BaseLock[WriteGuard]):
    """`lock.write`: whoever is in here is alone."""

    handle_type = WriteGuard

    def _nested(self, handle: LockHandle) -> CoordinationError:
        if isinstance(handle, ReadGuard):
            return LockUpgradeError(
                f"{self._what} is held for reading by this caller; give that back first: two readers that both wanted "
                "to write would wait for each other"
            )
        return super()._nested(handle)


class ReadWriteLock(Reconfigurable[ReadWriteLockConfig]):
    """Two views of one lock, each with all that `Lock` has: `async with lock.read:` and `async with lock.write:`.

    A waiting writer keeps new readers out; readers that waited when a writer ends come in before the next writer. So
    neither side can shut the other out. A place in line lasts three seconds unless renewed: who dies waiting does not
    block the others for longer.
    """

    kind: ClassVar[str] = READWRITELOCK

    def __init__(
        self,
        name: str,
        *,
        backend: ReadWriteLockBackend | str | None = None,
        worker: str | UUID | None = None,
        lease_duration: float | None = None,
        retry_interval: float | None = None,
        retry_jitter: float | None = None,
        env_prefix: str | None = None,
        env_load: bool | None = None,
    ) -> None:
        arguments = {
            "worker": worker,
            "lease_duration": lease_duration,
            "retry_interval": retry_interval,
            "retry_jitter": retry_jitter,
        }
        config = load_config(
            ReadWriteLockConfig, "READWRITELOCK", name, arguments, env_prefix=env_prefix, env_load=env_load
        )
        self._set(name, backend, config)

    def _set(self, name: str, backend: ReadWriteLockBackend | str | None, config: ReadWriteLockConfig) -> None:
        self.name = name
        self._config = config
        self.read = ReadSide.of(self, backend)
        self.write = WriteSide.of(self, backend)

    @classmethod
    def from_config(
        cls, name: str, config: ReadWriteLockConfig, *, backend: ReadWriteLockBackend | str | None = None
    ) -> Self:
        """A lock with `config` as it is; the environment is not read."""
        lock = cls.__new__(cls)
        lock._set(name, backend, checked(ReadWriteLockConfig, config))
        return lock

    def reconfigure(self, new_config: ReadWriteLockConfig) -> None:
        """Use `new_config` from the next operation on, on both sides; errors as for `Lock`."""
        super().reconfigure(new_config)
        self.read._config = self.write._config = self._config

    @property
    def backend(self) -> ReadWriteLockBackend:
        """Where it is kept; as `Lock.backend`."""
        backend: ReadWriteLockBackend = self.write.backend
        return backend

    async def state(self) -> ReadWriteState:
        """One look at who is in and who waits.

        Raises:
            LockLockedCheckError: the backend failed.
        """
        with failing_as(LockLockedCheckError, f"{self.kind} {self.name!r}"):
            return await self.backend.state(name=self.name)

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self.name!r}>"
