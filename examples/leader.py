"""Two workers, one leader: the second one takes over the moment the first one closes.

Prints:

    ann works
    bob follows ann
    ann stops working
    bob works
    bob's fencing token is higher than ann's
    bob stops working
"""

import asyncio
import tempfile
from pathlib import Path

from grel_core import Grelmicro
from grel_core.coordination import LeaderElection
from grel_core.providers.sqlite import SQLiteProvider


class Worker:
    """Stands for one process of your service: each opens the same file and runs the same election."""

    def __init__(self, name: str, path: Path) -> None:
        self.election = LeaderElection("reports", worker=name)
        self.micro = Grelmicro(uses=[SQLiteProvider(path), self.election])
        self.working = asyncio.Event()
        self.token = 0
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Take part until `stop` is set. Closing the app gives the lead back, once the work has ended."""
        async with self.micro:
            work = asyncio.create_task(self.election.lead(self.report))
            await self.stop.wait()
        await asyncio.wait([work])

    async def report(self) -> None:
        """Runs on the leader only, and is cancelled when it stops leading."""
        print(f"{self.election.identity} works")
        self.token = self.election.fencing_token or 0
        self.working.set()
        try:
            await asyncio.Event().wait()
        finally:
            print(f"{self.election.identity} stops working")


async def main(path: Path) -> None:
    """Ann leads first because she starts first; bob takes over from her."""
    ann, bob = Worker("ann", path), Worker("bob", path)
    async with asyncio.TaskGroup() as workers:
        workers.create_task(ann.run())
        await ann.working.wait()

        workers.create_task(bob.run())
        while bob.election.record is None:  # what bob saw when he last looked
            await asyncio.sleep(0.01)
        print(f"bob follows {bob.election.record.holder}")

        ann.stop.set()
        await bob.working.wait()
        print(f"bob's fencing token is {'higher' if bob.token > ann.token else 'not higher'} than ann's")
        bob.stop.set()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "leases.db"))
