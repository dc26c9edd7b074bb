"""FastAPI dependencies: a lock to use, a lock that is held, an election, the lead.

They are values: two that were made with the same arguments are equal, so that FastAPI solves them once a request and
`dependency_overrides` finds them. Annotations are real here, never strings: FastAPI reads them from instances.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Depends
from starlette.requests import HTTPConnection

from grel_core.coordination import LeaderElection, Lock, LockHandle
from grel_core.coordination.hold import check_timeout, end, lost_error
from grel_core.coordination.keeper import Keeper
from grel_core.coordination.tether import Tether
from grel_core.errors import LockLostError, LockReleaseError, NotLeaderError, WouldBlockError
from grel_core.lease.names import check_name, placeholders
from grel_fastapi.binding import Visit, current_micro, visit_of
from grel_fastapi.responses import answering, as_answer, check_number
from grel_fastapi.routes import path_name, refusing, runs_in_thread

logger = logging.getLogger("grel")

Name: TypeAlias = str | Callable[..., Any]
OnLost: TypeAlias = Literal["cancel", "error", "ignore"]


def check_choice(what: str, value: object, *choices: str) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{what} is {value!r}; use {' or '.join(map(repr, choices))}")


def _needs(dependable: object, **annotations: Any) -> None:
    """Say what FastAPI has to solve for `dependable`, which is frozen."""
    kind = inspect.Parameter.KEYWORD_ONLY
    needs = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in annotations.items()]
    object.__setattr__(dependable, "__signature__", inspect.Signature(needs))


@dataclass(frozen=True)
class LockDependency:
    """A `Lock` for the endpoint to take itself: `Annotated[Lock, Depends(lock("cart"))]`.

    `name` is a name, a template over path parameters such as `"order:{order_id}"`, or a function that FastAPI solves
    like any dependency and that returns the name. `backend` names one of the app's `Coordination` components.
    """

    name: Name
    _: KW_ONLY
    backend: str | None = None
    lease_duration: float | None = None

    def __post_init__(self) -> None:
        text = "key" if callable(self.name) else check_name(self.name)
        placeholders(text)
        # Refuses what every request would be refused for.
        Lock(text, backend=self.backend, lease_duration=self.lease_duration, env_load=False)
        _needs(self, **self.source)

    @property
    def source(self) -> dict[str, Any]:
        """What FastAPI has to solve for the name."""
        key = {} if isinstance(self.name, str) else {"key": Annotated[str, Depends(self.name)]}
        return {"connection": HTTPConnection, **key}

    def lock(self, connection: HTTPConnection, key: str = "") -> Lock:
        """The lock that a request means."""
        if isinstance(self.name, str):
            key = path_name(connection, self.name)
        with refusing(connection, "key"):
            check_name(key)
        return Lock(key, backend=self.backend, lease_duration=self.lease_duration)

    async def __call__(self, **solved: Any) -> Any:
        return self.lock(**solved)


@dataclass(frozen=True)
class HeldLock(LockDependency):
    """A lock that is held, and renewed, while the endpoint runs: `Annotated[LockHandle, Depends(held_lock("cart"))]`.

    `name`, `backend` and `lease_duration` are those of `lock`. A request takes a name once, however many of its
    dependencies want it. It waits up to `timeout` seconds (0: not at all, None: for ever) and no longer than its client
    does; then, or when `max_waiters` requests of this process wait already, it is answered 423, or as `on_busy` says: a
    status, or a function of the connection and the error that returns what to raise.

    With `hold="response"` the lock is held until the last byte is sent and background tasks have ended.

    When the lease is lost, or `max_hold` seconds are over, the request is answered 500: `on_lost="cancel"` cancels an
    async endpoint at once, `"error"` lets it end first, as a sync one always does, and `"ignore"` keeps its answer.
    """

    _: KW_ONLY
    timeout: float | None = 10
    hold: Literal["endpoint", "response"] = "endpoint"
    on_busy: int | Callable[[HTTPConnection, WouldBlockError], Exception] | None = None
    on_lost: OnLost = "cancel"
    max_hold: float | None = None
    max_waiters: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_timeout(self.timeout)
        check_timeout(self.max_hold, what="max_hold", zero=False)
        check_choice("hold", self.hold, "endpoint", "response")
        check_choice("on_lost", self.on_lost, "cancel", "error", "ignore")
        if self.on_busy is not None and not callable(self.on_busy):
            check_number("on_busy", self.on_busy)
        if self.max_waiters is not None:
            check_number("max_waiters", self.max_waiters, 1, math.inf)
        # A plain function to FastAPI, which lets a generator live until the response is sent; the one behind this
        # says itself for how long it lives.
        life: Literal["function", "request"] = "function" if self.hold == "endpoint" else "request"
        _needs(self, handle=Annotated[LockHandle, Depends(Acquisition(self), scope=life)])

    async def __call__(self, **solved: Any) -> Any:
        return solved["handle"]


lock, held_lock = LockDependency, HeldLock


@dataclass(frozen=True)
class Acquisition:
    """The generator behind a `HeldLock`."""

    held: HeldLock

    def __post_init__(self) -> None:
        _needs(self, **self.held.source)

    async def __call__(self, connection: HTTPConnection, key: str = "") -> AsyncIterator[LockHandle]:
        visit, lock = visit_of(connection), self.held.lock(connection, key)
        claim = (self.held.backend, lock.name)
        holding = visit.holdings.get(claim) or Holding(self.held, lock, visit, connection)
        async with holding as handle:
            visit.holdings[claim] = holding
            try:
                yield handle
            finally:
                if holding.users == 1:
                    del visit.holdings[claim]


class Holding:
    """A lock that one request holds once, however many of its dependencies want it. The first one's options count."""

    def __init__(self, held: HeldLock, lock: Lock, visit: Visit, connection: HTTPConnection) -> None:
        self.users = 0
        self._held, self._lock, self._visit, self._connection = held, lock, visit, connection
        self._shown = held.name if isinstance(held.name, str) else None
        self._threaded = runs_in_thread(connection.scope.get("endpoint"))
        self._tether = Tether()

    async def __aenter__(self) -> LockHandle:
        if not self.users:
            self._handle = await self._acquire()
            self._tether.__enter__()
            self._keeper = Keeper(self._handle, self._lost, max_hold=self._held.max_hold)
        self.users += 1
        return self._handle

    async def _acquire(self) -> LockHandle:
        held = self._held
        with answering(lock=self._shown):
            try:
                with self._visit.while_client_waits():
                    return await self._lock.acquire(timeout=held.timeout, max_waiters=held.max_waiters)
            except WouldBlockError as error:
                if callable(held.on_busy):
                    raise held.on_busy(self._connection, error) from error
                raise as_answer(error, lock=self._shown, status=held.on_busy) from error

    def _lost(self, reason: str) -> None:
        # A thread cannot be cancelled, and once the response has begun its end would tell the client nothing.
        if self._held.on_lost == "cancel" and not self._threaded and not self._visit.responding:
            self._tether.cut(as_answer(lost_error(self._handle, reason), lock=self._shown))

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.users -= 1
        if self.users:
            return
        try:
            self._tether.__exit__(exc_type, exc, traceback)
        except LockLostError as lost:
            await self._let_go(lost)
            raise
        await self._let_go(exc)

    async def _let_go(self, exc: BaseException | None) -> None:
        if self._threaded and isinstance(exc, asyncio.CancelledError):
            await self._keeper.stop()
            logger.warning("lock %r: cancelled, but its thread is at work; the lease is left to run out", self._shown)
            return
        try:
            await end(self._keeper, exc)
        except LockReleaseError as error:
            # The endpoint was protected until its end, and its answer is good.
            logger.warning("lock %r: could not be given back (%s)", self._shown, type(error.__cause__).__name__)
        except LockLostError as lost:
            if self._visit.responding:
                logger.warning("lock %r: lost before the response was sent completely", self._shown)
            elif self._held.on_lost != "ignore":
                raise as_answer(lost, lock=self._shown) from lost


