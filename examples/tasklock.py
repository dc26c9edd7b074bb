"""Scheduled work on several workers: one of them runs it, the others skip it, and nobody repeats it too soon.

Prints:

    ann sends the report
    bob skips: somebody does it already
    bob skips, though ann has ended: it was a moment ago
    bob sends the next report
    the import outlives its lease
"""

import asyncio
import tempfile
from pathlib import Path

from grel_core import Grelmicro
from grel_core.coordination import TaskLock, WouldBlockError
from grel_core.providers.sqlite import SQLiteProvider

MINIMUM = 0.3
"""Longer than the clocks of two workers may differ; minutes in real life."""


class Worker:
    """Stands for one process of your service, in which cron or a timer calls `report`."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        provider = SQLiteProvider(path)
        self.micro = Grelmicro(uses=[provider])
        self.reports = TaskLock("report", min_hold_duration=MINIMUM, lease_duration=10, backend=provider.lock())
        self.imports = TaskLock(
            "import", min_hold_duration=0, lease_duration=0.2, keep_alive=True, backend=provider.lock()
        )

    async def report(self, done: asyncio.Event, what: str = "the report", why: str = "") -> None:
        """One try, no waiting."""
        try:
            async with self.reports:
                print(f"{self.name} sends {what}")
                await done.wait()
        except WouldBlockError:
            print(f"{self.name} skips{why}")

    async def import_all(self) -> None:
        """Takes longer than its lease, which is renewed meanwhile; the work is cancelled if that fails."""
        async with self.imports:
            await asyncio.sleep(0.6)


async def main(path: Path) -> None:
    """Two workers whose timers go off at about the same time."""
    ann, bob = Worker("ann", path), Worker("bob", path)
    async with ann.micro, bob.micro:
        done = asyncio.Event()
        anns = asyncio.create_task(ann.report(done))
        while not await bob.reports.locked():
            await asyncio.sleep(0)
        await bob.report(done, why=": somebody does it already")
        done.set()
        await anns
        await bob.report(done, why=", though ann has ended: it was a moment ago")
        while await bob.reports.locked():  # the store's clock says when the minimum is over
            await asyncio.sleep(0.01)
        await bob.report(done, "the next report")

        work = asyncio.create_task(ann.import_all())
        while not await bob.imports.locked():
            await asyncio.sleep(0)
        await asyncio.sleep(0.5)  # more than two leases
        print("the import outlives its lease" if await bob.imports.locked() else "the import's lease ran out")
        await work


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "leases.db"))
