"""The same service on every server and both stores: locks, leadership, and what SIGTERM does while a stream is open."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from grel_core.coordination import Lock
from tests.servers import Valkey, until
from tests.system.contender import provider_for
from tests.system.web import COMMANDS, Web, entries

AT_ONCE = [server for server in COMMANDS if server != "hypercorn"]
FIGURES: list[str] = []


class Pair(NamedTuple):
    """Two instances of one service on one store: what is left when the first one goes is the second."""

    first: Web
    second: Web

    @property
    def log(self) -> Path:
        """What both wrote down."""
        return self.first.log

    def leader(self) -> int:
        """The pid of the worker that leads."""
        reigns = entries(self.log, "reign")
        return int(reigns[-1]["pid"]) if reigns else 0


@pytest.fixture(scope="module", autouse=True)
def figures() -> Iterator[None]:
    """What was measured, in one table at the end."""
    yield
    print("\nSIGTERM with an open event stream, seconds until another worker leads")
    print("\n".join(FIGURES))


@pytest.fixture(
    scope="module", params=[(server, store) for store in ("sqlite", "redis") for server in COMMANDS], ids=str
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, valkey_server: Valkey
) -> Iterator[Pair]:
    """The service twice, on each server and each store."""
    server, store = request.param
    directory = tmp_path_factory.mktemp("service")
    valkey_server.ask("FLUSHALL")
    where = str(directory / "leases.db") if store == "sqlite" else valkey_server.url
    with ExitStack() as stack:
        webs = [Web(server, where, directory) for _ in range(2)]
        for web in webs:
            stack.callback(web.stop)
            web.start()
        for web in webs:
            web.ready()
        yield Pair(*webs)


def test_a_lock_keeps_the_requests_of_all_workers_apart(pair: Pair) -> None:
    """1."""

    async def ask() -> list[int]:
        async with httpx2.AsyncClient(timeout=60) as client:
            asks = [client.post(pair[number % 2].url + "/work") for number in range(40)]
            return [(await answer).status_code for answer in asyncio.as_completed(asks)]

    assert asyncio.run(ask()) == [200] * 40
    works = sorted(entries(pair.log, "work"), key=lambda entry: float(entry["began"]))
    assert len(works) == 40
    assert len({entry["pid"] for entry in works}) >= 2
    for before, after in itertools.pairwise(works):
        assert after["began"] >= before["at"], "two were inside at once"
        assert after["token"] > before["token"]


def test_a_client_that_hangs_up_while_it_waits_never_gets_in(pair: Pair) -> None:
    """39."""

    async def hang_up() -> None:
        async with provider_for(pair.first.where) as provider, Lock("work", backend=provider.lock()):
            waiting = [await asyncio.to_thread(web.connect, "POST", "/work") for web in pair]
            held = time.monotonic()
            await asyncio.to_thread(until, lambda: time.monotonic() - held > 0.3, 2, "the requests wait")
            for connection in waiting:
                connection.close()
            left = time.monotonic()
            await asyncio.to_thread(until, lambda: time.monotonic() - left > 0.5, 2, "the servers noticed")

    before = len(entries(pair.log, "begin"))
    asyncio.run(hang_up())
    assert httpx2.post(pair.second.url + "/work", timeout=10).status_code == 200
    assert len(entries(pair.log, "begin")) == before + 1


def test_one_worker_leads_and_says_so(pair: Pair) -> None:
    until(lambda: pair.leader() != 0, 10, "somebody leads")
    leading = [web for web in pair for _ in range(30) if web.status("/lead") == 200]
    assert leading, "no leader answered"
    assert len({web.port for web in leading}) == 1
    assert httpx2.get(leading[0].url + "/coordination/leader").status_code == 200
    reigns = entries(pair.log, "reign")
    assert len({entry["pid"] for entry in reigns}) == 1


def test_sigterm_hands_the_lead_over_while_a_stream_is_open(pair: Pair) -> None:
    until(lambda: pair.leader() != 0, 10, "somebody leads")
    leader = pair.leader()
    going, staying = sorted(pair, key=lambda web: leader not in web.workers())
    workers = going.workers()
    assert going.process is not None
    with going.events(leader):
        began = time.monotonic()
        going.process.send_signal(signal.SIGTERM)
        taken = next_reign(pair.log, began, workers)
        assert staying.status("/readyz") == 200
    last = max(entry["at"] for entry in entries(pair.log, "reign") if entry["pid"] == leader) - began
    FIGURES.append(f"{going.server:20} {'redis' if '://' in going.where else 'sqlite':10} {taken:6.3f}")
    assert last <= taken, "the old leader was still at work"
    assert taken < (1 if going.server in AT_ONCE else 4)
    assert going.stop() in {0, -signal.SIGTERM, 128 + signal.SIGTERM}


def next_reign(log: Path, began: float, leaving: set[int]) -> float:
    """Seconds from `began` until a worker that is not one of `leaving` leads."""

    def reigns() -> list[float]:
        return [one["at"] for one in entries(log, "reign") if one["at"] > began and one["pid"] not in leaving]

    until(lambda: bool(reigns()), 10, "another worker leads")
    return reigns()[0] - began


# What needs one server only.


def one(server: str, directory: Path, *arguments: str) -> Web:
    """The service once, on a file."""
    return Web(server, str(directory / "leases.db"), directory, list(arguments))


def test_a_worker_of_several_hands_over_to_its_siblings(tmp_path: Path) -> None:
    web = one("uvicorn --workers 3", tmp_path).start()
    try:
        web.ready()
        until(lambda: bool(entries(web.log, "reign")), 10, "somebody leads")
        leader = int(entries(web.log, "reign")[-1]["pid"])
        with web.events(leader):
            began = time.monotonic()
            os.kill(leader, signal.SIGTERM)
            taken = next_reign(web.log, began, {leader})
        FIGURES.append(f"{'one of 3 workers':20} {'sqlite':10} {taken:6.3f}")
        assert taken < 1
    finally:
        web.stop()


@pytest.mark.parametrize(
    ("server", "arguments"),
    [
        ("uvicorn", ()),
        ("uvicorn", ("--timeout-graceful-shutdown", "1")),
        ("hypercorn", ()),
        ("granian", ()),
        ("gunicorn -k asgi", ()),
    ],
    ids=str,
)
def test_a_lock_that_is_held_at_sigterm_is_free_when_the_server_has_ended(
    server: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """51."""
    web = one(server, tmp_path, *arguments).start()
    try:
        web.ready()
        with web.connect("POST", "/work?seconds=1.5"):
            until(lambda: bool(entries(web.log, "begin")), 5, "the lock is held")
            web.stop()

        async def locked() -> bool:
            async with provider_for(web.where) as provider:
                return await Lock("work", backend=provider.lock()).locked()

        assert not asyncio.run(locked())
    finally:
        web.stop()


@pytest.mark.parametrize(
    ("server", "code"), [("uvicorn", 3), ("granian", 1), ("gunicorn -k asgi", 3), ("hypercorn", 0)]
)
def test_a_service_that_cannot_open_its_store_does_not_serve(server: str, code: int, tmp_path: Path) -> None:
    """16, 18. Hypercorn says 0 whatever happens at the start."""
    web = one(server, tmp_path)
    web.where = str(tmp_path / "missing" / "leases.db")
    web.start()
    try:
        until(lambda: web.ended, 20, f"{server} gives up")
        assert web.stop() == code, web.output
        assert "missing" in web.output
    finally:
        web.stop()


def test_workers_of_a_preloaded_app_are_three_candidates(tmp_path: Path) -> None:
    """20."""
    web = one("gunicorn -k asgi", tmp_path, "--preload", "-w", "3").start()
    try:
        web.ready()
        found: set[tuple[str, bool]] = set()

        def everyone() -> bool:
            body = httpx2.get(web.url + "/coordination/leader").json()
            found.add((body["self"]["identity"], body["is_leader"]))
            return len({identity for identity, _ in found}) == 3 and any(leads for _, leads in found)

        until(everyone, 20, "three identities")
        assert sum(leads for _, leads in found) == 1
    finally:
        web.stop()
