"""The lease rules: what every primitive is made of, as pure functions.

A `Record` is all that a store keeps for one name. A rule is a small value that is called with a record and an
instant and answers with the record to keep and what to tell the caller. No rule does I/O, reads a clock or draws a
random number, so the same input gives the same answer wherever it runs; one that changes nothing answers with the
settled record itself, and a store then writes nothing. `redis.lua` says the same thing in the
dialect that runs on that server; `tests/conformance/test_model.py` holds all of them together.

Every time here is an integer number of microseconds: floats would round differently in each dialect.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, NamedTuple, TypeVar

Answer = TypeVar("Answer")

HEAD_START = 100_000
"""Microseconds for which the first in line has a freed name to itself.

Without it the process that released would always win: its next request is ahead of everybody's wake-up."""


class Instant(NamedTuple):
    """One reading of a store's clocks, in microseconds."""

    now: int
    """The clock that decides who holds a lease. It may start anywhere, and never goes back while leases live."""
    wall: int
    """Microseconds since 1970: floors fences and dates records, decides nothing."""


class Waiter(NamedTuple):
    """Someone in line. The lease of the place is its own, so that the dead do not block the living."""

    token: str
    until: int
    shared: bool = False
    called: bool = False
    """A shared one that waited already when the last exclusive lease ended: its turn is before the next such lease."""


@dataclass(frozen=True, slots=True)
class Record:
    """State of one name."""

    fence: int = 0
    """The last fencing token given out; never falls."""
    holder: str | None = None
    """Token of the exclusive holder."""
    until: int = 0
    """When the exclusive lease runs out."""
    start: int = 0
    """When the holder came in."""
    duration: int = 0
    """How long the exclusive lease was last granted for."""
    since: int = 0
    """Wall time at which the holder came in."""
    renewed: int = 0
    """Wall time at which the holder last renewed."""
    meta: Mapping[str, str] = field(default_factory=dict)
    lapsed: bool = False
    """The last exclusive lease ran out instead of being given back."""
    ended: int = 0
    """When the last claim ended, or the last tick was claimed."""
    transitions: int = 0
    """How often the exclusive holder changed; the first one is number 0."""
    readers: Mapping[str, int] = field(default_factory=dict)
    """Shared holders: token to expiry."""
    waiters: tuple[Waiter, ...] = ()
    """Who waits, first come first."""
    mark: int | None = None
    """The latest schedule tick that was claimed."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The claim is the caller's."""

    fence: int
    lapsed: bool = False
    """The exclusive holder before this one never gave the lease back: what it guarded may be half done."""
    transitions: int = 0


@dataclass(frozen=True, slots=True)
class Busy:
    """Someone else is in the way, for `remaining` microseconds at the most if nothing is renewed."""

    remaining: int


class Rule(ABC, Generic[Answer]):
    """A decision about one record."""

    __slots__ = ()
    verb: ClassVar[str]

    @abstractmethod
    def __call__(self, record: Record, at: Instant) -> tuple[Record, Answer]:
        """Return the record to keep and the answer for the caller."""


def settle(record: Record, now: int) -> Record:
    """Drop every claim and every place in line that ran out at or before `now`."""
    if record.holder is not None and record.until <= now:
        record = _vacate(replace(record, lapsed=True), record.until)
    if record.readers and any(until <= now for until in record.readers.values()):
        readers = {token: until for token, until in record.readers.items() if until > now}
        ended = record.ended if readers else max(record.ended, *record.readers.values())
        record = replace(record, readers=readers, ended=ended)
    if record.waiters and any(waiter.until <= now for waiter in record.waiters):
        record = replace(record, waiters=tuple(waiter for waiter in record.waiters if waiter.until > now))
    return record


def forget_at(record: Record, keep: int) -> int:
    """When nothing in the record matters any more: `keep` after the last of its claims ended."""
    until = record.until if record.holder is not None else 0
    places = [waiter.until for waiter in record.waiters]
    return max(record.ended, until, *record.readers.values(), *places) + keep


def reap(record: Record, now: int, keep: int) -> Record:
    """The record, or an empty one once it is due to be forgotten.

    Forgetting is safe because fences do not count on old records: the wall clock floors them.
    """
    return record if now < forget_at(record, keep) else Record()


def heirs(record: Record) -> tuple[str, ...]:
    """Who in line may come in, and should be woken: the readers whose turn it is, else the first writer, else all."""
    if record.holder is not None or not record.waiters:
        return ()
    called = [waiter.token for waiter in record.waiters if waiter.called]
    writers = [waiter.token for waiter in record.waiters if not waiter.shared]
    if called or not writers:
        return tuple(called or [waiter.token for waiter in record.waiters])
    return () if record.readers else (writers[0],)


def _vacate(record: Record, now: int) -> Record:
    """End the exclusive claim. Readers that waited for it get their turn, so that writers never shut them out."""
    if any(waiter.shared for waiter in record.waiters):
        record = replace(record, waiters=tuple(waiter._replace(called=waiter.shared) for waiter in record.waiters))
    return replace(record, holder=None, ended=now)


def _blocked(record: Record, now: int, token: str, *, shared: bool) -> int | None:
    """For how long someone else keeps `token` out; None when it may come in."""
    if record.holder is not None:
        return record.until - now
    if shared:
        writers = [waiter.until for waiter in record.waiters if not waiter.shared]
        return max(writers) - now if writers and token not in heirs(record) else None
    if record.readers:
        return max(record.readers.values()) - now
    first = heirs(record)
    if first and token not in first and now < record.ended + HEAD_START:
        return record.ended + HEAD_START - now
    return None


