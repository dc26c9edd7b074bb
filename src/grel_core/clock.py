"""The only reads of wall time: it dates things and floors fences, and never decides who holds a lease."""

import time
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def utcnow() -> datetime:
    """Now, as an aware datetime in UTC."""
    return datetime.now(UTC)


def wall_microseconds() -> int:
    """Microseconds since 1970 on this host's wall clock."""
    return time.time_ns() // 1_000


def from_microseconds(value: int) -> datetime:
    """The aware datetime that lies `value` microseconds after 1970."""
    return EPOCH + timedelta(microseconds=value)
