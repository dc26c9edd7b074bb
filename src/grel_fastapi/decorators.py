"""`@leader_only`: a function that only the leader runs, in a route or anywhere else."""

import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast, overload

import anyio.from_thread

from grel_core.coordination import LeaderElection
from grel_core.errors import NotLeaderError
from grel_core.lease.names import check_name
from grel_fastapi.binding import current_micro
from grel_fastapi.dependencies import OnLost, check_lead, known_election
from grel_fastapi.responses import LEADERSHIP_LOST, answering
from grel_fastapi.routes import signature_of

logger = logging.getLogger("grel")
F = TypeVar("F", bound=Callable[..., Any])

GUARD = "__grel_guard__"
"""On a guarded function: what guards it."""
GUARDED = "__grel_guarded__"
"""On a function that has a guarded twin: a route that calls it directly passes the guard by."""


@dataclass(frozen=True)
class LeaderOnly:
    """What `leader_only(...)` was told."""

    election: str
    confirmed_within: float | None
    on_follower: int
    otherwise: Literal["raise", "skip"]
    on_lost: OnLost

    def __call__(self, function: F) -> F:
        """`function`, guarded; of the same kind: async stays async, and a plain one is not run on the event loop."""
        guarded: Any
        if inspect.isasyncgenfunction(function):
            guarded = _guard_iterator(function, self)
        elif inspect.iscoroutinefunction(function):
            guarded = _guard_async(function, self)
        elif inspect.isgeneratorfunction(function):
            raise TypeError(f"leader_only cannot guard {function.__qualname__}, a generator; make it an async one")
        else:
            guarded = _guard_plain(function, self)
        # Evaluated here, where the names of the function's own module are known.
        guarded.__signature__ = signature_of(function)
        annotations = {name: one.annotation for name, one in guarded.__signature__.parameters.items()}
        guarded.__annotations__ = {name: one for name, one in annotations.items() if one is not inspect.Parameter.empty}
        setattr(guarded, GUARD, self)
        if inspect.isfunction(function):
            setattr(function, GUARDED, True)
        return cast(F, guarded)

    def admits(self, election: LeaderElection, function: Callable[..., Any]) -> bool:
        """Whether `function` may run now; False skips it. Raises `NotLeaderError` where that was not asked for."""
        try:
            check_lead(election, self.confirmed_within, self.on_follower)
        except NotLeaderError:
            if self.otherwise == "raise":
                raise
            logger.info("%s was skipped: this worker does not lead %r", function.__qualname__, election.name)
            return False
        return True

    @asynccontextmanager
    async def term(self, election: LeaderElection, fence: int | None) -> AsyncIterator[None]:
        """Run the body in the term of office with the fencing token `fence`, and no longer."""
        with answering(NotLeaderError, LEADERSHIP_LOST):
            self.check(election, fence)
            async with election.guard() if self.on_lost == "cancel" else nullcontext():
                yield
            self.check(election, fence)

    def check(self, election: LeaderElection, fence: int | None) -> None:
        """Raise `NotLeaderError` if that term is over, and that matters."""
        if self.on_lost != "ignore" and election.fencing_token != fence:
            raise NotLeaderError(f"election {election.name!r}: the lead was lost while the work ran")


def _guard_async(function: Callable[..., Any], guard: LeaderOnly) -> Callable[..., Any]:
    @wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        election = await known_election(guard.election)
        if not guard.admits(election, function):
            return None
        async with guard.term(election, election.fencing_token):
            return await function(*args, **kwargs)

    return run


def _guard_iterator(function: Callable[..., Any], guard: LeaderOnly) -> Callable[..., Any]:
    @wraps(function)
    async def run(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        election = await known_election(guard.election)
        if not guard.admits(election, function):
            return
        fence, end = election.fencing_token, object()
        async with aclosing(function(*args, **kwargs)) as items:
            while True:
                # Each step by itself: the steps of an iterator need not be taken by one task.
                async with guard.term(election, fence):
                    item = await anext(items, end)
                if item is end:
                    return
                yield item

    return run


def _guard_plain(function: Callable[..., Any], guard: LeaderOnly) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        election = current_micro().elections.get(guard.election)
        if election is None:
            election = anyio.from_thread.run(known_election, guard.election)
        if not guard.admits(election, function):
            return None
        fence = election.fencing_token
        with answering(NotLeaderError, LEADERSHIP_LOST), election.working():
            result = function(*args, **kwargs)
            guard.check(election, fence)
        return result

    return run


@overload
def leader_only(function: F, /) -> F: ...


@overload
def leader_only(
    name: str = "default",
    /,
    *,
    confirmed_within: float | None = None,
    on_follower: int = 503,
    otherwise: Literal["raise", "skip"] = "raise",
    on_lost: OnLost = "cancel",
) -> Callable[[F], F]: ...


def leader_only(
    name: Any = "default",
    /,
    *,
    confirmed_within: float | None = None,
    on_follower: int = 503,
    otherwise: Literal["raise", "skip"] = "raise",
    on_lost: OnLost = "cancel",
) -> Any:
    """Let a function run on the leader of the election `name` only: put it *below* the route's decorator.

    Others answer with the status `on_follower`; so does a leader that the backend has not confirmed within
    `confirmed_within` seconds, by default its `renew_deadline`. Outside a route they raise, or with `otherwise="skip"`
    do nothing and return None: what a background task wants, whose error would stop the tasks behind it.

    When the lead is lost meanwhile, the answer is 503: `on_lost="cancel"` cancels an async function at once, `"error"`
    lets it end first, as a plain one always does, and `"ignore"` keeps its answer.

    Raises:
        NotLeaderError: from a call; also an HTTPException.
    """
    if callable(name):
        return leader_only("default")(name)
    return LeaderOnly(check_name(name), confirmed_within, on_follower, otherwise, on_lost)
