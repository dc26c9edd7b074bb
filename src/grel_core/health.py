"""Is this process alive, and may it get work? Answered from what is known already: no question goes to a backend."""

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from grel_core.app import Grelmicro
from grel_core.supervisor import TOO_MANY

TOLERANCE = 20.0
"""Seconds beyond its lease for which a renew loop may be late before the process counts as stuck."""


@dataclass(frozen=True)
class Check:
    """One line of a health report. `detail` is a fixed word or a number, never the text of an error."""

    status: Literal["ok", "degraded", "error"]
    critical: bool = False
    detail: str | None = None


@dataclass(frozen=True)
class Report:
    """What is known about an app."""

    started: bool
    draining: bool
    checks: dict[str, Check] = field(default_factory=dict)

    @property
    def status(self) -> Literal["ok", "degraded", "error"]:
        """The worst that matters: an error of a check that is not critical only degrades."""
        if not self.ready:
            return "error"
        return "ok" if all(check.status == "ok" for check in self.checks.values()) else "degraded"

    @property
    def ready(self) -> bool:
        """Whether requests may come: started, not closing, and no critical check in error. Followers are ready."""
        failed = any(check.critical and check.status == "error" for check in self.checks.values())
        return self.started and not self.draining and not failed


def report(app: Grelmicro) -> Report:
    """The health of `app`, from memory."""
    checks: dict[str, Check] = {}
    # Sorted, so that of two with one name the worse one shows.
    for store in sorted(app.stores, key=lambda store: store.failing_since is not None):
        failing = store.failing_since is not None
        checks[f"coordination:{type(store).__name__}"] = Check(
            "error" if failing else "ok", detail="unreachable" if failing else None
        )
    for name, election in app.elections.items():
        state = "leading" if election.is_leader() else "following"
        checks[f"election:{name}"] = Check("ok" if election.is_running() else "error", detail=state)
    for supervised in sorted(app.supervised, key=lambda supervised: supervised.crashes):
        if crashes := supervised.crashes:
            status: Literal["degraded", "error"] = "error" if crashes > TOO_MANY else "degraded"
            checks[f"task:{supervised.work.name}"] = Check(
                status, status == "error", f"crashed {crashes} times in a minute"
            )
    return Report(app.started, app.draining, checks)


def alive(app: Grelmicro) -> bool:
    """False only when an election's loop is stuck: restart the process. A backend that is down does not count."""
    now = asyncio.get_running_loop().time()
    return all(
        election.overdue(now) <= election.config.lease_duration + TOLERANCE for election in app.elections.values()
    )
