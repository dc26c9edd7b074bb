"""Memory: leases kept in this process, for tests and single-process apps."""

from grel_core.clock import wall_microseconds
from grel_core.lease.backend import T
from grel_core.lease.names import Key
from grel_core.lease.rules import Instant, Record, Rule, forget_at, heirs, reap, settle
from grel_core.providers.base import Provider


class MemoryProvider(Provider):
    """Leases in a dict; the event loop's clock decides. Gone when the process ends."""

    scope = "process"
    lazy = True

    def __init__(self, *, retention: float = 60.0, memory_retention: float = 30 * 86_400.0) -> None:
        super().__init__(retention=retention, memory_retention=memory_retention)
        self._records: dict[Key, Record] = {}
        self._sweep: list[Key] = []
        self._now = 0

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        self.check_loop()
        at = self._instant()
        if at.now < self._now:  # another loop, whose clock knows nothing of these leases
            self._records.clear()
        self._now = at.now
        self._reap_one(at)
        before = settle(reap(self._records.get(key, Record()), at.now, self.keep(key)), at.now)
        after, answer = rule(before, at)
        if after is not before:
            self._records[key] = after
            if set(heirs(after)) - set(heirs(before)):
                self.watches.wake(key)
        return answer

    def _instant(self) -> Instant:
        return Instant(round(self.loop.time() * 1_000_000), wall_microseconds())

    def _reap_one(self, at: Instant) -> None:
        """Look at one old record per call, so that one-shot names go away at the pace at which they come."""
        if not self._sweep:
            self._sweep = list(self._records)
        for _ in range(2):
            if not self._sweep:
                return
            key = self._sweep.pop()
            record = self._records.get(key)
            if record is not None and at.now >= forget_at(record, self.keep(key)):
                del self._records[key]
