"""Grelmicro: one object that opens, finds and closes everything."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import entry_points
from typing import Any, Self, TypeVar

from grel_core.component import Component, Openable, Task, bound, current_app, enter, leave
from grel_core.coordination.component import Coordination
from grel_core.coordination.drain import holders, settled
from grel_core.coordination.election import LeaderElection
from grel_core.coordination.leading import LeaderLoop
from grel_core.coordination.leased import LockPrimitive
from grel_core.coordination.scope import check_scope, declared_environment
from grel_core.errors import CoordinationBackendError, OutOfContextError
from grel_core.lease.backend import LeaseBackend, positive
from grel_core.providers.base import Provider
from grel_core.supervisor import Supervised

logger = logging.getLogger("grel")
A = TypeVar("A")
F = TypeVar("F", bound=Callable[[], Awaitable[Any]])

LAST_SHARE = 0.2
"""Share of `drain_timeout` that is kept for cancelled work to end in."""


class Grelmicro(Openable):
    """A service's coordination: `micro = Grelmicro(uses=[RedisProvider("redis://...")])`.

    `uses` takes providers, `Coordination` components, elections and other background tasks; a lone provider is enough
    for every primitive. Open it with `async with micro:`, or let a web framework do so: `micro.install(app)`.

    Closing refuses new work from requests, waits up to `drain_timeout` seconds for those who hold something, resigns
    from every election, and then disconnects.

    `environment` (else the variable `GREL_ENVIRONMENT`) is one of development, test, staging and production. In the
    last two a backend that keeps its state in the process is refused, unless `single_process` says that there is but
    one process.
    """

    def __init__(
        self,
        uses: Iterable[Any] = (),
        *,
        environment: str | None = None,
        single_process: bool = False,
        drain_timeout: float = 3.0,
    ) -> None:
        self.environment = declared_environment(environment)
        self.single_process = single_process
        self.drain_timeout = positive("drain_timeout", drain_timeout)
        self._providers: dict[Any, Provider] = {}
        """What `uses` named itself; a lone one of these fills every kind."""
        self._stores: dict[Any, Provider] = {}
        """Every provider, by the place that it stands for: each place is opened once."""
        self._components: dict[tuple[str, str], Component] = {}
        self._elections: dict[str, LeaderElection] = {}
        self._tasks: list[Task] = []
        self._overrides: list[dict[tuple[str, str], Component]] = []
        self._wired = False
        self._forget()
        if not isinstance(uses, Iterable):
            raise TypeError(f"uses= takes a list, as in uses=[{type(uses).__name__}(...)]")
        for item in uses:
            self.use(item)

    def _forget(self) -> None:
        super()._forget()
        self.draining = False
        self._stack = AsyncExitStack()
        self._supervised: list[Supervised] = []
        self._launched = False
        self._resigning: asyncio.Task[None] | None = None
        self._deadline = 0.0

    # What it is made of.

    def use(self, item: Any) -> Self:
        """Add a provider, a component, an election or another background task, or a class of one.

        Raises:
            TypeError: it is none of these.
            ValueError: there is one of that kind and name already.
            CoordinationBackendError: it would have to be opened, and the app is open already.
        """
        item = item() if isinstance(item, type) else item
        if self._loop is not None and not isinstance(item, Task):
            raise CoordinationBackendError(f"the app is open already; add {item!r} before, or use override() in tests")
        self._wired = False
        if isinstance(item, Provider):
            item = self._stores.setdefault(item.identity(), item)
            self._providers[item.identity()] = item
        elif isinstance(item, LeaderElection):
            self._add_election(item)
        elif isinstance(item, LockPrimitive):
            raise TypeError(f"{item!r} is no part of an app: it finds the current app by itself")
        elif isinstance(item, Component):
            if (item.kind, item.name) in self._components:
                raise ValueError(f"there is a {item.kind} named {item.name!r} already; give this one another name=")
            self._components[item.kind, item.name] = item
        elif isinstance(item, Task):
            self._tasks.append(item)
            self._start(item)
        else:
            raise TypeError(
                f"{type(item).__name__} is no provider, component or task; a backend goes into Coordination(lock=...)"
            )
        return self

    def _add_election(self, election: LeaderElection) -> LeaderElection:
        if (known := self._elections.get(election.name)) is None:
            self._elections[election.name] = election
            self._start(election)
        elif known is not election:
            raise ValueError(f"there is an election named {election.name!r} already; micro.election(name) shares it")
        return election

    def election(self, name: str = "default") -> LeaderElection:
        """The election of that name, made on first mention; it runs with the app."""
        return self._elections.get(name) or self._add_election(LeaderElection(name))

    @property
    def elections(self) -> Mapping[str, LeaderElection]:
        """Every election of this app."""
        return dict(self._elections)

    def leader_loop(self, name: str = "default", *, every: float) -> Callable[[F], F]:
        """Run an async function again and again, `every` seconds apart, on the leader of the election `name` only.

        It is cancelled the moment the lead is lost, and awaited when the app closes. What it raises is logged, and
        the loop goes on.
        """
        positive("every", every)
        election = self.election(name)

        def register(function: F) -> F:
            self.use(LeaderLoop(election, function, every))
            return function

        return register

    def get(self, kind: str, name: str = "default") -> Any:
        """The component of that kind and name.

        Raises:
            CoordinationBackendError: there is none.
        """
        self._wire()
        for components in (*reversed(self._overrides), self._components):
            if (kind, name) in components:
                return components[kind, name]
        several = f" and {len(self._providers)} providers" if len(self._providers) > 1 else ""
        raise CoordinationBackendError(f"the app has no {kind} named {name!r}{several}; add Coordination(provider)")

    @property
    def coordination(self) -> Coordination:
        """The default coordination component; errors as `get`."""
        component: Coordination = self.get("coordination")
        return component

    def _wire(self) -> None:
        """Let a lone provider fill what nothing else fills, and let equal providers be one."""
        if self._wired:
            return
        self._wired = True
        lone = list(self._providers.values()) if len(self._providers) == 1 else []
        if lone:
            self._components.setdefault(("coordination", "default"), Coordination())
        for coordination in self._coordinations:
            for provider in lone:
                coordination.adopt(provider)
            coordination.replace_stores(lambda store: self._stores.setdefault(store.identity(), store))

    @property
    def _coordinations(self) -> list[Coordination]:
        return [component for component in self._components.values() if isinstance(component, Coordination)]

    @property
    def stores(self) -> list[LeaseBackend]:
        """Every place where this app keeps something."""
        self._wire()
        used = [store for coordination in self._coordinations for store in coordination.stores]
        return list(dict.fromkeys([*self._providers.values(), *used]))

    def describe(self) -> dict[str, Any]:
        """What the app is made of, for people; no secrets."""
        self._wire()
        return {
            "environment": self.environment,
            "components": [repr(component) for component in self._components.values()],
            "elections": sorted(self._elections),
            "tasks": [task.name for task in self._tasks],
            "started": self.started,
            "draining": self.draining,
        }

    @classmethod
    def current(cls) -> "Grelmicro":
        """The app in whose scope this code runs.

        Raises:
            OutOfContextError: there is none, or several could be meant.
        """
        app = current_app()
        if not isinstance(app, cls):
            raise OutOfContextError(f"the current app is {app!r}, no {cls.__name__}")
        return app

    @asynccontextmanager
    async def override(self, *components: Component) -> AsyncIterator[Self]:
        """Put `components` in the place of those of the same kind and name while the body runs, for tests."""
        layer = {(component.kind, component.name): component for component in components}
        async with AsyncExitStack() as stack:
            for component in components:
                await stack.enter_async_context(component)
            self._overrides.append(layer)
            for election in self._elections.values():
                election.hint()
            try:
                yield self
            finally:
                self._overrides.remove(layer)
                # Before the places of `components` close: a lease that is left there would only run out.
                await asyncio.gather(*(election.move() for election in self._elections.values()))

    def install(self, app: A, **options: Any) -> A:
        """Open and close this together with a web app, and make it the current one in every request of it.

        Call it where the app is made, before it starts; again is harmless. `options` are those of the framework's
        plugin. Returns `app`.

        Raises:
            RuntimeError: the app has started, another Grelmicro is installed on it, or no plugin knows it.
        """
        plugins = entry_points(group="grel_core.frameworks")
        for plugin in plugins:
            installed = plugin.load()(self, app, **options)
            if installed is not None:
                return app
        known = ", ".join(plugin.name for plugin in plugins) or "none; install grel-fastapi[fastapi]"
        raise RuntimeError(f"no plugin can install on {type(app).__name__}; known frameworks: {known}")

    # Being open.

    @property
    def started(self) -> bool:
        """Whether it is open, all of it."""
        return self._is_open

    @property
    def supervised(self) -> list[Supervised]:
        """The background tasks that run right now."""
        return list(self._supervised)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        enter(self)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        leave(self)
        try:
            await super().__aexit__(*exc_info)
        except Exception as error:
            if not any(exc_info):
                raise
            logger.warning("closing failed (%s), with another error on its way", type(error).__name__)

    async def _open(self) -> None:
        if not self.single_process:
            check_scope(self.stores, self.environment)
        async with AsyncExitStack() as stack:
            for provider in self._providers.values():
                await stack.enter_async_context(provider)
            for component in self._components.values():
                await stack.enter_async_context(component)
            with bound(self):
                for election in self._elections.values():
                    _ = election.backend  # one that is kept nowhere would only crash in the background
            stack.push_async_callback(self._end_work)
            self._launched = True
            for work in (*self._elections.values(), *self._tasks):
                self._start(work)
            # One turn of the loop, so that every election counts as running before anybody asks it to lead.
            await asyncio.sleep(0)
            self._stack = stack.pop_all()

    def _start(self, work: Task) -> None:
        """Run `work` now if the app is open already; else opening it does."""
        if self._launched and not self.draining:
            with bound(self):
                self._supervised.append(Supervised(work))

    def begin_shutdown(self) -> None:
        """Take no new work from requests, and resign from every election for good.

        For a signal handler to schedule on the app's event loop, long before the server gets round to closing the app.
        """
        if self._loop is None:
            return
        self.draining = True
        for store in self.stores:
            store.watches.wake_all()
            store.lines.wake_all()
        if self._resigning is None:
            with bound(self):
                self._resigning = self._loop.create_task(self._resign(), name="grel: resign")

    async def _resign(self) -> None:
        """Step down everywhere at once, and stay out."""
        running = [election for election in self._elections.values() if election.is_running()]
        within = self.drain_timeout * (1 - LAST_SHARE)
        ended = await asyncio.gather(
            *(e.step_down(stay_out=math.inf, within=within) for e in running), return_exceptions=True
        )
        for election, error in zip(running, ended, strict=True):
            if isinstance(error, BaseException):
                logger.warning("%r could not step down: %s", election, type(error).__name__)

    async def _drain(self) -> None:
        self._deadline = self.loop.time() + self.drain_timeout
        self.begin_shutdown()
        await settled(self.stores, self._deadline - self.drain_timeout * LAST_SHARE)

    async def _end_work(self) -> None:
        """Cancel what holds something still, and what runs in the background; wait for it until the deadline.

        What a thread holds, or work that does not end, keeps its lease until it runs out: it may still be at work.
        """
        late = {owner for owner, _ in holders(self.stores) if isinstance(owner, asyncio.Task)}
        if late:
            logger.warning("shutting down: %d tasks still held a lock and were cancelled", len(late))
        late |= {supervised.task for supervised in self._supervised}
        for task in late:
            task.cancel()
        late |= {self._resigning} if self._resigning else set()
        if late:
            _, late = await asyncio.wait(late, timeout=max(self._deadline - self.loop.time(), 0.01))
        for task in late:
            logger.warning("shutting down: %s does not end", task.get_name())
        for _, handle in holders(self.stores):
            logger.warning("shutting down: %r is still held; its lease is left to run out", handle)

    async def _close(self) -> None:
        await self._stack.aclose()
