"""What a client is told when coordination says no: problem+json (RFC 9457), with statuses that proxies understand."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketState

from grel_core import errors
from grel_core.errors import GrelmicroError

NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True)
class Problem:
    """How one kind of refusal is told."""

    slug: str
    """Stable name; the end of the problem's `type`."""
    status: int
    title: str
    close: int
    """What a WebSocket is closed with."""
    again: bool = True
    """Whether to say when to try again: not where the outcome of this try is unknown."""


LOCK_LOST = Problem("lock-lost", 500, "Lock was lost while the request was at work", 1011, again=False)
LEADERSHIP_LOST = Problem("leadership-lost", 503, "This worker stopped leading while it was at work", 1013)
PROBLEMS: Mapping[type[GrelmicroError], Problem] = {
    errors.WouldBlockError: Problem("lock-busy", 423, "Lock is held elsewhere", 1013),
    errors.LockTimeoutError: Problem("lock-timeout", 423, "Lock was held elsewhere for too long", 1013),
    errors.LockQueueFullError: Problem("lock-queue-full", 423, "Too many requests wait for the lock", 1013),
    errors.LockLostError: LOCK_LOST,
    errors.LockNotOwnedError: LOCK_LOST,
    errors.LockReleaseError: Problem("lock-not-released", 500, "Lock could not be given back", 1011, again=False),
    errors.LockBackendError: Problem("coordination-unavailable", 503, "Coordination is unavailable", 1013),
    errors.NotLeaderError: Problem("not-leader", 503, "This worker does not lead", 1013),
    errors.ShuttingDownError: Problem("shutting-down", 503, "This worker is shutting down", 1012),
}
"""Errors that a client may see. All others are mistakes of the program and stay a plain 500."""
SLUGS = {problem.slug for problem in (*PROBLEMS.values(), LEADERSHIP_LOST)}


def check_number(what: str, value: int, least: int = 400, most: float = 599) -> int:
    """Return `value` if it is a whole number in that range, which is that of statuses that refuse; else raise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is a whole number, not {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{what} is {value}; give a number from {least} to {most}")
    return value


class HTTPProblem(HTTPException):
    """The part of an error that makes it an answer, also in an app or a test that `install` never saw."""

    def __init__(self, problem: Problem, lock: str | None, status: int | None, retry_after: int | None) -> None:
        self.problem = problem
        self.lock = lock
        """The name as it stands in the program, `order:{order_id}`: never with its values."""
        self.chosen = status
        self.retry_after = (retry_after or random.randint(1, 3)) if problem.again else None
        headers = NO_STORE | ({"Retry-After": str(self.retry_after)} if self.retry_after else {})
        super().__init__(status or problem.status, problem.title, headers)


@lru_cache
def _mixed(kind: Any) -> Any:
    """The error class `kind` that is an `HTTPProblem` too.

    `kind` comes first, so that a user's handler for it is found before the one for `HTTPException`; the methods are
    repeated, since `kind` may have a builtin among its bases that would win over them.
    """
    own = {name: getattr(HTTPProblem, name) for name in ("__init__", "__str__", "__repr__")}
    return type(f"HTTP{kind.__name__}", (kind, HTTPProblem), own)


def as_answer(
    error: Exception,
    problem: Problem | None = None,
    *,
    lock: str | None = None,
    status: int | None = None,
    retry_after: int | None = None,
) -> Exception:
    """`error` as one that answers the request wherever it is raised; itself when it is not for clients."""
    problem = problem or next((PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS), None)
    if isinstance(error, HTTPProblem) or problem is None:
        return error
    kind: Any = type(error)
    answer: Exception = _mixed(kind)(problem, lock, status, retry_after)
    answer.__cause__ = error
    return answer


@contextmanager
def answering(
    kind: type[GrelmicroError] = GrelmicroError, problem: Problem | None = None, *, lock: str | None = None
) -> Iterator[None]:
    """Let errors of that kind leave the body as answers."""
    try:
        yield
    except kind as error:
        answer = as_answer(error, problem, lock=lock)
        if answer is error:
            raise
        raise answer from error


class Answers:
    """The exception handler that `install` registers."""

    def __init__(self, status: Mapping[str, int], base: str | None) -> None:
        if unknown := set(status) - SLUGS:
            raise ValueError(f"status= knows no {unknown.pop()!r}; its keys are {', '.join(sorted(SLUGS))}")
        self._status = {slug: check_number(f"the status of {slug!r}", value) for slug, value in status.items()}
        self._base = base or "urn:grel:problem:"

    async def __call__(self, connection: HTTPConnection, error: Exception) -> Any:
        """The response; None for a WebSocket that is closed instead."""
        answer = as_answer(error)
        if not isinstance(answer, HTTPProblem):
            raise error
        if not isinstance(connection, WebSocket):
            return self._response(connection, answer)
        connecting = connection.application_state is WebSocketState.CONNECTING
        if connecting and "websocket.http.response" in connection.scope.get("extensions", {}):
            return self._response(connection, answer)
        if connection.application_state is not WebSocketState.DISCONNECTED:
            await connection.close(answer.problem.close, answer.problem.slug)
        return None

    def _response(self, connection: HTTPConnection, answer: HTTPProblem) -> JSONResponse:
        problem = answer.problem
        status = answer.chosen or self._status.get(problem.slug, problem.status)
        body = {
            "type": self._base + problem.slug,
            "title": problem.title,
            "status": status,
            # Not from `connection.url`: a query that is no text would make that fail.
            "instance": quote(connection.scope["path"]),
            "retry_after": answer.retry_after,
            "lock": answer.lock,
        }
        headers = dict(answer.headers or {})
        if problem.slug == "shutting-down" and connection.scope.get("http_version", "2").startswith("1"):
            headers["Connection"] = "close"
        given = {member: value for member, value in body.items() if value is not None}
        return JSONResponse(given, status, headers, media_type="application/problem+json")
