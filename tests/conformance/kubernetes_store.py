"""The double of an API server, or a real one, and clients on clocks of their own that tests can move or stop."""

import os
import random
import secrets
from contextlib import ExitStack
from typing import Any

from grel_core.lease.backend import T
from grel_core.lease.names import Key
from grel_core.lease.rules import Instant, Peek, Rule
from grel_core.providers.kubernetes import KubernetesProvider, View
from grel_core.providers.kubernetes_api import Cluster
from tests.harness import Clock, Harness
from tests.kubernetes_server import KubernetesServer, kubernetes_server

REAL = os.environ.get("GREL_TEST_KUBECONFIG")
"""A cluster to use in the place of the double."""


class KubernetesClient(KubernetesProvider):
    """A provider whose clock began at a moment of its own: monotonic clocks have nothing in common."""

    def __init__(self, server: KubernetesServer | None, clock: Clock, **options: Any) -> None:
        super().__init__(None if server is None else "default", kubeconfig=REAL, **options)
        self.server, self.clock = server, clock
        self.began = random.randrange(10**12)
        self.used: set[Key] = set()

    def _cluster(self) -> Cluster:
        if self.server is None:
            return super()._cluster()
        return Cluster(self.server.url, {"Authorization": "Bearer secret"}, {}, "default")

    def _instant(self) -> Instant:
        now, wall = super()._instant()
        return self.clock.read(Instant(now + self.began, wall))

    def identity(self) -> Any:
        return id(self)

    def keep(self, key: Key) -> int:
        # Leases are vacated, never deleted: nothing is forgotten.
        return 2**62

    async def look(self, keys: set[Key]) -> None:
        """See what there is, if it is open."""
        for key in keys if self._is_open else ():
            await self.peek(key)

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        self.used.add(key)
        before = self._views.get(key, View())
        answer = await super().apply(key, rule)
        written = self._views.get(key, View()).writers != before.writers
        if self.clock.fixed is not None and written and not isinstance(rule, Peek) and random.random() < 0.5:
            del self._views[key]  # written just now, and seen by another process at the same instant
        return answer


class KubernetesStore(Harness):
    """A server of its own, or a share of a real one."""

    name = "kubernetes"
    reaps = False

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.prefix = f"t{secrets.token_hex(4)}"
        self.server: KubernetesServer | None = None
        self.clients: list[KubernetesClient] = []

    async def start(self) -> None:
        if REAL is None:
            self.server = self.stack.enter_context(kubernetes_server())
            self.server.delay = self.delay.draw

    async def stop(self) -> None:
        self.stack.close()

    def provider(self, **options: Any) -> KubernetesClient:
        for option in ("retention", "memory_retention"):
            options.pop(option, None)
        client = KubernetesClient(self.server, self.clock, **{"prefix": self.prefix, **options})
        self.clients.append(client)
        return client

    async def advance(self, seconds: float) -> None:
        # Time counts for a client from when it first sees a claim: all that are open have seen what there is.
        if self.clock.fixed is None:
            for client in self.clients:
                await client.look(set().union(*(client.used for client in self.clients)))
        await super().advance(seconds)

    async def keys(self) -> int:
        return len(set().union(*(client.used for client in self.clients)))
