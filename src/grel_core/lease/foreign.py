"""A stranger's backend, wrapped into the inside interface: it is polled, and its answers are not trusted blindly."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakValueDictionary

from grel_core.errors import CoordinationBackendError, NotStartedError
from grel_core.lease.adapters import Adapter
from grel_core.lease.backend import LeaseBackend, T
from grel_core.lease.names import ELECTION, LOCK, READWRITELOCK, TASKLOCK, Key
from grel_core.lease.protocols import LeaderRecord, LockBackend
from grel_core.lease.rules import Busy, Downgrade, Grant, Release, Renew, Rule, Take

UNKNOWN = Busy(3_600_000_000)
"""A refusal that does not say for how long."""


class ForeignBackend(LeaseBackend):
    """Somebody else's backend. Opening it is for its owner or the app; it follows whichever loop it is used on."""

    lazy = True

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend
        self._meta: dict[Key, Mapping[str, str] | None] = {}

    def _forget(self) -> None:
        super()._forget()
        self._began: dict[str, tuple[float, float]] = {}
        """When each token came in, and when its lease ends, on the loop's clock."""
        self._calls: dict[str, asyncio.Task[Any]] = {}
        """The last call that is under way for each token."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop | None = getattr(self._backend, "_loop", None) or self._loop
        if loop is None:
            raise NotStartedError(
                f"{self!r} keeps no event loop in `_loop`, which threads need: enter it with `async with`, and let its "
                "`__aenter__` set `_loop`"
            )
        return loop

    async def _open(self) -> None:
        if hasattr(self._backend, "__aenter__"):
            await self._backend.__aenter__()

    async def _close(self) -> None:
        if hasattr(self._backend, "__aexit__"):
            await self._backend.__aexit__(None, None, None)

    async def listen(self) -> bool:
        return False

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        if isinstance(rule, Take | Renew):
            grant = await self._take(key, rule)
            return cast(T, grant or (UNKNOWN if isinstance(rule, Take) else None))
        if isinstance(rule, Release):
            return cast(T, await self._release(key, rule))
        if isinstance(rule, Downgrade):
            duration = rule.duration / 1_000_000
            generation = await self._ask("downgrade", key, token=rule.token, duration=duration)
            return cast(T, None if generation is None else Grant(generation))
        raise CoordinationBackendError(f"{self!r} cannot {rule.verb}; use a backend that can")

    async def _take(self, key: Key, rule: Take | Renew) -> Grant | None:
        asked: dict[str, Any] = {"token": rule.token, "duration": rule.duration / 1_000_000}
        if key.kind == READWRITELOCK:
            return await self._take_side(key, rule, asked)
        if key.kind != ELECTION:
            now = self.check_loop().time()
            fence = await self._ask("acquire", key, **asked)
            if isinstance(rule, Take):
                live = {token: began for token, began in self._began.items() if began[1] > now}
                self._began = live | {rule.token: (now, now + rule.duration / 1_000_000)}
            return None if fence is None else Grant(fence)
        if isinstance(rule, Take):
            self._meta[key] = rule.meta
        # Also with a renewal: to this protocol, leaving the metadata out may mean that there is none.
        record = await self._ask("acquire_or_renew", key, **asked, metadata=self._meta.get(key))
        return Grant(_fence(record), False, record.transitions) if record.holder == rule.token else None

    async def _take_side(self, key: Key, rule: Take | Renew, asked: dict[str, Any]) -> Grant | None:
        if rule.shared:
            generation = await self._ask("acquire_read", key, **asked)
            return None if generation is None else Grant(generation)
        grant = await self._ask("acquire_write", key, **asked, intent=isinstance(rule, Take) and rule.queue > 0)
        return None if grant is None else Grant(grant.fence, grant.poisoned)

    async def _release(self, key: Key, rule: Release) -> bool:
        """Give back, or let the lease end when the least time is over. Without a clock of the store, ours counts."""
        now = self.check_loop().time()
        began, _ = self._began.pop(rule.token, (now, now))
        left = began + rule.least / 1_000_000 - now
        if rule.least and left > 0:
            return await self._ask("acquire", key, token=rule.token, duration=left) is not None
        return bool(await self._ask("release", key, token=rule.token))

    async def _ask(self, verb: str, key: Key, *, token: str = "", **asked: Any) -> Any:
        """Call the backend. A caller that is cancelled does not cancel the call, and a later one comes after it."""
        asked |= {"name": name_of(key)} | ({"token": token} if token else {})
        before = self._calls.get(token) if token else None
        call = self._calls[token] = self.check_loop().create_task(self._call(before, verb, asked), name=f"grel: {verb}")
        call.add_done_callback(lambda _: self._answered(token, call))
        return await asyncio.shield(call)

    def _answered(self, token: str, call: asyncio.Task[Any]) -> None:
        if self._calls.get(token) is call:
            del self._calls[token]
        # If its caller was cancelled, nobody else will ask how it ended.
        _ = call.cancelled() or call.exception()

    async def _call(self, before: asyncio.Task[Any] | None, verb: str, asked: dict[str, Any]) -> Any:
        if before is not None:
            await asyncio.wait([before])
        async with asyncio.timeout(self.backend_timeout):
            return await getattr(self._backend, verb)(**asked)

    async def locked(self, key: Key) -> bool:
        return bool(await self._ask("locked", key))

    async def owned(self, key: Key, token: str) -> bool:
        return bool(await self._ask("owned", key, token=token))

    async def leader(self, key: Key) -> LeaderRecord | None:
        record: LeaderRecord | None = await self._ask("get", key)
        return record

    def __repr__(self) -> str:
        return f"<{type(self._backend).__name__}>"


def name_of(key: Key) -> str:
    """What a stranger's backend calls `key`. Two kinds of lock may be kept in one, and must not meet there."""
    told = key.kind == TASKLOCK or key.name.startswith((f"{LOCK}:", f"{TASKLOCK}:"))
    return f"{key.kind}:{key.name}" if told else key.name


def _fence(record: LeaderRecord) -> int:
    """A number that changes with every term, so that a renewal which in truth acquired again is noticed."""
    return record.fencing_token or round(record.acquired_at.timestamp() * 1_000_000)


_wrapped: WeakValueDictionary[int, ForeignBackend] = WeakValueDictionary()
"""By `id` of what is wrapped: the wrapper keeps it alive, so that the id cannot be another object's meanwhile."""


def lease_backend(backend: Any, protocol: type = LockBackend) -> LeaseBackend:
    """The inside interface of `backend`; the same object for the same backend, for as long as anyone has it.

    Raises:
        TypeError: `backend` does not follow `protocol`.
    """
    if isinstance(backend, Adapter):
        return backend.store
    if (known := _wrapped.get(id(backend))) is not None:
        return known
    if not isinstance(backend, protocol):
        raise TypeError(f"{backend!r} is no {protocol.__name__}; a provider has one, as in provider.lock()")
    return _wrapped.setdefault(id(backend), ForeignBackend(backend))
