"""`@leader_only`: a function that only the leader runs, in a route or anywhere else."""

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast, overload

import anyio.from_thread

from grel_core.coordination import LeaderElection
from grel_core.errors import NotLeaderError
from grel_fastapi.binding import current_micro
from grel_fastapi.dependencies import ElectionDependency, OnLost, check_choice, known_election, leader
from grel_fastapi.responses import LEADERSHIP_LOST, answering
from grel_fastapi.routes import signature_of

logger = logging.getLogger("grel")
F = TypeVar("F", bound=Callable[..., Any])

GUARD = "__grel_guard__"
"""On a guarded function: the lead that it wants."""
GUARDED = "__grel_guarded__"
"""On a function that has a guarded twin: a route that calls it directly passes the guard by."""


@dataclass(frozen=True)
class LeaderOnly:
    """What `leader_only(...)` was told."""

    lead: ElectionDependency
    otherwise: Literal["raise", "skip"]
    on_lost: OnLost

    def __post_init__(self) -> None:
        check_choice("otherwise", self.otherwise, "raise", "skip")
        check_choice("on_lost", self.on_lost, "cancel", "error", "ignore")

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
        vars(guarded).update({"__signature__": signature_of(function), GUARD: self.lead})
        if inspect.isfunction(function):
            setattr(function, GUARDED, True)
        return cast(F, guarded)

    @contextmanager
    def term(self, election: LeaderElection, function: Any, *, whole: bool = True) -> Iterator[int | None]:
        """Run the body, the work of `function`, in the term whose fencing token this gives; None skips it.

        A step-down waits for the `whole` body.
        """
        fence = None
        with ExitStack() as stack:
            with suppress(NotLeaderError):
                fence = stack.enter_context(election.working())
            if fence is None or not self.lead.confirmed(election):
                if self.otherwise == "raise":
                    raise self.lead.refusal(election)
                logger.info("%s was skipped: this worker does not lead %r", function.__qualname__, election.name)
                yield None
                return
            if not whole:
                stack.close()
            with answering(NotLeaderError, LEADERSHIP_LOST):
                yield fence
                self.check(election, fence)

    def step(self, election: LeaderElection, fence: int) -> AbstractAsyncContextManager[Any]:
        """What cancels its body when that term ends, if `on_lost` says so."""
        if self.on_lost != "cancel":
            return nullcontext()
        self.check(election, fence)
        return election.guard()

    def check(self, election: LeaderElection, fence: int) -> None:
        """Raise `NotLeaderError` if that term is over, and that matters."""
        if self.on_lost != "ignore" and election.fencing_token != fence:
            raise NotLeaderError(f"election {election.name!r}: the lead was lost while the work ran")


def _guard_async(function: Callable[..., Any], guard: LeaderOnly) -> Callable[..., Any]:
    @wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        election = await known_election(guard.lead.election)
        with guard.term(election, function) as fence:
            if fence is None:
                return None
            async with guard.step(election, fence):
                return await function(*args, **kwargs)

    return run


def _guard_iterator(function: Callable[..., Any], guard: LeaderOnly) -> Callable[..., Any]:
    @wraps(function)
    async def run(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        election, end = await known_election(guard.lead.election), object()
        # One that is cancelled with the lead need not be waited for between its steps: there is no next one.
        with guard.term(election, function, whole=guard.on_lost != "cancel") as fence:
            if fence is None:
                return
            async with aclosing(function(*args, **kwargs)) as items:
                while True:
                    # Each step by itself: the steps of an iterator need not be taken by one task.
                    async with guard.step(election, fence):
                        item = await anext(items, end)
                    if item is end:
                        return
                    yield item

    return run


def _guard_plain(function: Callable[..., Any], guard: LeaderOnly) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        election = current_micro().elections.get(guard.lead.election)
        if election is None:
            election = anyio.from_thread.run(known_election, guard.lead.election)
        with guard.term(election, function) as fence:
            return None if fence is None else function(*args, **kwargs)

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

    `confirmed_within` and `on_follower` are those of `leader`. Outside a route, workers that do not lead raise, or with
    `otherwise="skip"` do nothing and return None: what a background task wants, whose error would stop the tasks behind
    it.

    When the lead is lost meanwhile, the answer is 503: `on_lost="cancel"` cancels an async function at once, `"error"`
    lets it end first, as a plain one always does, and `"ignore"` keeps its answer. A step-down waits for what is not
    cancelled.

    Raises:
        NotLeaderError: from a call; also an HTTPException.
    """
    if callable(name):
        return leader_only("default")(name)
    return LeaderOnly(leader(name, confirmed_within=confirmed_within, on_follower=on_follower), otherwise, on_lost)
