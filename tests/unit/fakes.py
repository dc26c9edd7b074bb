"""Stand-ins for what lives outside: places that can be down, strangers' backends, work that will not end."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

from grel_core.clock import utcnow
from grel_core.coordination import LeaderRecord
from grel_core.lease.backend import T
from grel_core.lease.names import Key
from grel_core.lease.rules import Rule
from grel_core.providers.memory import MemoryProvider


class Place(MemoryProvider):
    """A server at an address, as far as an app can tell: it has to be opened, and can be down or hang."""

    scope = "cluster"  # type: ignore[assignment]  # what a server would say
    lazy = False

    def __init__(self, address: str = "here", log: list[str] | None = None, *, broken: str = "") -> None:
        super().__init__()
        self.address = address
        self.log = [] if log is None else log
        self.broken = broken
        self.error: Exception | None = None
        self.hangs = False

    def identity(self) -> Any:
        return type(self), self.address

    async def _open(self) -> None:
        await asyncio.sleep(0)
        if self.broken == "open":
            raise ConnectionError(f"{self.address} is down")
        self.log.append(f"open {self.address}")

    async def _close(self) -> None:
        self.log.append(f"close {self.address}")
        if self.broken == "close":
            raise ConnectionError(f"{self.address} went away")

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        if self.hangs:
            async with asyncio.timeout(self.backend_timeout):
                await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        return await super().apply(key, rule)

    def __repr__(self) -> str:
        return f"<Place {self.address!r}>"


class Other(Place):
    """Another vendor's server."""


class StrangeLocks:
    """Somebody else's `LockBackend`: the four methods, and the loop as `spec/` asks for."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, int, float]] = {}
        self.fence = 0
        self.opened = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self.opened += 1
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.opened -= 1

    def _holder(self, name: str) -> tuple[str, int, float] | None:
        claim = self.held.get(name)
        return claim if claim and claim[2] > asyncio.get_running_loop().time() else None

    async def acquire(self, *, name: str, token: str, duration: float) -> int | None:
        claim = self._holder(name)
        if claim and claim[0] != token:
            return None
        if not claim:
            self.fence += 1
        fence = claim[1] if claim else self.fence
        self.held[name] = (token, fence, asyncio.get_running_loop().time() + duration)
        return fence

    async def release(self, *, name: str, token: str) -> bool:
        claim = self._holder(name)
        if not claim or claim[0] != token:
            return False
        del self.held[name]
        return True

    async def locked(self, *, name: str) -> bool:
        return self._holder(name) is not None

    async def owned(self, *, name: str, token: str) -> bool:
        claim = self._holder(name)
        return claim is not None and claim[0] == token


class StrangeElections:
    """Somebody else's `LeaderElectionBackend`, without a fencing token. Nothing to open."""

    def __init__(self) -> None:
        self.records: dict[str, LeaderRecord] = {}
        self.until: dict[str, float] = {}
        self.asked = 0

    async def acquire_or_renew(
        self, *, name: str, token: str, duration: float, metadata: Mapping[str, str] | None = None
    ) -> LeaderRecord:
        self.asked += 1
        now, known = asyncio.get_running_loop().time(), self.records.get(name)
        if known is not None and known.holder != token and self.until[name] > now:
            return known
        moment = utcnow() + timedelta(seconds=now)
        if known is not None and known.holder == token and self.until[name] > now:
            record = replace(known, renewed_at=moment, metadata=dict(metadata or {}))
        else:
            transitions = known.transitions + 1 if known else 0
            record = LeaderRecord(token, duration, moment, moment, transitions, dict(metadata or {}))
        self.records[name], self.until[name] = record, now + duration
        return record

    async def release(self, *, name: str, token: str) -> bool:
        held = self.records[name].holder == token and self.until[name] > asyncio.get_running_loop().time()
        if held:
            self.until[name] = 0
        return held

    async def get(self, *, name: str) -> LeaderRecord | None:
        return self.records.get(name) if self.until.get(name, 0) > asyncio.get_running_loop().time() else None
