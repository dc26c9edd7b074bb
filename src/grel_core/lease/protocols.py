"""What a stranger implements to bring a store of their own: any one of these protocols is enough.

A backend of ours offers more (see `lease/backend.py`); one that has only a protocol is polled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol, runtime_checkable


@dataclass(frozen=True)
class LeaderRecord:
    """Who leads an election, in the shape of the Kubernetes LeaderElectionRecord."""

    holder: str
    """From a backend: the ownership token. From `LeaderElection.record`: the public identity of the leader."""
    lease_duration: float
    """Seconds from `renewed_at` after which the lease runs out."""
    acquired_at: datetime
    renewed_at: datetime
    transitions: int
    """How often the leader changed; 0 for the first one. Survives releases."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    fencing_token: int | None = None
    """Rises with every leader; None where the backend has none."""


class WriteGrant(NamedTuple):
    """A write claim."""

    fence: int
    poisoned: bool
    """The writer before this one never gave its lease back."""


class ReadWriteState(NamedTuple):
    """One look at a read-write lock."""

    generation: int
    """Fence of the last writer."""
    writing: bool
    readers: int
    waiting_writers: int


@runtime_checkable
class LockBackend(Protocol):
    """Mutual exclusion by name, token and lease."""

    async def acquire(self, *, name: str, token: str, duration: float) -> int | None:
        """Take `name` for `duration` seconds: its fencing token, or None while another token holds it.

        The fencing token rises with every free-to-held transition. The token that holds the name renews it and
        gets the same fencing token again.
        """
        ...

    async def release(self, *, name: str, token: str) -> bool:
        """Give `name` back. False when `token` does not hold it, or no longer."""
        ...

    async def locked(self, *, name: str) -> bool:
        """Whether any token holds `name`."""
        ...

    async def owned(self, *, name: str, token: str) -> bool:
        """Whether `token` holds `name`."""
        ...


@runtime_checkable
class ReadWriteLockBackend(Protocol):
    """Many readers or one writer, by name, token and lease."""

    async def acquire_read(self, *, name: str, token: str, duration: float) -> int | None:
        """Come in as a reader: the generation (fence of the last writer), or None while a writer holds or waits."""
        ...

    async def acquire_write(self, *, name: str, token: str, duration: float, intent: bool = True) -> WriteGrant | None:
        """Come in as the writer, or None; with `intent`, a refused writer keeps new readers out for a few seconds."""
        ...

    async def release(self, *, name: str, token: str) -> bool:
        """Give back whatever `token` holds, its waiting intent included. False when it held nothing."""
        ...

    async def downgrade(self, *, name: str, token: str, duration: float) -> int | None:
        """Turn the write claim of `token` into a read claim: its generation, or None when it holds none."""
        ...

    async def state(self, *, name: str) -> ReadWriteState:
        """Who is in and who waits."""
        ...


@runtime_checkable
class LeaderElectionBackend(Protocol):
    """One renewable lease per election, with a record of who leads."""

    async def acquire_or_renew(
        self, *, name: str, token: str, duration: float, metadata: Mapping[str, str] | None = None
    ) -> LeaderRecord:
        """Lead, go on leading, or learn who does: the caller leads when `record.holder == token`.

        A new holder raises `transitions`; the same one renewing moves only `renewed_at`.
        """
        ...

    async def release(self, *, name: str, token: str) -> bool:
        """Stop leading. False when `token` does not lead."""
        ...

    async def get(self, *, name: str) -> LeaderRecord | None:
        """Who leads; None when no live lease exists."""
        ...


@runtime_checkable
class ScheduleBackend(Protocol):
    """Which scheduled ticks were claimed."""

    async def claim(self, name: str, due: float) -> bool:
        """Claim the tick that is `due` (seconds since 1970). False when it, or a later one, was claimed before."""
        ...

    async def last_fired(self, name: str) -> float | None:
        """The latest claimed tick, in seconds since 1970; None when none was."""
        ...
