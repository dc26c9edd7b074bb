"""Locks and elections for work that must not run twice at once."""

from grel_core.coordination.campaign import LeaderElectionConfig
from grel_core.coordination.component import Coordination
from grel_core.coordination.election import LeaderElection
from grel_core.coordination.handle import LockHandle
from grel_core.coordination.hold import ThreadLockAdapter
from grel_core.coordination.leased import LockConfig
from grel_core.coordination.lock import Lock, locked
from grel_core.coordination.memory import MemoryLeaderElectionAdapter, MemoryLockAdapter
from grel_core.coordination.readwritelock import ReadGuard, ReadWriteLock, ReadWriteLockConfig, WriteGuard
from grel_core.coordination.tasklock import TaskLock, TaskLockConfig, ThreadTaskLockAdapter
from grel_core.errors import (
    CoordinationBackendError,
    CoordinationError,
    LockAcquireError,
    LockBackendError,
    LockLockedCheckError,
    LockLostError,
    LockNotOwnedError,
    LockOwnedCheckError,
    LockQueueFullError,
    LockReentrantError,
    LockReleaseError,
    LockTimeoutError,
    LockUpgradeError,
    NotLeaderError,
    StaleTokenError,
    WouldBlock,
    WouldBlockError,
)
from grel_core.lease.names import lock_name
from grel_core.lease.protocols import (
    LeaderElectionBackend,
    LeaderRecord,
    LockBackend,
    ReadWriteLockBackend,
    ScheduleBackend,
)

__all__ = [
    "Coordination",
    "CoordinationBackendError",
    "CoordinationError",
    "LeaderElection",
    "LeaderElectionBackend",
    "LeaderElectionConfig",
    "LeaderRecord",
    "Lock",
    "LockAcquireError",
    "LockBackend",
    "LockBackendError",
    "LockConfig",
    "LockHandle",
    "LockLockedCheckError",
    "LockLostError",
    "LockNotOwnedError",
    "LockOwnedCheckError",
    "LockQueueFullError",
    "LockReentrantError",
    "LockReleaseError",
    "LockTimeoutError",
    "LockUpgradeError",
    "MemoryLeaderElectionAdapter",
    "MemoryLockAdapter",
    "NotLeaderError",
    "ReadGuard",
    "ReadWriteLock",
    "ReadWriteLockBackend",
    "ReadWriteLockConfig",
    "ScheduleBackend",
    "StaleTokenError",
    "TaskLock",
    "TaskLockConfig",
    "ThreadLockAdapter",
    "ThreadTaskLockAdapter",
    "WouldBlock",
    "WouldBlockError",
    "WriteGuard",
    "lock_name",
    "locked",
]
