"""Tie a task to something that it must not outlive."""

import asyncio
from types import TracebackType
from typing import Self

from grel_core.coordination.owner import current_task


class Tether:
    """Cancels the task that entered it once `cut` is called, and turns that cancellation into an error.

    A cancellation that comes from elsewhere passes untouched, also when both come at once.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._open = False
        self._cancelled = False

    def __enter__(self) -> Self:
        self._task = current_task()
        self._cancelling = self._task.cancelling()
        self._open = True
        return self

    def cut(self, error: BaseException) -> None:
        """Cancel the task; leaving the tether then raises `error`. Does nothing once the task has left."""
        if not self._open or self._error is not None:
            return
        self._error = error
        # A task that cuts its own tether is running: it hears of it from whatever it just called.
        if asyncio.current_task() is not self._task:
            self._cancelled = True
            self._task.cancel()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        if self._error is None or not self._cancelled:
            return
        ours = self._task.uncancel() <= self._cancelling
        if exc is None or (ours and isinstance(exc, asyncio.CancelledError)):
            raise self._error from exc
