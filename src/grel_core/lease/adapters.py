"""The public protocols, answered by a store of ours: one thin face per kind, so that kinds never meet."""

import asyncio
from collections.abc import Mapping
from typing import ClassVar, Self

from grel_core.clock import wall_microseconds
from grel_core.errors import CoordinationBackendError
from grel_core.lease.backend import LeaseBackend
from grel_core.lease.names import ELECTION, LOCK, READWRITELOCK, SCHEDULE, Key, check_name
from grel_core.lease.protocols import LeaderRecord, ReadWriteState, WriteGrant
from grel_core.lease.rules import Grant

INTENT = 3.0
"""Seconds for which a refused writer keeps new readers out unless it asks again."""
FUTURE = 366 * 86_400
"""Seconds by which a tick may lie ahead of this host's clock: one further off is a mistake and would block the rest."""


class Adapter:
    """One kind of coordination on a store. Entering it opens the store."""

    kind: ClassVar[str]

    def __init__(self, store: LeaseBackend) -> None:
        self.store = store

    async def __aenter__(self) -> Self:
        await self.store.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.store.__aexit__(*exc_info)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self.store.loop

    def key(self, name: str) -> Key:
        """What `name` is filed under."""
        return Key(self.kind, check_name(name))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.store!r}>"


class LockAdapter(Adapter):
    """A `LockBackend`."""

    kind = LOCK

    async def acquire(self, *, name: str, token: str, duration: float) -> int | None:
        answer = await self.store.take(self.key(name), token, duration)
        return answer.fence if isinstance(answer, Grant) else None

    async def release(self, *, name: str, token: str) -> bool:
        return await self.store.drop(self.key(name), token)

    async def locked(self, *, name: str) -> bool:
        return await self.store.locked(self.key(name))

    async def owned(self, *, name: str, token: str) -> bool:
        return await self.store.owned(self.key(name), token)


class ReadWriteLockAdapter(Adapter):
    """A `ReadWriteLockBackend`."""

    kind = READWRITELOCK

    async def acquire_read(self, *, name: str, token: str, duration: float) -> int | None:
        answer = await self.store.take(self.key(name), token, duration, shared=True)
        return answer.fence if isinstance(answer, Grant) else None

    async def acquire_write(self, *, name: str, token: str, duration: float, intent: bool = True) -> WriteGrant | None:
        answer = await self.store.take(self.key(name), token, duration, queue=INTENT if intent else 0)
        return WriteGrant(answer.fence, answer.lapsed) if isinstance(answer, Grant) else None

    async def release(self, *, name: str, token: str) -> bool:
        return await self.store.drop(self.key(name), token)

    async def downgrade(self, *, name: str, token: str, duration: float) -> int | None:
        grant = await self.store.downgrade(self.key(name), token, duration)
        return grant.fence if grant else None

    async def state(self, *, name: str) -> ReadWriteState:
        record, _ = await self.store.peek(self.key(name))
        waiting = sum(not waiter.shared for waiter in record.waiters)
        return ReadWriteState(record.fence, record.holder is not None, len(record.readers), waiting)


class LeaderElectionAdapter(Adapter):
    """A `LeaderElectionBackend`."""

    kind = ELECTION

    async def acquire_or_renew(
        self, *, name: str, token: str, duration: float, metadata: Mapping[str, str] | None = None
    ) -> LeaderRecord:
        key = self.key(name)
        for _ in range(3):
            await self.store.take(key, token, duration, meta=metadata)
            if record := await self.store.leader(key):
                return record
        raise CoordinationBackendError(f"election {name!r}: the lease of {duration} s ended before it could be read")

    async def release(self, *, name: str, token: str) -> bool:
        return await self.store.drop(self.key(name), token)

    async def get(self, *, name: str) -> LeaderRecord | None:
        return await self.store.leader(self.key(name))


class ScheduleAdapter(Adapter):
    """A `ScheduleBackend`."""

    kind = SCHEDULE

    async def claim(self, name: str, due: float) -> bool:
        mark = round(due * 1_000_000)
        if mark > wall_microseconds() + FUTURE * 1_000_000:
            raise ValueError(f"schedule {name!r}: the tick {due} lies more than a year ahead; check the clock")
        return await self.store.advance(self.key(name), mark)

    async def last_fired(self, name: str) -> float | None:
        record, _ = await self.store.peek(self.key(name))
        return None if record.mark is None else record.mark / 1_000_000
