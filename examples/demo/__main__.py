"""Sell a limited stock without a lock and with one, while the leader is told to stop, and then killed.

Environment: `REDIS=1` keeps the leases on a real Valkey server, `KEEP=1` leaves the shop running at the end.
Exit status 0 means that every figure is right.
"""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx2

from examples.demo.view import HandOver, Run, View
from tests.servers import free_port, valkey

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 3
BUYERS = 40
STOCK = 400
PAUSE = 0.4
"""Seconds for which a buyer thinks between two purchases, on average."""
LEASE = 3.0
"""Seconds after which what a killed worker held goes to another one; the shop learns of it by its environment."""
GRACEFUL_LIMIT = 1.0
START_LIMIT = 40.0
LIMIT = 150.0
CONFIGURATION = {
    "GREL_ENV_LOAD": "1",
    "GREL_LOCK_LEASE_DURATION": f"{LEASE}",
    "GREL_LEADERELECTION_LEASE_DURATION": f"{LEASE}",
    "GREL_LEADERELECTION_RENEW_DEADLINE": f"{LEASE * 2 / 3}",
    "GREL_LEADERELECTION_RETRY_INTERVAL": f"{LEASE / 6}",
}


@contextmanager
def serve(directory: Path, port: int, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The shop under uvicorn. It leads a process group of its own, so that Ctrl-C reaches only us and we end it."""
    command = [sys.executable, "-m", "uvicorn", "examples.demo.shop:app", "--workers", str(WORKERS)]
    command += ["--port", str(port), "--log-level", "warning", "--timeout-graceful-shutdown", "5"]
    with (directory / "uvicorn.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield server
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(15)
        with suppress(ProcessLookupError):  # what is left of its group: nothing, unless it hung or was killed itself
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


class Demo:
    """The sales, the buyers, and what happens to the leaders meanwhile."""

    def __init__(self, server: subprocess.Popen[bytes], shop: sqlite3.Connection, url: str, view: View) -> None:
        self.server, self.shop, self.url, self.view = server, shop, url, view
        self.hand_overs: list[HandOver] = []

    async def run(self) -> None:
        """Everything, in order, within `LIMIT` seconds."""
        limits = httpx2.Limits(max_connections=BUYERS, max_keepalive_connections=0)
        async with (
            asyncio.timeout(LIMIT),
            httpx2.AsyncClient(base_url=self.url, limits=limits, timeout=20) as self.client,
        ):
            await self.start()
            await self.sale(Run("lamp", "no lock", STOCK, locked=False))
            await self.sale(Run("chair", "lock", STOCK))
            await self.sale(Run("table", "lock + SIGTERM", STOCK), self.terminate_leader)
            await self.sale(Run("shelf", "lock + SIGKILL", STOCK), self.kill_leader)

    async def start(self) -> None:
        """Wait until the shop serves and has a leader."""
        self.view.say(f"starting {WORKERS} workers on {self.url}")
        await self.until(self.serves, START_LIMIT, "the shop serves")
        await self.until(self.leads, START_LIMIT, "a leader works")

    async def serves(self) -> bool:
        """Whether a worker answers that it is ready."""
        try:
            return (await self.client.get("/readyz")).status_code == 200
        except httpx2.TransportError:
            return False

    async def leads(self, not_by: int = 0) -> bool:
        """Whether a worker other than `not_by` made the last entry in the books."""
        entry = self.books()
        return entry is not None and entry[1] != not_by

    async def sale(self, run: Run, meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Let the buyers in and wait until everything is sold; `meanwhile` begins when a quarter is."""
        (await self.client.put(f"/skus/{run.sku}", params={"pieces": run.stock})).raise_for_status()
        self.view.runs.append(run)
        self.view.say(f"{run.title}: {BUYERS} buyers, {run.stock} pieces")
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            buyers = [group.create_task(self.buyer(run)) for _ in range(BUYERS)]
            event: asyncio.Task[None] | None = None
            while not all(buyer.done() for buyer in buyers):
                self.check_server()
                self.look(run)
                run.seconds = time.monotonic() - began
                if meanwhile and event is None and run.sold > run.stock / 4:
                    event = group.create_task(meanwhile())
                await asyncio.sleep(0.05)
        self.look(run)
        self.view.say(f"  sold {run.sold} of {run.stock} in {run.seconds:.1f} s")

    async def buyer(self, run: Run) -> None:
        """Buy, think, buy again, until told that everything is sold."""
        path = f"/skus/{run.sku}/{'buy' if run.locked else 'buy-unlocked'}"
        while True:
            await asyncio.sleep(random.uniform(0, 2 * PAUSE))
            try:
                status = (await self.client.post(path)).status_code
            except httpx2.TransportError:
                run.broken += 1
                continue
            if status == 409:
                return
            if status in {423, 503}:
                run.refused += 1
            elif status != 200:
                raise RuntimeError(f"{path} answered {status}")

    def look(self, run: Run) -> None:
        """Read from the shop's tables what the buyers and the leader did."""
        sold = self.shop.execute("SELECT worker, count(*) FROM sale WHERE sku = ? GROUP BY worker", (run.sku,))
        run.workers = dict(sold.fetchall())
        run.sold = sum(run.workers.values())
        if (entry := self.books()) is not None:
            at, worker, token = entry
            self.view.leader = f"worker {worker}, token {token}, last entry {time.monotonic() - at:.1f} s ago"

    def books(self) -> tuple[float, int, int] | None:
        """The leader's last entry: when, by which process, with which fencing token."""
        entry: tuple[float, int, int] | None = self.shop.execute(
            "SELECT at, worker, token FROM books ORDER BY id DESC LIMIT 1"
        ).fetchone()
        return entry

    async def terminate_leader(self) -> None:
        """SIGTERM: the leader stops its work, and hands over before its process ends."""
        await self.hand_over("SIGTERM", GRACEFUL_LIMIT)

    async def kill_leader(self) -> None:
        """SIGKILL: nobody can say goodbye, so the next leader waits for the lease to end."""
        await self.hand_over("SIGKILL", LEASE + 1)

    async def hand_over(self, name: str, limit: float) -> None:
        """Signal the leader, and measure until another worker makes an entry in the books."""
        _, old, _ = self.books() or (0, 0, 0)
        if os.getpgid(old) != self.server.pid:
            raise RuntimeError(f"process {old} is none of ours")
        self.view.say(f"{name} to the leader, worker {old}")
        sent = time.monotonic()
        os.kill(old, signal.Signals[name])
        await self.until(lambda: self.leads(not_by=old), limit + 10, "another leader works")
        at, new, _ = self.books() or (0, 0, 0)
        self.hand_overs.append(HandOver(name, old, new, at - sent, limit))
        self.view.say(str(self.hand_overs[-1]))

    async def until(self, condition: Callable[[], Awaitable[bool]], timeout: float, what: str) -> None:
        """Ask until `condition` holds."""
        deadline = time.monotonic() + timeout
        while not await condition():
            self.check_server()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not within {timeout:g} s")
            await asyncio.sleep(0.02)

    def check_server(self) -> None:
        """Give up when uvicorn has ended by itself."""
        if self.server.poll() is not None:
            raise RuntimeError(f"uvicorn has ended with status {self.server.returncode}")

    def keep(self) -> None:
        """Leave the shop running, and say what there is to see, until Ctrl-C."""
        self.view.say("the shop goes on; Ctrl-C ends it:")
        for path in ("docs", "books", "coordination/leader", "leaderz", "readyz", "healthz"):
            self.view.say(f"  {self.url}/{path}")
        with suppress(KeyboardInterrupt):
            self.server.wait()

    def checks(self) -> dict[str, bool]:
        """What has to be right."""
        locked = [run for run in self.view.runs if run.locked]
        unlocked = [run for run in self.view.runs if not run.locked]
        entries = self.shop.execute("SELECT worker, token FROM books ORDER BY id")
        tokens = [token for (_, token), _ in groupby(entries)]  # one for each term
        return {
            "without the lock more was sold than there was": all(run.sold > run.stock for run in unlocked),
            "with the lock exactly the stock was sold": all(run.sold == run.stock for run in locked),
            **{
                f"after {one.signal} the next leader worked in time": one.seconds <= one.limit
                for one in self.hand_overs
            },
            "each leader had a higher fencing token than the one before": tokens == sorted(set(tokens)),
        }


def main() -> int:
    """Set the stage, run, and sum up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grel-demo-")))
        places = {"SQLITE_PATH": str(directory / "leases.db"), "SHOP_PATH": str(directory / "shop.db")}
        if redis := bool(os.environ.get("REDIS")):
            places["REDIS_URL"] = stack.enter_context(valkey(directory)).url
        others = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        shop = stack.enter_context(closing(sqlite3.connect(places["SHOP_PATH"])))
        shop.execute("PRAGMA journal_mode = WAL")
        port = free_port()
        server = stack.enter_context(serve(directory, port, others | CONFIGURATION | places))
        view = View(f"{WORKERS} workers, leases on {'a Valkey server' if redis else 'a SQLite file'}")
        demo = Demo(server, shop, f"http://127.0.0.1:{port}", view)
        try:
            with view:
                asyncio.run(demo.run())
        except Exception:
            print((directory / "uvicorn.log").read_text()[-4000:], file=sys.stderr)
            raise
        checks = demo.checks()
        view.summary(demo.hand_overs, checks)
        if os.environ.get("KEEP"):
            demo.keep()
        return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
