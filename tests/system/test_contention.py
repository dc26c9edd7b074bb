"""Many tasks of many processes want one lock: each is served, nobody is in twice, and waiting costs next to nothing."""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from grel_core.coordination import Lock
from grel_core.lease.names import LOCK, Key
from grel_core.providers.redis import RedisProvider
from tests.harness import eventually
from tests.servers import Valkey

PROCESSES, TASKS = 4, 25
SECONDS = float(os.environ.get("GREL_CONTENTION_SECONDS", "10"))


def contend(where: str, log: Path) -> None:
    """Let all processes start together, and wait until they have ended."""
    command = [sys.executable, "-m", "tests.system.contender", where, str(TASKS), str(SECONDS), str(log)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            assert process.wait(SECONDS + 20) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("backend", ["sqlite", "redis", "postgres"])
def test_a_hundred_tasks_in_four_processes_all_get_their_turn(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    where = str(tmp_path / "leases.db")
    if backend == "redis":
        where = request.getfixturevalue("valkey_server").url
    elif backend == "postgres":
        where = request.getfixturevalue("postgres_server").url()
    contend(where, tmp_path / "log")
    visits = [tuple(map(int, line.split())) for line in (tmp_path / "log").read_text().splitlines()]
    visits.sort(key=lambda visit: visit[1])
    served = Counter((process, task) for _, _, _, process, task in visits)
    gaps = [(after[1] - before[2]) / 1e6 for before, after in pairwise(visits)]
    spread = statistics.pstdev(served.values()) / statistics.mean(served.values())
    print(
        f"{backend}: {len(visits)} visits by {len(served)} tasks, {min(served.values())} to {max(served.values())} "
        f"each (cv {spread:.2f}); hand-over p50 {statistics.median(gaps):.1f} ms, max {max(gaps):.0f} ms"
    )
    assert len(served) == PROCESSES * TASKS, "a task was never served"
    assert min(gaps) >= 0, "two were inside at once"
    tokens = [visit[0] for visit in visits]
    assert tokens == sorted(set(tokens)), "a fencing token came twice or fell"


@pytest.mark.anyio
async def test_fifty_idle_waiters_cost_a_few_operations_a_second(valkey_server: Valkey) -> None:
    async with (
        RedisProvider(valkey_server.url, prefix="idle") as holder,
        RedisProvider(valkey_server.url, prefix="idle") as provider,
    ):
        await Lock("one", backend=holder.lock()).acquire()
        waiting = [asyncio.create_task(Lock("one", backend=provider.lock()).acquire()) for _ in range(50)]
        await eventually(lambda: provider.lines.waiting(Key(LOCK, "one")) == 50)
        before, began = operations(valkey_server), time.monotonic()
        await eventually(lambda: time.monotonic() - began >= 4, within=6)
        rate = (operations(valkey_server) - before) / (time.monotonic() - began)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    print(f"{rate:.1f} operations a second for 50 idle waiters")
    assert rate < 5


def operations(server: Valkey) -> int:
    """Commands that the server has run so far, but for the asking."""
    lines = server.ask("INFO", "commandstats").splitlines()
    counted = {line.split(":")[0]: int(line.split("calls=")[1].split(",")[0]) for line in lines if "calls=" in line}
    return sum(count for name, count in counted.items() if name in {"cmdstat_evalsha", "cmdstat_eval", "cmdstat_ping"})
