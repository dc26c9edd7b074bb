"""From a worker thread into the event loop, and back with the answer."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoopDeadlockError(RuntimeError):
    """The event loop was asked to wait for itself."""


def call_in_loop(loop: asyncio.AbstractEventLoop, body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `body` on `loop`, in the caller's context, and wait for its result in this thread.

    When the waiting thread is interrupted, the body is cancelled.

    Raises:
        EventLoopDeadlockError: called on the loop's own thread, which could never answer.
        RuntimeError: the loop is closed, before the call or during it.
    """
    if asyncio._get_running_loop() is loop:  # the documented twin of get_running_loop that does not raise
        raise EventLoopDeadlockError(
            "from_thread was called on the event loop that it would wait for; await the async method instead"
        )
    if loop.is_closed():
        raise RuntimeError("the event loop is closed; its app, and with it the backend, is gone")
    coroutine = body()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        while not concurrent.futures.wait([future], timeout=1).done:
            if loop.is_closed():
                raise RuntimeError("the event loop was closed before it answered")
        return future.result()
    except BaseException:
        if loop.is_closed():
            coroutine.close()
        else:
            future.cancel()
        raise
