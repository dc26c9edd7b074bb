"""A stranger's backend, wrapped into the inside interface: it is polled, and its answers are not trusted blindly."""

from typing import Any, cast
from weakref import WeakKeyDictionary

from grel_core.clock import utcnow
from grel_core.errors import CoordinationBackendError
from grel_core.lease.adapters import Adapter
from grel_core.lease.backend import LeaseBackend, T
from grel_core.lease.names import Key
from grel_core.lease.protocols import LeaderElectionBackend, LeaderRecord, LockBackend
from grel_core.lease.rules import Busy, Grant, Release, Renew, Rule, Take

UNKNOWN = Busy(3_600_000_000)
"""A refusal that does not say for how long."""


class ForeignBackend(LeaseBackend):
    """Base of the wrappers. It follows whichever loop it is used on: opening is the business of what it wraps."""

    def check_loop(self) -> Any:
        import asyncio

        self._loop = asyncio.get_running_loop()
        return self._loop

    async def listen(self) -> bool:
        return False

    def _unsupported(self, rule: object) -> CoordinationBackendError:
        return CoordinationBackendError(f"{self!r} cannot {type(rule).__name__.lower()}; use a backend that can")


class ForeignLock(ForeignBackend):
    """A `LockBackend` of somebody else's."""

    def __init__(self, backend: LockBackend) -> None:
        super().__init__()
        self._backend = backend

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        name = key.name
        if isinstance(rule, Take | Renew):
            fence = await self._backend.acquire(name=name, token=rule.token, duration=rule.duration / 1_000_000)
            refusal = UNKNOWN if isinstance(rule, Take) else None
            return cast(T, refusal if fence is None else Grant(fence))
        if isinstance(rule, Release):
            return cast(T, await self._backend.release(name=name, token=rule.token))
        raise self._unsupported(rule)

    async def locked(self, key: Key) -> bool:
        return await self._backend.locked(name=key.name)

    async def owned(self, key: Key, token: str) -> bool:
        return await self._backend.owned(name=key.name, token=token)


class ForeignElection(ForeignBackend):
    """A `LeaderElectionBackend` of somebody else's."""

    def __init__(self, backend: LeaderElectionBackend) -> None:
        super().__init__()
        self._backend = backend

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        if isinstance(rule, Take | Renew):
            record = await self._backend.acquire_or_renew(
                name=key.name,
                token=rule.token,
                duration=rule.duration / 1_000_000,
                metadata=rule.meta if isinstance(rule, Take) else None,
            )
            if record.holder == rule.token:
                return cast(T, Grant(_fence(record), False, record.transitions))
            age = (utcnow() - record.renewed_at).total_seconds()
            busy = Busy(max(0, round((record.lease_duration - age) * 1_000_000)))
            return cast(T, busy if isinstance(rule, Take) else None)
        if isinstance(rule, Release):
            return cast(T, await self._backend.release(name=key.name, token=rule.token))
        raise self._unsupported(rule)

    async def leader(self, key: Key) -> LeaderRecord | None:
        return await self._backend.get(name=key.name)


def _fence(record: LeaderRecord) -> int:
    """A number that changes with every term, so that a renewal which in truth acquired again is noticed."""
    return record.fencing_token or round(record.acquired_at.timestamp() * 1_000_000)


_wrapped: WeakKeyDictionary[object, ForeignBackend] = WeakKeyDictionary()


def lease_backend(backend: LockBackend | LeaderElectionBackend) -> LeaseBackend:
    """The inside interface of `backend`; always the same object for the same backend.

    Raises:
        TypeError: `backend` follows none of the protocols.
    """
    if isinstance(backend, Adapter):
        return backend.store
    if backend not in _wrapped:
        if isinstance(backend, LockBackend):
            _wrapped[backend] = ForeignLock(backend)
        elif isinstance(backend, LeaderElectionBackend):
            _wrapped[backend] = ForeignElection(backend)
        else:
            raise TypeError(f"{type(backend).__name__} is no backend; see grel_core.coordination.LockBackend")
    return _wrapped[backend]
