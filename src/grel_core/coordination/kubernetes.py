"""Kubernetes backends for use without an app: `Lock("cart", backend=KubernetesLockAdapter(namespace="shop"))`."""

from typing import Any

from grel_core.lease.adapters import LeaderElectionAdapter, LockAdapter
from grel_core.providers.kubernetes import KubernetesProvider


class KubernetesLockAdapter(LockAdapter):
    """Locks kept as Leases; enter it with `async with` first. It takes what `KubernetesProvider` takes."""

    def __init__(self, namespace: str | None = None, **options: Any) -> None:
        super().__init__(KubernetesProvider(namespace, **options))


class KubernetesLeaderElectionAdapter(LeaderElectionAdapter):
    """Elections kept as Leases; enter it with `async with` first. It takes what `KubernetesProvider` takes."""

    def __init__(self, namespace: str | None = None, **options: Any) -> None:
        super().__init__(KubernetesProvider(namespace, **options))


__all__ = ["KubernetesLeaderElectionAdapter", "KubernetesLockAdapter"]
