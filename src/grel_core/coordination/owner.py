"""Who asks, a task of the event loop or a worker thread; what it holds; and what a claim of its is called."""

import asyncio
import secrets
import threading
from weakref import WeakKeyDictionary, WeakValueDictionary

from grel_core.component import Request, current_request


class ThreadOwner:
    """Stands for one worker thread and goes away with it: the ids of dead threads are used again, this is not."""


_local = threading.local()
_by_id: WeakValueDictionary[int, ThreadOwner] = WeakValueDictionary()
_unborn: WeakKeyDictionary[threading.Thread, ThreadOwner] = WeakKeyDictionary()
"""Owners of threads that never asked for themselves."""


def current_task() -> asyncio.Task[object]:
    """The running task.

    Raises:
        RuntimeError: no task is running.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a lock is held by a task; this callback runs in none, start one with `create_task`")
    return task


def current_thread() -> ThreadOwner | Request:
    """Who asks from a thread: the request that it serves, else the thread.

    A web framework runs the parts of one request in whichever threads are free: a `yield` dependency may take a lock in
    one and give it back in another, while the first one serves somebody else.
    """
    if (request := current_request()) is not None:
        return request
    owner: ThreadOwner | None = getattr(_local, "owner", None)
    if owner is None:
        owner = _local.owner = _unborn.pop(threading.current_thread(), None) or ThreadOwner()
        _by_id[threading.get_ident()] = owner
    return owner


def thread(thread_id: int) -> ThreadOwner:
    """The owner of the live thread with that id.

    Raises:
        ValueError: no thread has it.
    """
    if (owner := _by_id.get(thread_id)) is not None:
        return owner
    for thread in threading.enumerate():
        if thread.ident == thread_id:
            return _unborn.setdefault(thread, ThreadOwner())
    raise ValueError(f"no thread has the id {thread_id}")


def new_token(worker: str) -> str:
    """A secret name for one acquisition: unguessable, readable in front, never used twice."""
    return f"{worker}.{secrets.token_hex(16)}"


def identity(token: str) -> str:
    """The part of a token that may be shown."""
    return token.rpartition(".")[0] or "unknown"
