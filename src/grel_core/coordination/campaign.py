"""The loop behind an election: ask for the lead, keep it, and give it back in the right order."""

import asyncio
import logging
import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol, Self, TypeVar

from pydantic import Field, model_validator

from grel_core.config import BaseLockConfig, Seconds
from grel_core.coordination.handle import finish
from grel_core.coordination.owner import identity, new_token
from grel_core.coordination.term import Term
from grel_core.errors import NotStartedError
from grel_core.lease.backend import LeaseBackend, describe
from grel_core.lease.foreign import lease_backend
from grel_core.lease.names import Key
from grel_core.lease.protocols import LeaderElectionBackend, LeaderRecord
from grel_core.lease.queue import Watch
from grel_core.lease.rules import Busy

T = TypeVar("T")
logger = logging.getLogger("grel")

PACE = 0.05
"""Seconds between two looks of a follower, where a store sends no messages."""
STOP_TIMEOUT = 3.0
"""Seconds for which a leader that steps down waits for its guarded work to end."""
SPREAD = 0.05
"""Seconds over which followers spread their tries once a lease has ended."""


class LeaderElectionConfig(BaseLockConfig):
    """What an election can be told. `lease_duration > renew_deadline > retry_interval * (1 + retry_jitter)`."""

    lease_duration: Seconds = 15
    """Seconds after which the lead of a worker that died goes to another one."""
    renew_deadline: Seconds = 10
    """Seconds after the last confirmed renewal at which a leader stops leading by itself."""
    retry_interval: Seconds = 2
    """Seconds between renewals, and between tries where the backend sends no wake-ups or failed."""
    retry_jitter: float = Field(default=0.1, ge=0, lt=1)
    """Share by which each of these pauses varies; 0 for none."""
    backend_timeout: Seconds = 5
    """Seconds that one call to the backend may take."""
    error_interval: Seconds = 30
    """At most one log line about a failing backend per that many seconds."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.renew_deadline >= self.lease_duration:
            raise ValueError(
                f"renew_deadline ({self.renew_deadline}) must be shorter than lease_duration ({self.lease_duration}); "
                "a leader has to stop before somebody else may start"
            )
        longest = self.retry_interval * (1 + self.retry_jitter)
        if longest >= self.renew_deadline:
            raise ValueError(
                f"retry_interval with jitter ({longest:g}) must be shorter than renew_deadline "
                f"({self.renew_deadline}); a leader needs time for at least one renewal"
            )
        return self


class Candidate(Protocol):
    """The election that a campaign is run for."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> LeaderElectionConfig: ...

    @property
    def metadata(self) -> Mapping[str, str]: ...

    @property
    def backend(self) -> LeaderElectionBackend: ...


