"""SQLite: leases in a file, for all the processes of one host. Nothing to install and no server to run."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from grel_core.errors import CoordinationBackendError
from grel_core.lease.backend import T
from grel_core.lease.names import Key
from grel_core.lease.rules import Advance, Rule
from grel_core.providers.base import Provider
from grel_core.providers.sqlite_file import File

BATCH = 256
"""Most rules that share one transaction."""


class Job(NamedTuple):
    """A rule on its way to the file, and who waits for its answer."""

    future: asyncio.Future[Any]
    key: Key
    rule: Rule[Any]


class SQLiteProvider(Provider):
    """Leases in the file `path`, shared by all processes of a host.

    Without one, the variable `SQLITE_PATH` with `env_prefix` in front says which, or it is `grel.db`.

    The host's monotonic clock decides, so that stepping the wall clock changes nothing; after a reboot all leases have
    lapsed. Not for network file systems. One thread owns the one connection; rules that arrive while it is busy share
    the next transaction.
    """

    scope = "host"
    variables = ("SQLITE_PATH",)

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        prefix: str = "grel",
        backend_timeout: float = 5.0,
        retention: float = 60.0,
        memory_retention: float = 30 * 86_400.0,
        env_prefix: str = "",
    ) -> None:
        super().__init__(
            prefix=prefix, backend_timeout=backend_timeout, retention=retention, memory_retention=memory_retention
        )
        given = os.fspath(path) if path is not None else os.environ.get(f"{env_prefix}SQLITE_PATH") or "grel.db"
        if ":memory:" in given or not given:
            raise ValueError("SQLiteProvider needs a file that several processes can open; for one use MemoryProvider")
        self.path = Path(given).absolute()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def identity(self) -> Any:
        return type(self), self.path.resolve(), self.prefix

    def transient(self, error: BaseException) -> bool:
        return super().transient(error) or isinstance(error, sqlite3.OperationalError)

    async def _open(self) -> None:
        self._jobs = SimpleQueue()
        opened: asyncio.Future[None] = self.loop.create_future()
        # A daemon, since a program may end without closing this; SQLite bears a commit that is cut off.
        self._thread = threading.Thread(target=self._work, args=(opened, self._jobs), name="grel-sqlite", daemon=True)
        self._thread.start()
        try:
            await asyncio.shield(opened)
        except sqlite3.Error as error:
            raise CoordinationBackendError(f"{self.path} cannot be used for leases: {error}") from error
        except asyncio.CancelledError:
            self._jobs.put(None)
            raise

    async def _close(self) -> None:
        self._jobs.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        loop = self.check_loop()
        future: asyncio.Future[T] = loop.create_future()
        timer = loop.call_later(self.backend_timeout, _expire, future)
        self._jobs.put(Job(future, key, rule))
        try:
            return await future
        finally:
            timer.cancel()

    async def listen(self) -> bool:
        # The worker may be blocked on an empty queue: wake it, so that it sees that someone watches.
        self._jobs.put(Job(self.loop.create_future(), Key("", ""), _NOTHING))
        return True

    # The worker: everything below runs in its thread, but for what is called through `_tell`.

    def _work(self, opened: asyncio.Future[None], jobs: "SimpleQueue[Job | None]") -> None:
        try:
            file = self._file()
        except BaseException as error:  # noqa: BLE001 - handed to the one who opens
            self._tell(_settle, [(opened, None, error)])
            return
        self._tell(_settle, [(opened, None, None)])
        try:
            while (batch := self._next(file, jobs)) is not None:
                if batch:
                    self._tell(_settle, self._run(file, batch))
        finally:
            file.close()

    def _file(self) -> File:
        """The file to work on; tests put another clock in here."""
        return File(self.path, prefix=self.prefix, keep=self.keep, timeout=self.backend_timeout * 0.8)

    def _next(self, file: File, jobs: "SimpleQueue[Job | None]") -> list[Job] | None:
        """The jobs that wait, possibly none; meanwhile look for changes if someone watches. None: stop."""
        try:
            job = jobs.get(timeout=self.watches.pace())
        except Empty:
            watched = self.watches.keys()
            with suppress(sqlite3.Error, OSError):  # only a hint: whoever waits asks again in any case
                if changed := file.changed(watched):
                    self._tell(self._wake, changed)
            return []
        batch: list[Job] = []
        while job is not None:
            if job.rule is not _NOTHING:
                batch.append(job)
            if jobs.empty() or len(batch) == BATCH:
                return batch
            job = jobs.get()
        if batch:
            jobs.put(None)  # for the next round, once this batch is answered
        return batch or None

    def _run(self, file: File, batch: list[Job]) -> list[tuple[asyncio.Future[Any], Any, BaseException | None]]:
        """Run all of `batch` in as few transactions as its durability allows."""
        settled: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        try:
            durable = any(isinstance(job.rule, Advance) for job in batch)
            answers, woken = file.run([(job.key, job.rule) for job in batch], durable=durable)
        except BaseException as error:  # noqa: BLE001 - handed to the callers; the worker must outlive it
            if len(batch) > 1:
                # One rule that cannot be kept must not fail the strangers that it shares a transaction with.
                return [answer for job in batch for answer in self._run(file, [job])]
            return [(job.future, None, error) for job in batch]
        settled.extend((job.future, answer, None) for job, answer in zip(batch, answers, strict=True))
        if woken:
            self._tell(self._wake, woken)
        return settled

    def _wake(self, keys: list[Key]) -> None:
        for key in keys:
            self.watches.wake(key)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function` on the event loop, if there still is one."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function, *args)

    def __repr__(self) -> str:
        return f"<SQLiteProvider {str(self.path)!r}>"


class _Nothing(Rule[None]):
    """Only wakes the worker."""

    def __call__(self, record: Any, at: Any) -> Any:
        raise NotImplementedError


_NOTHING = _Nothing()


def _settle(answers: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, answer, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(TimeoutError("SQLite did not answer in time"))