def _enqueue(record: Record, waiter: Waiter) -> Record:
    """Put `waiter` in line, or renew the place it has."""
    if all(known.token != waiter.token for known in record.waiters):
        return replace(record, waiters=(*record.waiters, waiter))
    line = (k._replace(until=waiter.until) if k.token == waiter.token else k for k in record.waiters)
    return replace(record, waiters=tuple(line))


def _leave(record: Record, token: str) -> Record:
    if all(waiter.token != token for waiter in record.waiters):
        return record
    return replace(record, waiters=tuple(waiter for waiter in record.waiters if waiter.token != token))


@dataclass(frozen=True, slots=True)
class Take(Rule[Grant | Busy]):
    """Take the name, alone or `shared`. The same token asking again renews.

    With `queue`, a refused caller keeps a place in line for that many microseconds.
    """

    verb: ClassVar[str] = "take"
    token: str
    duration: int
    shared: bool = False
    queue: int = 0
    meta: Mapping[str, str] | None = None

    def __call__(self, record: Record, at: Instant) -> tuple[Record, Grant | Busy]:
        record = settle(record, at.now)
        kept, renewed = Renew(self.token, self.duration)(record, at)
        if renewed is not None:
            return kept, renewed
        blocked = _blocked(record, at.now, self.token, shared=self.shared)
        if blocked is not None:
            if self.queue:
                record = _enqueue(record, Waiter(self.token, at.now + self.queue, self.shared))
            return record, Busy(blocked)
        record = _leave(record, self.token)
        until = at.now + self.duration
        if self.shared:
            grant = Grant(record.fence, False, record.transitions)
            return replace(record, readers={**record.readers, self.token: until}), grant
        # Readers who missed their turn wait for the next one.
        waiters = tuple(waiter._replace(called=False) for waiter in record.waiters)
        grant = Grant(
            fence=max(record.fence + 1, at.wall),
            lapsed=record.lapsed,
            transitions=record.transitions + 1 if record.fence else 0,
        )
        return replace(
            record,
            fence=grant.fence,
            holder=self.token,
            until=until,
            start=at.now,
            duration=self.duration,
            since=at.wall,
            renewed=at.wall,
            meta=dict(self.meta or {}),
            lapsed=False,
            transitions=grant.transitions,
            waiters=waiters,
        ), grant


@dataclass(frozen=True, slots=True)
class Renew(Rule[Grant | None]):
    """Hold on for another `duration`, counted from now. Never acquires: a lapsed token gets None."""

    verb: ClassVar[str] = "renew"
    token: str
    duration: int
    shared: bool = False
    """Which kind of claim it is, for a stranger's backend; a record knows."""

    def __call__(self, record: Record, at: Instant) -> tuple[Record, Grant | None]:
        record = settle(record, at.now)
        until = at.now + self.duration
        grant = Grant(record.fence, False, record.transitions)
        if record.holder == self.token:
            return replace(record, until=until, duration=self.duration, renewed=at.wall), grant
        if self.token in record.readers:
            return replace(record, readers={**record.readers, self.token: until}), grant
        return record, None


@dataclass(frozen=True, slots=True)
class Release(Rule[bool]):
    """Give up what `token` holds and its place in line. False when it held nothing.

    An exclusive claim is given up no sooner than `least` after it began: until then the lease runs on by itself.
    """

    verb: ClassVar[str] = "release"
    token: str
    least: int = 0

    def __call__(self, record: Record, at: Instant) -> tuple[Record, bool]:
        record = _leave(settle(record, at.now), self.token)
        if record.holder == self.token:
            end = record.start + self.least
            return (replace(record, until=end) if end > at.now else _vacate(record, at.now)), True
        if self.token in record.readers:
            readers = {token: until for token, until in record.readers.items() if token != self.token}
            return replace(record, readers=readers, ended=at.now), True
        return record, False


@dataclass(frozen=True, slots=True)
class Downgrade(Rule[Grant | None]):
    """Turn the exclusive claim of `token` into a shared one, with no gap. None when it holds none."""

    verb: ClassVar[str] = "downgrade"
    token: str
    duration: int

    def __call__(self, record: Record, at: Instant) -> tuple[Record, Grant | None]:
        record = settle(record, at.now)
        if record.holder != self.token:
            return record, None
        record = _vacate(record, at.now)
        readers = {**record.readers, self.token: at.now + self.duration}
        return replace(record, readers=readers), Grant(record.fence, False, record.transitions)


@dataclass(frozen=True, slots=True)
class Advance(Rule[bool]):
    """Claim the schedule tick `mark`. False when it, or a later one, was claimed before."""

    verb: ClassVar[str] = "advance"
    mark: int

    def __call__(self, record: Record, at: Instant) -> tuple[Record, bool]:
        record = settle(record, at.now)
        if record.mark is not None and self.mark <= record.mark:
            return record, False
        return replace(record, mark=self.mark, ended=at.now), True


@dataclass(frozen=True, slots=True)
class Peek(Rule[tuple[Record, Instant]]):
    """Look without changing anything: the live record, and the instant at which it was so."""

    verb: ClassVar[str] = "peek"

    def __call__(self, record: Record, at: Instant) -> tuple[Record, tuple[Record, Instant]]:
        return record, (settle(record, at.now), at)