class Campaign:
    """One worker's part in one election."""

    def __init__(self, candidate: Candidate, key: Key) -> None:
        self._candidate = candidate
        self._key = key
        self.running = False
        self.record: LeaderRecord | None = None
        self.looked: float | None = None
        """Loop time at which `record` was refreshed."""
        self._term: Term | None = None
        self._resigning: asyncio.Task[None] | None = None
        self._token: str | None = None
        """The token that may stand in the store's line, or hold the lead."""
        self._out_until = 0.0
        self._watch: Watch | None = None
        self._changes: set[asyncio.Future[None]] = set()
        self._logged_at = float("-inf")
        self.due = float("inf")
        """Loop time at which the loop means to be back."""

    @property
    def term(self) -> Term | None:
        """The term that lasts right now."""
        return self._term if self._term is not None and self._term.leads else None

    async def lead(self) -> Term:
        """Wait for a term.

        Raises:
            NotStartedError: nothing runs that could bring one.
        """
        while (term := self.term) is None:
            if self.running:
                await self.change()
                continue
            await asyncio.sleep(0)  # it may be about to begin
            if not self.running:
                raise NotStartedError(
                    f"election {self._candidate.name!r} does not run here; give it to Grelmicro(uses=[...]), or run it"
                )
        return term

    async def change(self) -> None:
        """Wait until the lead is won or lost, the first look is done, or the campaign ends."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.add(change)
        try:
            await change
        finally:
            self._changes.discard(change)

    def _changed(self) -> None:
        for change in self._changes:
            if not change.done():
                change.set_result(None)

    async def run(self) -> None:
        """Take part until cancelled, or until another backend takes the place of this one."""
        if self.running:
            raise RuntimeError(f"election {self._candidate.name!r} runs already; run it once per process")
        store = self._store = lease_backend(self._candidate.backend, LeaderElectionBackend)
        loop = store.check_loop()
        self.running, self.looked, self._out_until = True, None, 0.0
        try:
            with store.watch(self._key, PACE) as self._watch:
                while lease_backend(self._candidate.backend, LeaderElectionBackend) is store:
                    self.due = loop.time() + self._candidate.config.backend_timeout
                    pause = await self._round(store, loop)
                    self.due = loop.time() + pause
                    # A leader has nothing to hear from the store, only from its own process.
                    with nullcontext() if self._term is None else self._watch.resting():
                        await self._watch.wait(pause)
        finally:
            self._watch, self.due = None, float("inf")
            try:
                await finish(loop.create_task(self._resign(store)))
            finally:
                self.running = False
                self._changed()

    async def _round(self, store: LeaseBackend, loop: asyncio.AbstractEventLoop) -> float:
        """Do what is due, and say for how many seconds nothing will be."""
        config = self._candidate.config
        if self._resigning is not None or (self._term is not None and not self.term):
            await self._resign(store)
        if (rest := self._out_until - loop.time()) > 0:
            return rest
        try:
            async with asyncio.timeout(config.backend_timeout):
                term = self._term
                pause = await (self._renew(store, config, term) if term else self._ask(store, config))
        except Exception as error:  # noqa: BLE001 - any failure of the backend is reported, and the campaign goes on
            store.failed()
            self._report(error, loop.time(), store.failing_since or loop.time(), config)
            return _jittered(config)
        return pause

    async def _ask(self, store: LeaseBackend, config: LeaderElectionConfig) -> float:
        """Ask for the lead, or for a place in line. The pause until it is worth asking again."""
        loop = store.loop
        if self._token is None:
            self._token = new_token(config.identity)
        hears = await store.listen()
        sent, token = loop.time(), self._token
        answer = await store.take(
            self._key, token, config.lease_duration, queue=config.lease_duration, meta=self._candidate.metadata
        )
        if self._token != token:
            return 0  # given up meanwhile: what gives it back was sent behind the request
        if isinstance(answer, Busy):
            await self._look(store)
            if not hears:
                return _jittered(config)
            ends = answer.remaining / 1_000_000 + 0.001 + random.uniform(0, SPREAD)
            return min(ends, config.lease_duration / 2)
        self._term = Term(token, answer.fence, loop, self._changed)
        self._term.confirm(sent, renew_deadline=config.renew_deadline, lease_duration=config.lease_duration)
        logger.info("election %r: this worker leads, term %d", self._candidate.name, answer.transitions)
        try:
            await self._look(store)  # before anybody hears of the lead: whoever does may read `record`
        finally:
            self._changed()
        return _jittered(config)

    async def _renew(self, store: LeaseBackend, config: LeaderElectionConfig, term: Term) -> float:
        """Keep the lead. 0 when it was lost: there may be a new one to win at once."""
        sent = store.loop.time()
        grant = await store.renew(self._key, term.token, config.lease_duration)
        if grant is None or grant.fence != term.fence:
            logger.warning("election %r: the lead was lost, its lease ran out", self._candidate.name)
            term.end()
            return 0
        term.confirm(sent, renew_deadline=config.renew_deadline, lease_duration=config.lease_duration)
        await self._look(store)
        return _jittered(config)

    async def _look(self, store: LeaseBackend) -> None:
        record = await store.leader(self._key)
        self.record = record and replace(record, holder=identity(record.holder))
        first, self.looked = self.looked is None, store.loop.time()
        if first:
            self._changed()

    async def step_down(self, stay_out: float, within: float) -> bool:
        """Give the lead back, in order, and stay out for a while. False: there was none."""
        if not self.running:
            return False
        store = self._store
        self._out_until = max(self._out_until, store.check_loop().time() + stay_out)
        led = self.term is not None
        await self._resign(store, within)
        return led

    async def _resign(self, store: LeaseBackend, within: float = STOP_TIMEOUT) -> None:
        """End the term and leave the line. Everybody who asks for it waits for the same one to end."""
        if self._resigning is None:
            name = f"grel: resign {self._key.name!r}"
            self._resigning = work = asyncio.get_running_loop().create_task(self._give_up(store, within), name=name)
            work.add_done_callback(self._resigned)
        await asyncio.shield(self._resigning)

    def _resigned(self, _: asyncio.Task[None]) -> None:
        self._resigning = None
        self.hint()

    async def move(self) -> None:
        """Resign on the backend that this runs on, if another one is meant by now; the loop then goes there."""
        if self.running and lease_backend(self._candidate.backend, LeaderElectionBackend) is not self._store:
            await self._resign(self._store)

    def hint(self) -> None:
        """Look at once what is to be done, and which backend is meant."""
        if self._watch is not None:
            self._watch.hint()

    async def _give_up(self, store: LeaseBackend, within: float) -> None:
        """Stop the guarded work, await it, then release: a successor must find nobody at work."""
        term, token = self._term, self._token
        if term is not None:
            term.end()
            if not await term.quiet(min(within, max(term.lease_end - asyncio.get_running_loop().time(), 0))):
                logger.warning("election %r: guarded work goes on; its lease is left to run out", self._candidate.name)
                token = None
        self._term = self._token = None
        if term is not None:
            self.record = None
            logger.info("election %r: this worker leads no more", self._candidate.name)
        if token is not None:
            await store.give_back(self._key, token, self._candidate.config.backend_timeout)

    def _report(self, error: Exception, now: float, since: float, config: LeaderElectionConfig) -> None:
        if now - self._logged_at >= config.error_interval or config.error_interval < config.retry_interval:
            self._logged_at = now
            logger.warning(
                "election %r: the backend failed (%s); trying again, for %.1f s now",
                self._candidate.name,
                describe(error),
                now - since,
            )


def _jittered(config: LeaderElectionConfig) -> float:
    spread = random.uniform(1 - config.retry_jitter, 1 + config.retry_jitter)
    return config.retry_interval * spread
