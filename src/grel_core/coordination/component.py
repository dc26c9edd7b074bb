"""Coordination: which backend keeps what, for one app or one part of it."""

from contextlib import AsyncExitStack
from typing import Any, ClassVar, TypeAlias

from grel_core.component import Openable
from grel_core.coordination.election import LeaderElection
from grel_core.coordination.lock import Lock
from grel_core.coordination.readwritelock import ReadWriteLock
from grel_core.coordination.tasklock import TaskLock
from grel_core.errors import CoordinationBackendError
from grel_core.lease.adapters import Adapter
from grel_core.lease.backend import LeaseBackend
from grel_core.lease.foreign import lease_backend
from grel_core.lease.names import check_name
from grel_core.lease.protocols import LeaderElectionBackend, LockBackend, ReadWriteLockBackend, ScheduleBackend
from grel_core.providers.base import Provider

LockSource: TypeAlias = Provider | LockBackend | type[Any]
ReadWriteLockSource: TypeAlias = Provider | ReadWriteLockBackend | type[Any]
ElectionSource: TypeAlias = Provider | LeaderElectionBackend | type[Any]
ScheduleSource: TypeAlias = Provider | ScheduleBackend | type[Any]


class Coordination(Openable):
    """Says where each kind of coordination is kept: give it to `Grelmicro(uses=[...])`.

    One provider fills every kind; `lock=`, `rwlock=`, `election=` and `schedule=` each name another place for theirs.
    Each argument takes a provider, a backend, or a class of either that needs no arguments. Without any, everything
    comes from the app's only provider; what is still missing then raises `CoordinationBackendError` when it is used.
    """

    kind: ClassVar[str] = "coordination"

    def __init__(
        self,
        source: Provider | type[Provider] | None = None,
        *,
        lock: LockSource | None = None,
        rwlock: ReadWriteLockSource | None = None,
        election: ElectionSource | None = None,
        schedule: ScheduleSource | None = None,
        name: str = "default",
    ) -> None:
        self._name = check_name(name)
        self._backends: dict[str, Any] = {}
        self._wrappers: list[LeaseBackend] = []
        self._fill(
            _made(source), {"lock": lock, "readwritelock": rwlock, "leaderelection": election, "schedule": schedule}
        )

    def _fill(self, source: Any, given: dict[str, Any]) -> None:
        if source is not None and not isinstance(source, Provider):
            raise TypeError(
                f"Coordination(...) takes a provider, not {type(source).__name__}; name its kind, as in lock="
            )
        for kind, backend in given.items():
            chosen = _made(backend) if backend is not None else source
            if isinstance(chosen, Provider):
                chosen = getattr(chosen, kind)()
            if chosen is None or kind in self._backends:
                continue
            argument, protocol = KINDS[kind]
            if not isinstance(chosen, protocol):
                raise TypeError(f"{argument}= takes a provider or a {protocol.__name__}, not {type(chosen).__name__}")
            self._backends[kind] = chosen
            # The wrapper of a foreign backend lives for as long as it is kept here, and so does what it knows.
            self._wrappers.append(lease_backend(chosen, protocol))

    def adopt(self, provider: Provider) -> None:
        """Take from `provider` whatever is not wired yet. The app calls this with its only provider."""
        self._fill(provider, dict.fromkeys(KINDS))

    @property
    def name(self) -> str:
        """Which one of the app's coordinations: `Lock("cart", backend=name)` finds it."""
        return self._name

    @property
    def stores(self) -> list[LeaseBackend]:
        """What keeps each kind that is wired."""
        return [lease_backend(backend) for backend in self._backends.values()]

    def replace_stores(self, canonical: Any) -> None:
        """Let `canonical` say, for each provider, which equal one is used instead, so that one place is opened once."""
        for backend in self._backends.values():
            if isinstance(backend, Adapter) and isinstance(backend.store, Provider):
                backend.store = canonical(backend.store)

    async def _open(self) -> None:
        async with AsyncExitStack() as stack:
            for store in self.stores:
                await stack.enter_async_context(store)
            self._stack = stack.pop_all()

    async def _close(self) -> None:
        await self._stack.aclose()

    @property
    def lock_backend(self) -> LockBackend:
        """Where locks are kept.

        Raises:
            CoordinationBackendError: nowhere.
        """
        backend: LockBackend = self._backend("lock")
        return backend

    @property
    def rwlock_backend(self) -> ReadWriteLockBackend:
        """Where read-write locks are kept; errors as `lock_backend`."""
        backend: ReadWriteLockBackend = self._backend("readwritelock")
        return backend

    @property
    def election_backend(self) -> LeaderElectionBackend:
        """Where elections are kept; errors as `lock_backend`."""
        backend: LeaderElectionBackend = self._backend("leaderelection")
        return backend

    @property
    def schedule_backend(self) -> ScheduleBackend:
        """Where claimed schedule ticks are kept; errors as `lock_backend`."""
        backend: ScheduleBackend = self._backend("schedule")
        return backend

    def _backend(self, kind: str) -> Any:
        if kind not in self._backends:
            raise CoordinationBackendError(
                f"coordination {self._name!r} has no {kind} backend; give it a provider, or {KINDS[kind][0]}="
            )
        return self._backends[kind]

    def lock(self, name: str, **options: Any) -> Lock:
        """A `Lock` kept here; `options` as for `Lock`."""
        return Lock(name, backend=self.lock_backend, **options)

    def readwritelock(self, name: str, **options: Any) -> ReadWriteLock:
        """A `ReadWriteLock` kept here; `options` as for `ReadWriteLock`."""
        return ReadWriteLock(name, backend=self.rwlock_backend, **options)

    def tasklock(self, name: str = "default", **options: Any) -> TaskLock:
        """A `TaskLock` kept here; `options` as for `TaskLock`."""
        return TaskLock(name, backend=self.lock_backend, **options)

    def leaderelection(self, name: str, **options: Any) -> LeaderElection:
        """A `LeaderElection` kept here; `options` as for `LeaderElection`."""
        return LeaderElection(name, backend=self.election_backend, **options)

    def __repr__(self) -> str:
        return f"<Coordination {self._name!r}: {', '.join(f'{k}={v!r}' for k, v in self._backends.items())}>"


KINDS = {
    "lock": ("lock", LockBackend),
    "readwritelock": ("rwlock", ReadWriteLockBackend),
    "leaderelection": ("election", LeaderElectionBackend),
    "schedule": ("schedule", ScheduleBackend),
}
"""Factory method of a provider to the argument of the same kind, and to what it takes."""


def _made(source: Any) -> Any:
    """`source`, or an object of it when it is a class."""
    return source() if isinstance(source, type) else source
