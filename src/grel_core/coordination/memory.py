"""Memory backends for use without an app: `Lock("cart", backend=MemoryLockAdapter())`."""

from grel_core.lease.adapters import LeaderElectionAdapter, LockAdapter
from grel_core.providers.memory import MemoryProvider


class MemoryLockAdapter(LockAdapter):
    """Locks kept in this process. Opens itself on the running loop; there is nothing to close."""

    def __init__(self) -> None:
        super().__init__(MemoryProvider())


class MemoryLeaderElectionAdapter(LeaderElectionAdapter):
    """Elections kept in this process. Opens itself on the running loop; there is nothing to close."""

    def __init__(self) -> None:
        super().__init__(MemoryProvider())


__all__ = ["MemoryLeaderElectionAdapter", "MemoryLockAdapter"]
