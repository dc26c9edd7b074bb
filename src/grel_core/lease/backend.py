"""What a store is inside: one method, `apply`, from which every verb follows."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import ClassVar, Literal, TypeVar

from grel_core.clock import from_microseconds
from grel_core.component import Openable
from grel_core.config import LONGEST
from grel_core.lease.names import LOCK, TASKLOCK, Key, check_name
from grel_core.lease.protocols import LeaderRecord
from grel_core.lease.queue import Lines, Watch, Watches
from grel_core.lease.rules import Advance, Busy, Downgrade, Grant, Instant, Peek, Record, Release, Renew, Rule, Take

T = TypeVar("T")
logger = logging.getLogger("grel")

PACE = 0.005
"""Seconds between two looks for somebody else's release, where no message comes."""
SAFETY = 1.0
"""Seconds after which a waiter tries again although no hint came: a lost message costs this much, never a hang."""


def microseconds(seconds: float) -> int:
    """Whole microseconds, at least one.

    Raises:
        ValueError: it is no duration that a lease can have.
    """
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"{seconds} s is no duration of a lease; give a positive number, at most {LONGEST:.0f}")
    return max(1, round(seconds * 1_000_000))


class LeaseBackend(Openable, ABC):
    """A place that keeps leases, open on one event loop at a time.

    An implementation writes `apply`, and `_open` and `_close` where it has something to connect. The contract of
    `apply`, which the conformance suite checks: the rule is run on the record atomically; a caller that is cancelled
    does not stop a rule that is under way, and a later rule with the same token runs after it. A rule takes at most
    `backend_timeout` seconds to answer or raise.
    """

    scope: ClassVar[Literal["process", "host", "cluster"]] = "cluster"
    """How far a lease kept here reaches."""

    def __init__(
        self,
        *,
        prefix: str = "grel",
        backend_timeout: float = 5.0,
        retention: float = 60.0,
        memory_retention: float = 30 * 86_400.0,
    ) -> None:
        self.prefix = check_name(prefix)
        self.backend_timeout = positive("backend_timeout", backend_timeout)
        self._retention = microseconds(positive("retention", retention))
        self._memory_retention = microseconds(positive("memory_retention", memory_retention))
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        self.lines = Lines()
        self.watches = Watches()
        self.failing_since: float | None = None
        """Loop time of the first of the failures that go on right now; None while the store answers."""
        self._background: set[asyncio.Task[bool]] = set()
        self._later: set[asyncio.TimerHandle] = set()
        self._probe: asyncio.Task[None] | None = None

    async def _drain(self) -> None:
        """Wait for give-backs that are under way, at most `backend_timeout`."""
        for timer in self._later:
            timer.cancel()
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])
        if pending := set(self._background):
            _, late = await asyncio.wait(pending, timeout=self.backend_timeout)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def check(self) -> None:
        """Raise when the store cannot be used right now."""
        await self.peek(Key(LOCK, "grel-check"))

    # The one thing that a store does.

    @abstractmethod
    async def apply(self, key: Key, rule: Rule[T]) -> T:
        """Run `rule` on the record of `key`, atomically, on the store's clock, and return its answer."""

    def keep(self, key: Key) -> int:
        """Microseconds for which an idle record is kept: short for locks, long for what a successor must know."""
        return self._retention if key.kind in {LOCK, TASKLOCK} else self._memory_retention

    def transient(self, error: BaseException) -> bool:
        """Whether trying again could help."""
        return isinstance(error, OSError | TimeoutError)

    async def listen(self) -> bool:
        """Make sure that hints arrive. False: they do not, and whoever waits has to poll."""
        return True

    def watch(self, key: Key, pace: float = PACE) -> Watch:
        """A watch that is hinted when `key` may be free; `pace` as for `Watch`."""
        return self.watches.watch(key, pace)

    async def ask(self, key: Key, rule: Rule[T]) -> T:
        """`apply`, and remember whether the store answers.

        Raises:
            TypeError: the token is no text.
        """
        if not isinstance(token := getattr(rule, "token", ""), str):
            raise TypeError(f"a token is text, not {type(token).__name__}; give for example str(uuid4())")
        try:
            answer = await self.apply(key, rule)
        except Exception as error:
            if self.transient(error):
                self.failed()
            raise
        self.failing_since = None
        return answer

    def failed(self) -> None:
        """Note that the store does not answer; from now on it is asked now and then whether it does again."""
        loop = asyncio.get_running_loop()
        if self.failing_since is None:
            self.failing_since = loop.time()
        if self._users and (self._probe is None or self._probe.done()):
            self._probe = loop.create_task(self._await_recovery(), name=f"grel: does {type(self).__name__} answer")

    async def _await_recovery(self) -> None:
        while self.failing_since is not None:
            await asyncio.sleep(SAFETY)
            with suppress(Exception):  # that it fails is what this waits for to end
                await self.check()

    # The verbs.

    async def take(
        self,
        key: Key,
        token: str,
        duration: float,
        *,
        shared: bool = False,
        queue: float = 0,
        meta: Mapping[str, str] | None = None,
    ) -> Grant | Busy:
        """Take `key` for `duration` seconds, or learn for how long someone else may hold it.

        With `queue`, a refused caller keeps a place in line for that many seconds.
        """
        rule = Take(token, microseconds(duration), shared, microseconds(queue) if queue else 0, meta)
        return await self.ask(key, rule)

    async def renew(self, key: Key, token: str, duration: float, *, shared: bool = False) -> Grant | None:
        """Hold on for `duration` seconds from now. None: the lease had run out; nothing was acquired."""
        return await self.ask(key, Renew(token, microseconds(duration), shared))

    async def drop(self, key: Key, token: str, *, least: float = 0) -> bool:
        """Give up what `token` holds on `key`, its place in line included. False when it held nothing.

        With `least`, an exclusive claim that began less than so many seconds ago is left to run until then.
        """
        return await self.ask(key, Release(token, microseconds(least) if least else 0))

    async def downgrade(self, key: Key, token: str, duration: float) -> Grant | None:
        """Turn an exclusive claim into a shared one."""
        return await self.ask(key, Downgrade(token, microseconds(duration)))

    async def advance(self, key: Key, mark: int) -> bool:
        """Claim a schedule tick."""
        return await self.ask(key, Advance(mark))

    async def peek(self, key: Key) -> tuple[Record, Instant]:
        """The live record, and when it was so."""
        return await self.ask(key, Peek())

    async def locked(self, key: Key) -> bool:
        """Whether anyone holds `key`."""
        record, _ = await self.peek(key)
        return record.holder is not None or bool(record.readers)

    async def owned(self, key: Key, token: str) -> bool:
        """Whether `token` holds `key`."""
        record, _ = await self.peek(key)
        return record.holder == token or token in record.readers

    async def leader(self, key: Key) -> LeaderRecord | None:
        """Who leads, with the ownership token as its holder; None when nobody does."""
        record, _ = await self.peek(key)
        if record.holder is None:
            return None
        return LeaderRecord(
            holder=record.holder,
            lease_duration=record.duration / 1_000_000,
            acquired_at=from_microseconds(record.since),
            renewed_at=from_microseconds(record.renewed),
            transitions=record.transitions,
            metadata=dict(record.meta),
            fencing_token=record.fence,
        )

    def give_back(
        self, key: Key, token: str, within: float, *, least: float = 0, late: bool = False
    ) -> asyncio.Task[bool]:
        """Drop whatever `token` may hold, in the background, trying for `within` seconds; `least` as for `drop`.

        `late`: a request got lost with its connection and may still arrive, so it is dropped once more a while later.

        For claims whose fate is unknown, because their caller was cancelled or the answer got lost. After `within`
        the lease has run out anyway. The task is waited for when the backend closes.
        """
        loop = asyncio.get_running_loop()
        if late:
            again = partial(self.give_back, key, token, self.backend_timeout, least=least)
            self._later = {timer for timer in self._later if timer.when() > loop.time()}
            self._later.add(loop.call_later(self.backend_timeout, again))
        work = self._give_back(key, token, loop.time() + within, least)
        task = loop.create_task(work, name=f"grel: give back {key.kind}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _give_back(self, key: Key, token: str, deadline: float, least: float) -> bool:
        loop, pause = asyncio.get_running_loop(), 0.05
        while True:
            try:
                return await self.drop(key, token, least=least)
            except Exception as error:  # noqa: BLE001 - nobody waits for this task: what fails is logged
                if not self.transient(error) or loop.time() + pause >= deadline:
                    logger.warning("%s %r may stay held until its lease ends: %s", key.kind, key.name, describe(error))
                    return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, SAFETY)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


def positive(what: str, value: float) -> float:
    """Return `value` if it is a positive, finite number of seconds.

    Raises:
        TypeError: it is no number.
        ValueError: it is zero, negative, infinite or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is a number of seconds, not {type(value).__name__}")
    if not 0 < value <= LONGEST:
        raise ValueError(f"{what} is {value}; give a positive, finite number of seconds, at most ten years")
    return float(value)


def describe(error: BaseException) -> str:
    """What may be logged of a vendor's error: its type. Its text may hold an address or a password."""
    return type(error).__name__