@dataclass(frozen=True)
class ElectionDependency:
    """What `election(...)` and `leader(...)` return."""

    election: str
    confirmed_within: float | None = None
    on_follower: int = 0
    """Status for those who do not lead; 0 lets them pass."""

    def __post_init__(self) -> None:
        check_name(self.election)
        check_timeout(self.confirmed_within, what="confirmed_within", zero=False)

    async def __call__(self) -> LeaderElection:
        election = await known_election(self.election)
        if self.on_follower and not self.confirmed(election):
            raise self.refusal(election)
        return election

    def confirmed(self, election: LeaderElection) -> bool:
        """Whether this worker leads, and the backend said so lately."""
        within = election.config.renew_deadline if self.confirmed_within is None else self.confirmed_within
        return election.is_leader_confirmed_within(within)

    def refusal(self, election: LeaderElection) -> Exception:
        """The answer of those who do not lead."""
        error = NotLeaderError(f"election {election.name!r}: this worker does not lead; try another one")
        return as_answer(error, status=self.on_follower, retry_after=math.ceil(election.config.retry_interval))


async def known_election(name: str) -> LeaderElection:
    """The election of that name in the current app. One that nobody mentioned before starts now, and is waited for."""
    micro = current_micro()
    known = micro.elections.get(name)
    election = known or micro.election(name)
    if known is None:
        await election.wait_for_record()
    return election


def election(name: str = "default") -> ElectionDependency:
    """The election of that name, whoever leads: `Annotated[LeaderElection, Depends(election("jobs"))]`."""
    return ElectionDependency(name)


def leader(
    name: str = "default", *, confirmed_within: float | None = None, on_follower: int = 503
) -> ElectionDependency:
    """The election of that name, on its leader only: `Annotated[LeaderElection, Depends(leader("jobs"))]`.

    Other workers answer with the status `on_follower`; so does a leader that the backend has not confirmed within
    `confirmed_within` seconds, by default its `renew_deadline`.
    """
    return ElectionDependency(name, confirmed_within, check_number("on_follower", on_follower))
