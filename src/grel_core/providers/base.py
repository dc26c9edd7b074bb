"""What every provider is: a store, and the faces through which each kind of coordination meets it."""

import os
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit, urlunsplit

from grel_core.errors import CoordinationBackendError, GrelmicroError
from grel_core.lease.adapters import LeaderElectionAdapter, LockAdapter, ReadWriteLockAdapter, ScheduleAdapter
from grel_core.lease.backend import LeaseBackend, describe, logger
from grel_core.lease.names import Key
from grel_core.lease.rules import Busy, Grant


class Provider(LeaseBackend):
    """A place where coordination is kept: give it to `Grelmicro(uses=[...])` or to `Coordination(...)`.

    Inside an app, providers of one `identity()` share one connection: that of the one that comes first.
    """

    variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables that give the address when no argument does, the first one set wins."""

    def lock(self) -> LockAdapter:
        """The lock backend."""
        return LockAdapter(self)

    def readwritelock(self) -> ReadWriteLockAdapter:
        """The read-write lock backend."""
        return ReadWriteLockAdapter(self)

    def leaderelection(self) -> LeaderElectionAdapter:
        """The election backend."""
        return LeaderElectionAdapter(self)

    def schedule(self) -> ScheduleAdapter:
        """The schedule backend."""
        return ScheduleAdapter(self)

    def identity(self) -> Any:
        """What makes two providers one and the same place; equal and hashable, or unique to this object."""
        return id(self)

    async def _reach(self, connect: Callable[[], Awaitable[object]]) -> None:
        """Connect for the first time. A store that cannot be reached right now does not keep the app from starting.

        A web server that loses a worker in its start-up stops all of them: a short outage of the store and the restart
        of one worker would take the whole service down.

        Raises:
            CoordinationBackendError: it was reached, and cannot be used.
        """
        try:
            await connect()
        except GrelmicroError:
            raise
        except Exception as error:
            if not self.transient(error):
                raise CoordinationBackendError(f"{self!r} cannot be used for leases: {describe(error)}") from error
            logger.warning(
                "%r cannot be reached yet (%s): the app starts, and what needs it fails", self, describe(error)
            )
            self.failed()

    def _hear(self, text: str | None) -> None:
        """A message of the store: `Key.text` of what may be free, or None after a time in which some may be missed."""
        if text is None:
            self.watches.wake_all()
        else:
            _, kind, name = text.split(":", 2)
            self.watches.wake(Key(kind, unquote(name[1:-1])))

    @classmethod
    def from_environment(cls, what: str, env_prefix: str = "") -> str:
        """The address that the first set variable of `variables` gives, each with `env_prefix` in front.

        Raises:
            ValueError: none of them is set.
        """
        for variable in cls.variables:
            if value := os.environ.get(env_prefix + variable):
                return value
        known = " or ".join(env_prefix + variable for variable in cls.variables)
        raise ValueError(f"{cls.__name__} needs {what}: give it, or set {known}")


def granted(reply: list[int] | None) -> Grant | Busy | None:
    """What a server-side dialect answers to a verb that grants: nothing, 0 and how long, or 1 and the grant."""
    if reply is None:
        return None
    if not reply[0]:
        return Busy(reply[1])
    _, fence, lapsed, transitions = reply
    return Grant(fence, bool(lapsed), transitions)


def mask(url: str) -> str:
    """`url` as it may be shown: without password, user name or query."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    secret = "***@" if "@" in parts.netloc else ""
    return urlunsplit((parts.scheme, secret + place, parts.path, "", ""))
