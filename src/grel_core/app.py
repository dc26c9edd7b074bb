"""Grelmicro: one object that opens, finds and closes everything."""

import asyncio
import logging
import math
import multiprocessing
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import entry_points
from typing import Any, Self, TypeVar

from grel_core.component import Component, Task, bound, current_app
from grel_core.coordination.component import Coordination
from grel_core.coordination.drain import drain
from grel_core.coordination.election import LeaderElection
from grel_core.coordination.leading import LeaderLoop
from grel_core.errors import CoordinationBackendError, OutOfContextError
from grel_core.lease.adapters import Adapter
from grel_core.lease.backend import LeaseBackend, positive
from grel_core.providers.base import Provider
from grel_core.supervisor import Supervised

logger = logging.getLogger("grel")
A = TypeVar("A")
F = TypeVar("F", bound=Callable[[], Awaitable[Any]])

ENVIRONMENTS = ("development", "test", "staging", "production")


class Grelmicro:
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
        self.environment = environment or os.environ.get("GREL_ENVIRONMENT") or "development"
        if self.environment not in ENVIRONMENTS:
            raise ValueError(f"environment {self.environment!r} is unknown; use one of {', '.join(ENVIRONMENTS)}")
        self.single_process = single_process
        self.drain_timeout = positive("drain_timeout", drain_timeout)
        self.draining = False
        self._providers: dict[Any, Provider] = {}
        """What `uses` named itself; a lone one of these fills every kind."""
        self._stores: dict[Any, Provider] = {}
        """Every provider, by the place that it stands for: each place is opened once."""
        self._components: dict[tuple[str, str], Component] = {}
        self._elections: dict[str, LeaderElection] = {}
        self._tasks: list[Task] = []
        self._overrides: list[dict[tuple[str, str], Component]] = []
        self._wired = False
        self._reset()
        for item in uses:
            self.use(item)

    def _reset(self) -> None:
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Future[None] | None = None
        self._stack = AsyncExitStack()
        self._supervised: list[Supervised] = []
        self._resigning: asyncio.Task[None] | None = None
        self._scopes: list[Any] = []

    # What it is made of.

    def use(self, item: Any) -> Self:
        """Add a provider, a component, an election or another background task, or a class of one.

        Raises:
            TypeError: it is none of these.
            ValueError: there is one of that kind and name already.
        """
        item = item() if isinstance(item, type) else item
        self._wired = False
        if isinstance(item, Provider):
            item = self._stores.setdefault(item.identity(), item)
            self._providers[item.identity()] = item
        elif isinstance(item, LeaderElection):
            self._add_election(item)
        elif isinstance(item, Adapter):
            raise TypeError(f"{item!r} is a backend of one kind; say which, as in Coordination(lock=...)")
        elif isinstance(item, Component):
            if (item.kind, item.name) in self._components:
                raise ValueError(f"there is a {item.kind} named {item.name!r} already; give this one another name=")
            self._components[item.kind, item.name] = item
        elif isinstance(item, Task):
            self._tasks.append(item)
            self._start(item)
        else:
            raise TypeError(f"{type(item).__name__} is no provider, component or task")
        return self

    def _add_election(self, election: LeaderElection) -> LeaderElection:
        if self._elections.setdefault(election.name, election) is not election:
            raise ValueError(
                f"there is an election named {election.name!r} already; use micro.election(name) to share it"
            )
        self._start(election)
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
        raise CoordinationBackendError(f"the app has no {kind} named {name!r}; add one with micro.use(...)")

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
        coordinations = [item for item in self._components.values() if isinstance(item, Coordination)]
        if len(self._providers) == 1:
            (provider,) = self._providers.values()
            if ("coordination", "default") not in self._components:
                coordinations.append(Coordination())
                self._components["coordination", "default"] = coordinations[-1]
            for coordination in coordinations:
                coordination.adopt(provider)
        for coordination in coordinations:
            coordination.replace_stores(lambda store: self._stores.setdefault(store.identity(), store))

    @property
    def stores(self) -> list[LeaseBackend]:
        """Every place where this app keeps something."""
        self._wire()
        coordinations = [item for item in self._components.values() if isinstance(item, Coordination)]
        used = [backend.store for item in coordinations for backend in item.backends if isinstance(backend, Adapter)]
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
            raise OutOfContextError(f"the current app is no {cls.__name__}")
        return app

    @asynccontextmanager
    async def override(self, *components: Component) -> AsyncIterator[Self]:
        """Put `components` in the place of those of the same kind and name while the body runs, for tests."""
        layer = {(component.kind, component.name): component for component in components}
        async with AsyncExitStack() as stack:
            for component in components:
                await stack.enter_async_context(component)
            self._overrides.append(layer)
            stack.callback(self._overrides.remove, layer)
            yield self

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
        return self._opened is not None and self._opened.done() and not self._opened.cancelled()

    @property
    def supervised(self) -> list[Supervised]:
        """The background tasks that run right now."""
        return list(self._supervised)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self._users and self._loop is not loop:
            raise RuntimeError("this Grelmicro is open on another event loop; close it there, or use a second one")
        self._users += 1
        if self._users == 1:
            self._loop, self._opened = loop, loop.create_future()
            try:
                await self._open()
            except BaseException:
                self._reset()
                raise
            self._opened.set_result(None)
        elif self._opened is not None:
            await asyncio.shield(self._opened)
        self._scopes.append(bound(self))
        self._scopes[-1].__enter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._scopes.pop().__exit__(None, None, None)
        self._users -= 1
        if self._users:
            return
        try:
            await self._drain()
        finally:
            try:
                await self._stack.aclose()
            finally:
                self._reset()
                self.draining = False

    async def _open(self) -> None:
        self.draining = False
        self._check_scope()
        async with AsyncExitStack() as stack:
            for provider in self._providers.values():
                await stack.enter_async_context(provider)
            for component in self._components.values():
                await stack.enter_async_context(component)
            self._stack = stack.pop_all()
        for work in (*self._elections.values(), *self._tasks):
            self._launch(work)
        # One turn of the loop, so that every election counts as running before anybody asks it to lead.
        await asyncio.sleep(0)

    def _start(self, work: Task) -> None:
        """Run `work` now if the app is open already; else opening it does."""
        if self.started and not self.draining:
            self._launch(work)

    def _launch(self, work: Task) -> None:
        with bound(self):
            self._supervised.append(Supervised(work))

    def begin_shutdown(self) -> None:
        """Take no new work from requests, and resign from every election for good.

        For a signal handler to schedule on the app's event loop, long before the server gets round to closing the app.
        """
        self.draining = True
        for store in self.stores:
            store.watches.wake_all()
        if self._resigning is None and self._loop is not None:
            with bound(self):
                self._resigning = self._loop.create_task(self._resign(), name="grel: resign")

    async def _resign(self) -> None:
        """Step down everywhere at once, and stay out."""
        running = [election for election in self._elections.values() if election.is_running()]
        ended = await asyncio.gather(*(e.step_down(stay_out=math.inf) for e in running), return_exceptions=True)
        for election, error in zip(running, ended, strict=True):
            if isinstance(error, BaseException):
                logger.warning("%r could not step down: %s", election, type(error).__name__)

    async def _drain(self) -> None:
        self.begin_shutdown()
        await drain(self.stores, self.drain_timeout)
        if self._resigning is not None:
            await self._resigning
        tasks = [supervised.task for supervised in self._supervised]
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.drain_timeout)
            for task in late:
                logger.warning("shutting down: %s does not end", task.get_name())

    def _check_scope(self) -> None:
        local = [store for store in self.stores if store.scope == "process"]
        if not local or self.single_process:
            return
        if self.environment in {"staging", "production"}:
            raise CoordinationBackendError(
                f"{local[0]!r} keeps its state in one process, and the environment is {self.environment}; use Redis, "
                "PostgreSQL or SQLite, or say Grelmicro(single_process=True) if there is but one process"
            )
        if _several_workers():
            logger.warning(
                "%r keeps its state in one process, and there are several workers: each has its own", local[0]
            )


def _several_workers() -> bool:
    """Whether this looks like one of several worker processes of a web server."""
    concurrency = os.environ.get("WEB_CONCURRENCY", "")
    return multiprocessing.parent_process() is not None or (concurrency.isdigit() and int(concurrency) > 1)
