"""Every error of the library.

GrelmicroError
├── OutOfContextError              no open app or backend in this scope
│   ├── NotStartedError            it exists, but nobody started it
│   └── ShuttingDownError          it is closing and takes no new work
└── CoordinationError
    ├── CoordinationBackendError   a kind is not wired, or the store cannot be used
    ├── LockReentrantError         this task or thread holds it already
    ├── LockUpgradeError           a reader asked to become the writer
    ├── LockLostError              the lease ended while the work ran
    ├── NotLeaderError             this worker does not lead
    ├── StaleTokenError            a newer fencing token was seen
    ├── LockBackendError           the backend failed; its own error is the `__cause__`
    │   ├── LockAcquireError
    │   ├── LockLockedCheckError
    │   ├── LockOwnedCheckError
    │   └── LockReleaseError
    │       └── LockNotOwnedError  not held by the caller, or no longer
    └── WouldBlockError            held elsewhere, and the caller would not wait
        ├── LockTimeoutError       ... any longer (also a builtin `TimeoutError`)
        └── LockQueueFullError     ... behind so many others
"""


class GrelmicroError(Exception):
    """Base of every error that this library raises on purpose."""


class OutOfContextError(GrelmicroError):
    """Nothing is open here that could answer; the message says what to open."""


class NotStartedError(OutOfContextError):
    """What was asked for exists, but it was never started."""


class ShuttingDownError(OutOfContextError):
    """The app is closing: work that holds a lease may finish, new work is refused."""


class CoordinationError(GrelmicroError):
    """Base of what locks and elections raise."""


class CoordinationBackendError(CoordinationError):
    """A backend is missing, or its store cannot be used as it is."""


class LockReentrantError(CoordinationError):
    """The caller holds this lock already; waiting for it would never end."""


class LockUpgradeError(CoordinationError):
    """A reader cannot become the writer: two that tried would wait for each other."""


class LockLostError(CoordinationError):
    """The lease ended while the work ran: someone else may have been inside."""


class NotLeaderError(CoordinationError):
    """The worker does not lead, or stopped leading while the work ran."""


class StaleTokenError(CoordinationError):
    """A newer fencing token was seen: the caller was overtaken and must not write."""


class LockBackendError(CoordinationError):
    """The backend failed; its own error is the `__cause__`."""


class LockAcquireError(LockBackendError):
    """The backend failed while a lease was taken or renewed; nothing stays held."""


class LockLockedCheckError(LockBackendError):
    """The backend failed while it was asked whether the lock is held."""


class LockOwnedCheckError(LockBackendError):
    """The backend failed while it was asked who holds the lock."""


class LockReleaseError(LockBackendError):
    """The backend failed while a lease was given back; releasing again is safe."""


class LockNotOwnedError(LockReleaseError):
    """The caller does not hold the lock, or its lease ran out."""


class WouldBlockError(CoordinationError):
    """Held elsewhere, and the caller would not wait."""


class LockTimeoutError(WouldBlockError, TimeoutError):
    """Held elsewhere for longer than the caller would wait."""


class LockQueueFullError(WouldBlockError):
    """More callers wait already than the caller allowed."""


WouldBlock = WouldBlockError
"""The other name that the reference uses for the same error."""

__all__ = [
    "CoordinationBackendError",
    "CoordinationError",
    "GrelmicroError",
    "LockAcquireError",
    "LockBackendError",
    "LockLockedCheckError",
    "LockLostError",
    "LockNotOwnedError",
    "LockOwnedCheckError",
    "LockQueueFullError",
    "LockReentrantError",
    "LockReleaseError",
    "LockTimeoutError",
    "LockUpgradeError",
    "NotLeaderError",
    "NotStartedError",
    "OutOfContextError",
    "ShuttingDownError",
    "StaleTokenError",
    "WouldBlock",
    "WouldBlockError",
]
