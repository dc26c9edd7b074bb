"""Lock: one caller at a time, on any worker."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, ParamSpec, Self, TypeVar
from uuid import UUID

from grel_core.config import checked, load_config
from grel_core.coordination.handle import LockHandle, failing_as
from grel_core.coordination.hold import check_timeout
from grel_core.coordination.leased import BaseLock, LockConfig
from grel_core.coordination.owner import thread
from grel_core.errors import LockAcquireError, LockOwnedCheckError, LockReleaseError
from grel_core.lease.names import LOCK, lock_name, placeholders
from grel_core.lease.protocols import LockBackend
from grel_core.lease.rules import Grant


class Lock(BaseLock[LockHandle]):
    """Mutual exclusion across workers, for as long as the lease lasts.

    `async with lock as handle:` waits for the lock and gives it back. `async with lock.hold() as handle:` does so too,
    and meanwhile renews the lease; it cancels the body the moment the lease is lost.

    A lock is held by a task (or, through `from_thread`, by a thread). Taking a name twice in one task raises instead
    of waiting for itself, whichever `Lock` object is used.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: the name or a duration is impossible.
    """

    kind: ClassVar[str] = LOCK
    handle_type = LockHandle

    def __init__(
        self,
        name: str,
        *,
        backend: LockBackend | str | None = None,
        worker: str | UUID | None = None,
        lease_duration: float | None = None,
        retry_interval: float | None = None,
        retry_jitter: float | None = None,
        env_prefix: str | None = None,
        env_load: bool | None = None,
    ) -> None:
        arguments = {
            "worker": worker,
            "lease_duration": lease_duration,
            "retry_interval": retry_interval,
            "retry_jitter": retry_jitter,
        }
        self._set(
            name,
            backend,
            load_config(LockConfig, "LOCK", name, arguments, env_prefix=env_prefix, env_load=env_load),
        )

    @classmethod
    def from_config(cls, name: str, config: LockConfig, *, backend: LockBackend | str | None = None) -> Self:
        """A lock with `config` as it is; the environment is not read."""
        lock = cls.__new__(cls)
        lock._set(name, backend, checked(LockConfig, config))
        return lock

    # The operations under the names of the reference: for the faces to build on, not to be called.

    async def do_acquire(self, token: str, *, duration: float) -> int | None:
        """Take the lock for `token`: its fencing token, or None."""
        with failing_as(LockAcquireError, self._what):
            answer = await self.store.take(self._key, token, duration, shared=self.shared)
        return answer.fence if isinstance(answer, Grant) else None

    async def do_release(self, token: str) -> bool:
        """Give back what `token` holds."""
        with failing_as(LockReleaseError, self._what):
            return await self.store.drop(self._key, token)

    async def do_owned(self, token: str) -> bool:
        """Whether `token` holds the lock."""
        with failing_as(LockOwnedCheckError, self._what):
            return await self.store.owned(self._key, token)

    async def do_thread_acquire(self, thread_id: int, *, timeout: float | None = None) -> LockHandle:
        """`acquire` on behalf of a thread."""
        return await self.acquire_for(thread(thread_id), check_timeout(timeout))

    async def do_thread_acquire_nowait(self, thread_id: int) -> LockHandle:
        """`acquire_nowait` on behalf of a thread."""
        return await self.acquire_for(thread(thread_id), 0)

    async def do_thread_extend(self, thread_id: int) -> LockHandle:
        """`extend` on behalf of a thread."""
        return await self.handle_of(thread(thread_id)).extend()

    async def do_thread_release(self, thread_id: int) -> None:
        """`release` on behalf of a thread."""
        await self.handle_of(thread(thread_id)).release()


P = ParamSpec("P")
R = TypeVar("R")


def locked(
    template: str, /, *, timeout: float | None = None, backend: LockBackend | str | None = None, **options: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function only while it holds a lock: `@locked("report:{day}")` above `async def report(day): ...`.

    Placeholders are filled from the arguments of each call. The lease is renewed while the function runs, and an
    async function is cancelled the moment it is lost. `options` are those of `Lock`. A plain function must be called
    from a worker thread, as with `from_thread`.

    Raises:
        TypeError: the function is a generator: its body would run after the lock was given back.
        ValueError: the template names something that the function does not take, or `options` are impossible.
        LockTimeoutError: from a call, when the lock was held elsewhere for `timeout` seconds.
    """
    fields = placeholders(template)
    check_timeout(timeout)
    Lock(lock_name(template, **dict.fromkeys(fields, "x")), backend=backend, **options)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__qualname__} is a generator; hold the lock inside of it")
        signature = inspect.signature(function)
        if missing := [field for field in fields if field not in signature.parameters]:
            raise ValueError(f"{function.__qualname__} takes no {missing[0]!r}, which the lock {template!r} needs")

        def lock(*args: P.args, **kwargs: P.kwargs) -> Lock:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            name = lock_name(template, **{field: call.arguments[field] for field in fields})
            return Lock(name, backend=backend, **options)

        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def hold(*args: P.args, **kwargs: P.kwargs) -> Any:
                async with lock(*args, **kwargs).hold(timeout=timeout):
                    return await function(*args, **kwargs)

            return hold  # type: ignore[return-value]  # an async function is a function that returns a coroutine

        @wraps(function)
        def hold_in_thread(*args: P.args, **kwargs: P.kwargs) -> R:
            with lock(*args, **kwargs).from_thread.hold(timeout=timeout):
                return function(*args, **kwargs)

        return hold_in_thread

    return decorate
