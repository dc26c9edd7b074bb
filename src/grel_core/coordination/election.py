"""LeaderElection: one worker plays a role, and another one takes over when it stops."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import ClassVar, Self, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from grel_core.component import current_app
from grel_core.config import Reconfigurable, checked, load_config
from grel_core.coordination.campaign import STOP_TIMEOUT, Campaign, LeaderElectionConfig
from grel_core.coordination.handle import finish
from grel_core.coordination.owner import current_task
from grel_core.coordination.term import Term
from grel_core.errors import NotLeaderError, WouldBlockError
from grel_core.lease.foreign import lease_backend
from grel_core.lease.names import ELECTION, Key, check_name
from grel_core.lease.protocols import LeaderElectionBackend, LeaderRecord

T = TypeVar("T")


class LeaderElection(Reconfigurable[LeaderElectionConfig]):
    """One leader among all workers that run this election.

    Give it to `Grelmicro(uses=[...])`, which runs it for as long as the app is open. A leader renews every
    `retry_interval`. Followers do not poll: they wake when the leader steps down, when its lease ends, and after half
    a lease at the latest; each of these refreshes `record`.

    `is_leader()` is a local opinion, `is_leader_confirmed_within(age)` is evidence, and `fencing_token` is the proof to
    pass along with writes.
    """

    kind: ClassVar[str] = ELECTION

    def __init__(
        self,
        name: str,
        *,
        backend: LeaderElectionBackend | str | None = None,
        worker: str | UUID | None = None,
        lease_duration: float | None = None,
        renew_deadline: float | None = None,
        retry_interval: float | None = None,
        retry_jitter: float | None = None,
        backend_timeout: float | None = None,
        error_interval: float | None = None,
        env_prefix: str | None = None,
        env_load: bool | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        arguments = {
            "worker": worker,
            "lease_duration": lease_duration,
            "renew_deadline": renew_deadline,
            "retry_interval": retry_interval,
            "retry_jitter": retry_jitter,
            "backend_timeout": backend_timeout,
            "error_interval": error_interval,
        }
        config = load_config(
            LeaderElectionConfig, "LEADERELECTION", name, arguments, env_prefix=env_prefix, env_load=env_load
        )
        self._set(name, backend, config, metadata)

    def _set(
        self,
        name: str,
        backend: LeaderElectionBackend | str | None,
        config: LeaderElectionConfig,
        metadata: Mapping[str, str] | None,
    ) -> None:
        self._name = check_name(name)
        if backend is not None and not isinstance(backend, str):
            lease_backend(backend, LeaderElectionBackend)
        self._backend = backend
        self._config = config
        self._metadata = dict(metadata or {})
        if not all(isinstance(text, str) for pair in self._metadata.items() for text in pair):
            raise TypeError(f"election {name!r}: metadata is text by text, as in {{'zone': 'b'}}")
        self._campaign = Campaign(self, Key(self.kind, name))
        self._inside: WeakKeyDictionary[object, list[AbstractContextManager[None]]] = WeakKeyDictionary()

    @classmethod
    def from_config(
        cls,
        name: str,
        config: LeaderElectionConfig,
        *,
        backend: LeaderElectionBackend | str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Self:
        """An election with `config` as it is; the environment is not read."""
        election = cls.__new__(cls)
        election._set(name, backend, checked(LeaderElectionConfig, config), metadata)
        return election

    @property
    def name(self) -> str:
        """What is led."""
        return self._name

    @property
    def identity(self) -> str:
        """Who this worker is to the others, as in `record.holder`."""
        return self._config.identity

    @property
    def record(self) -> LeaderRecord | None:
        """Who led when this worker last looked, by public identity; None before that, and when nobody led."""
        return self._campaign.record

    @property
    def metadata(self) -> Mapping[str, str]:
        """What is stored beside the lease while this worker leads, for others to read from `record`."""
        return self._metadata

    @property
    def backend(self) -> LeaderElectionBackend:
        """Where it is kept: the one given, else that of the current app, looked up at every access.

        Raises:
            OutOfContextError: no app is open here.
            CoordinationBackendError: the app keeps no elections under that name.
        """
        if self._backend is None or isinstance(self._backend, str):
            component = current_app().get("coordination", self._backend or "default")
            backend: LeaderElectionBackend = component.election_backend
            return backend
        return self._backend

    # What is known here.

    def is_running(self) -> bool:
        """Whether this worker takes part."""
        return self._campaign.running

    def is_leader(self) -> bool:
        """Whether this worker leads, as far as it knows: at most `renew_deadline` old."""
        return self._campaign.term is not None

    @property
    def fencing_token(self) -> int | None:
        """The token of this worker's lead, to pass along with writes; None while it does not lead."""
        term = self._campaign.term
        return term.fence if term else None

    def last_confirmation_age(self) -> float | None:
        """Seconds since the request went out by which the backend last confirmed the lead; None while not leading."""
        term = self._campaign.term
        return term.age if term else None

    def is_leader_confirmed_within(self, max_age: float) -> bool:
        """Whether this worker leads and the backend said so at most `max_age` seconds ago."""
        age = self.last_confirmation_age()
        return age is not None and age <= max_age

    def record_age(self) -> float | None:
        """Seconds since `record` was refreshed; None before the first time."""
        looked = self._campaign.looked
        return None if looked is None else asyncio.get_running_loop().time() - looked

    # Waiting, and working as the leader.

    async def wait_for_record(self) -> None:
        """Wait until this worker has looked who leads, at most `backend_timeout`."""
        try:
            async with asyncio.timeout(self._config.backend_timeout):
                while self._campaign.looked is None:
                    await self._campaign.change()
        except TimeoutError:
            return

    async def wait_for_leader(self) -> None:
        """Wait until this worker leads.

        Raises:
            NotStartedError: the election does not run here, so it never would.
        """
        await self._campaign.lead()

    async def wait_lose_leader(self) -> None:
        """Wait until this worker does not lead; at once if it does not now."""
        while self._campaign.term is not None:
            await self._campaign.change()

    async def lead(self, func: Callable[..., Awaitable[T]], /, *args: object, repeat: bool = False) -> T | None:
        """Wait for the lead, then run `func(*args)` as a task that is cancelled the moment the lead is lost.

        The result of `func`, or None when the lead was lost first. With `repeat`, it runs again, in this term or the
        next one, until the caller is cancelled. What `func` raises is raised here. Cancellation takes effect at the
        next `await` in `func`; fence what must never overlap.

        Raises:
            NotStartedError: the election does not run here.
        """
        while True:
            term = await self._campaign.lead()
            work = asyncio.get_running_loop().create_task(_call(func, args), name=f"grel: lead {self._name!r}")
            term.guard(work)
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                work.cancel()
                await finish(work)
                raise
            if not repeat or (work.cancelled() and not term.over):
                return None if work.cancelled() and term.over else work.result()
            if not work.cancelled():
                work.result()
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        self._enter(await self._campaign.lead())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside[current_task()].pop().__exit__(exc_type, exc, traceback)

    def _enter(self, term: Term) -> None:
        """Tie the running task to `term`, for the body that it is about to run."""
        tethered = term.tethered(f"election {self._name!r}")
        tethered.__enter__()
        self._inside.setdefault(current_task(), []).append(tethered)

    @contextmanager
    def working(self) -> Iterator[int]:
        """Let a step-down wait for the body, as for guarded work, but not cancel it. In any thread, on the leader.

        Gives the fencing token of the term that the body belongs to.

        Raises:
            NotLeaderError: on entering, when this worker does not lead.
        """
        if (term := self._campaign.term) is not None:
            with term.occupied():
                # Only now: in another thread the lead may be given away between the look and the registration.
                if term.leads:
                    yield term.fence
                    return
        raise NotLeaderError(f"election {self._name!r}: this worker does not lead; try another one")

    def guard(self) -> "LeaderGuard":
        """`async with election.guard():` runs its body only on the leader, and does not wait to become it.

        Raises:
            WouldBlockError: on entering, when this worker does not lead.
            NotLeaderError: the lead was lost while the body ran; it was cancelled.
        """
        return LeaderGuard(self)

    async def step_down(self, *, stay_out: float | None = None, within: float = STOP_TIMEOUT) -> bool:
        """Stop the guarded work, wait for it to end, then give the lead to whoever waits. False: it did not lead.

        The worker takes part again after `stay_out` seconds, by default one `retry_interval`. Work that does not end
        `within` so many seconds keeps the lease until it expires.
        """
        return await self._campaign.step_down(self._config.retry_interval if stay_out is None else stay_out, within)

    async def run(self) -> None:
        """Take part until cancelled; then stop the guarded work and give the lead back.

        Raises:
            RuntimeError: it runs already.
        """
        while True:
            await self._campaign.run()

    async def move(self) -> None:
        """Leave the backend that the election runs on, if another one is meant by now."""
        await self._campaign.move()

    def hint(self) -> None:
        """Look at once which backend is meant: that of the app may have been overridden."""
        self._campaign.hint()

    def overdue(self, now: float) -> float:
        """Seconds by which the loop is late to ask or renew, at loop time `now`; negative while it is not due."""
        return now - self._campaign.due

    def __repr__(self) -> str:
        return f"<LeaderElection {self._name!r} {'leading' if self.is_leader() else 'following'}>"


class LeaderGuard:
    """A body that only the leader runs; see `LeaderElection.guard`."""

    def __init__(self, election: LeaderElection) -> None:
        self._election = election

    async def __aenter__(self) -> LeaderElection:
        term = self._election._campaign.term
        if term is None:
            raise WouldBlockError(f"election {self._election.name!r}: this worker does not lead")
        self._election._enter(term)
        return self._election

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._election.__aexit__(exc_type, exc, traceback)


async def _call(func: Callable[..., Awaitable[T]], args: tuple[object, ...]) -> T:
    return await func(*args)
