"""From a worker thread into the event loop, and back with the answer."""

import asyncio
import concurrent.futures
import contextvars
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
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()
    started: list[asyncio.Task[T]] = []

    def finish(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            result.cancel()
            result.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            result.set_exception(error)
        else:
            result.set_result(task.result())

    def start() -> None:
        task = loop.create_task(body(), context=context)
        started.append(task)
        task.add_done_callback(finish)

    loop.call_soon_threadsafe(start)
    try:
        while not concurrent.futures.wait([result], timeout=1).done:
            if loop.is_closed():
                raise RuntimeError("the event loop was closed before it answered")
        return result.result()
    except BaseException:
        if not result.done() and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in started])
        raise
