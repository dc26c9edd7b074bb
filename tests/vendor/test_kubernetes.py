"""What only Kubernetes has: no clock, answers that get lost, roles, watches, and objects that people look at."""

import asyncio
import importlib
import json
import secrets
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from grel_core.coordination import LeaderElection, Lock
from grel_core.coordination.kubernetes import KubernetesLeaderElectionAdapter, KubernetesLockAdapter
from grel_core.errors import CoordinationBackendError
from grel_core.lease.names import ELECTION, LOCK, READWRITELOCK, SCHEDULE, Key
from grel_core.lease.rules import Busy, Grant, Instant
from grel_core.providers import kubernetes_api
from grel_core.providers.kubernetes import KubernetesProvider, rbac_yaml
from grel_core.providers.kubernetes_api import UnclearError, lease_name
from tests.conformance.kubernetes_store import KubernetesClient
from tests.harness import Clock, eventually
from tests.kubernetes_server import NAME, VERBS, Fault, KubernetesServer, kubernetes_server

pytestmark = pytest.mark.anyio
yaml: Any = importlib.import_module("yaml")  # it has no types, and comes with kubernetes-asyncio
CART = Key(LOCK, "cart")
NIGHTLY = Key(SCHEDULE, "nightly")
BOOK = Key(READWRITELOCK, "book")
CATALOG = "grel.lock.cart"


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with kubernetes_server() as server:
        yield server


class Pod(KubernetesClient):
    """A process with a clock of its own, which the test moves."""

    def __init__(self, server: KubernetesServer, **options: Any) -> None:
        super().__init__(server, Clock(), **options)
        self.wall = 0

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def _instant(self) -> Instant:
        now, wall = super()._instant()
        return Instant(now, wall + self.wall)


@pytest.fixture
async def pods(server: KubernetesServer) -> AsyncIterator[list[Pod]]:
    made = [Pod(server, backend_timeout=2.0) for _ in range(3)]
    async with made[0], made[1], made[2]:
        yield made


def lease_of(server: KubernetesServer, name: str = CATALOG) -> dict[str, Any]:
    return server.leases[name]


def state_of(server: KubernetesServer, name: str = CATALOG) -> str:
    state: str = server.leases[name]["metadata"]["annotations"]["grel.dev/state"]
    return state


def in_line(server: KubernetesServer, name: str) -> bool:
    return '"w:' in state_of(server, name)


# Time.


async def test_a_newcomer_waits_for_one_whole_lease_and_no_longer(pods: list[Pod]) -> None:
    dead, newcomer, _ = pods
    await dead.take(CART, "a.1", 10)
    newcomer.passes(3600)
    answer = await newcomer.take(CART, "b.1", 10)
    assert isinstance(answer, Busy)
    assert answer.remaining > 9_900_000
    newcomer.passes(9.9)
    assert isinstance(await newcomer.take(CART, "b.1", 10), Busy)
    newcomer.passes(0.2)
    grant = await newcomer.take(CART, "b.1", 10)
    assert isinstance(grant, Grant)
    assert grant.lapsed


async def test_a_renewal_starts_the_count_again(pods: list[Pod]) -> None:
    holder, other, _ = pods
    await holder.take(CART, "a.1", 10)
    for _ in range(3):
        assert await other.locked(CART)
        other.passes(9)
        holder.passes(9)
        assert await holder.renew(CART, "a.1", 10)
    assert isinstance(await other.take(CART, "b.1", 10), Busy)


async def test_the_records_own_duration_counts(pods: list[Pod]) -> None:
    holder, other, _ = pods
    await holder.take(CART, "a.1", 60)
    assert await other.locked(CART)
    other.passes(30)
    assert isinstance(await other.take(CART, "b.1", 1), Busy)


async def test_the_writes_of_others_do_not_lengthen_a_dead_claim(pods: list[Pod]) -> None:
    dead, first, second = pods
    await dead.take(CART, "a.1", 10)
    spent = 0.0
    while isinstance(await first.take(CART, "b.1", 10, queue=3), Busy):
        await second.take(CART, f"c.{spent}", 10, queue=3)
        for pod in (first, second):
            pod.passes(1)
        spent += 1
        assert spent < 12


async def test_newcomers_that_come_and_go_wear_a_dead_claim_down(server: KubernetesServer, pods: list[Pod]) -> None:
    await pods[0].take(CART, "a.1", 10)
    for number in range(8):
        async with Pod(server) as newcomer:
            await newcomer.take(CART, f"b.{number}", 10, queue=3)
            newcomer.passes(1.5)
            if isinstance(await newcomer.take(CART, f"b.{number}", 10, queue=3), Grant):
                break
    assert 5 <= number <= 6


async def test_each_reader_keeps_its_own_time(pods: list[Pod]) -> None:
    dead, living, writer = pods
    await dead.take(BOOK, "a.1", 5, shared=True)
    await writer.peek(BOOK)
    for _ in range(4):
        await living.take(BOOK, "b.1", 5, shared=True)
        record, _ = await writer.peek(BOOK)
        for pod in pods:
            pod.passes(1.5)
    record, _ = await writer.peek(BOOK)
    assert len(record.readers) == 1


async def test_every_process_sees_the_same_line(pods: list[Pod]) -> None:
    holder, waiting, other = pods
    await holder.take(BOOK, "a.1", 10)
    await waiting.take(BOOK, "b.1", 10, queue=9)
    await waiting.take(BOOK, "c.1", 10, queue=9, shared=True)
    await holder.drop(BOOK, "a.1")
    record, _ = await other.peek(BOOK)
    line = [(waiter.token.partition(".")[0], waiter.shared, waiter.called) for waiter in record.waiters]
    assert line == [("b", False, False), ("c", True, True)]


async def test_a_holder_counts_its_own_claim_from_before_it_asked(server: KubernetesServer, pods: list[Pod]) -> None:
    holder, other, _ = pods
    server.faults.append(Fault(status=-1, applied=True, delay=0.3))
    await holder.take(CART, "a.1", 10)
    record, at = await holder.peek(CART)
    assert record.until - at.now < 9_700_000
    record, at = await other.peek(CART)
    assert record.until - at.now > 9_900_000


async def test_a_claim_is_seen_when_the_answer_comes_not_when_it_was_asked_for(
    server: KubernetesServer, pods: list[Pod]
) -> None:
    holder, other, _ = pods
    await holder.take(CART, "a.0", 10)
    await holder.drop(CART, "a.0")
    server.faults.append(Fault(-1, methods=frozenset({"GET"}), applied=True, wait=0.3))
    looking = asyncio.create_task(other.peek(CART))
    await eventually(lambda: not server.faults)
    await holder.take(CART, "a.1", 10)
    record, at = await looking
    assert record.until - at.now > 9_900_000


@pytest.mark.parametrize("hours", [1, -1])
async def test_wall_clocks_an_hour_apart_change_nothing(pods: list[Pod], hours: int) -> None:
    """Acceptance 5: the leader's wall clock and the candidates' differ; no two ever lead at once."""
    for number, pod in enumerate(pods):
        pod.wall = number * hours * 3_600_000_000
    options: Any = {"lease_duration": 0.6, "renew_deadline": 0.4, "retry_interval": 0.1, "error_interval": 0.01}
    elections = [
        LeaderElection("jobs", backend=pod.leaderelection(), worker=f"w{n}", **options) for n, pod in enumerate(pods)
    ]
    tasks = [asyncio.create_task(election.run()) for election in elections]
    leaving: list[asyncio.Task[bool]] = []
    fences: list[int] = []

    def overlapping_never() -> bool:
        leaders = [election for election in elections if election.is_leader()]
        assert len(leaders) <= 1
        for leader in leaders:
            if (fence := leader.fencing_token) and fence not in fences:
                fences.append(fence)
                if len(fences) % 2:
                    leaving.append(asyncio.create_task(leader.step_down(stay_out=0.1)))
                else:  # cut off: it neither gives the lead back nor hears that it lost it
                    api = pods[elections.index(leader)]._api
                    api._cluster = api._cluster._replace(host="http://127.0.0.1:9")
        return len(fences) == 4

    await eventually(overlapping_never, within=10)
    for task in tasks:
        task.cancel()
    await asyncio.wait([*tasks, *leaving])
    assert fences == sorted(fences)


async def test_a_fresh_lease_is_not_taken_by_a_clock_that_is_ahead(pods: list[Pod]) -> None:
    holder, ahead, behind = pods
    ahead.wall, behind.wall = 3_600_000_000, -3_600_000_000
    first = await holder.take(CART, "a.1", 15)
    for pod in (ahead, behind):
        assert isinstance(await pod.take(CART, "b.1", 15), Busy)
    assert isinstance(first, Grant)
    holder.passes(20)
    for pod in (ahead, behind):
        pod.passes(20)
    second = await behind.take(CART, "c.1", 15)
    assert isinstance(second, Grant)
    assert second.fence > first.fence


async def test_a_stopped_leaders_late_release_spares_its_successor(server: KubernetesServer, pods: list[Pod]) -> None:
    """Acceptance 5. The release was sent while it led, and is done by the server long after."""
    old, new, _ = pods
    jobs = Key(ELECTION, "jobs")
    await old.take(jobs, "a.1", 5)
    await new.peek(jobs)
    server.faults.append(Fault(status=504, late=0.2))
    server.faults.append(Fault(status=504, methods=frozenset({"GET"}), times=1))
    with pytest.raises(ConnectionError):
        await old.drop(jobs, "a.1")
    new.passes(6)
    successor = await new.take(jobs, "b.1", 60)
    assert isinstance(successor, Grant)
    await eventually(lambda: server.late == 0)
    old.passes(6)
    assert not await old.drop(jobs, "a.1")
    assert await new.owned(jobs, "b.1")
    assert (await new.renew(jobs, "b.1", 60) or successor).fence == successor.fence


# Answers that get lost.


@pytest.mark.parametrize("status", [0, 500, 504])
async def test_a_write_whose_answer_is_lost_is_found_again(
    server: KubernetesServer, pods: list[Pod], status: int
) -> None:
    holder, other, _ = pods
    server.faults.append(Fault(status, applied=True, times=3))
    first = await holder.take(CART, "a.1", 10)
    assert isinstance(first, Grant)
    assert await holder.renew(CART, "a.1", 10) == first
    assert await holder.drop(CART, "a.1")
    assert not server.faults
    assert not await other.locked(CART)
    server.faults.append(Fault(status, applied=True))
    assert await holder.advance(NIGHTLY, 5)
    assert not await other.advance(NIGHTLY, 5)


async def test_a_lost_answer_is_found_behind_the_writes_of_others(server: KubernetesServer, pods: list[Pod]) -> None:
    holder, other, _ = pods
    await holder.advance(NIGHTLY, 1)
    server.faults.append(Fault(504, applied=True, delay=0.3))
    claiming = asyncio.create_task(holder.advance(NIGHTLY, 5))
    await eventually(lambda: not server.faults)
    await eventually(lambda: '"mark":5' in state_of(server, "grel.schedule.nightly"))
    assert not await other.advance(NIGHTLY, 5)
    assert await other.advance(NIGHTLY, 6)
    assert await claiming


async def test_a_conflict_with_ones_own_write_is_none(server: KubernetesServer, pods: list[Pod]) -> None:
    holder, other, _ = pods
    await holder.take(CART, "a.1", 10)
    server.faults.append(Fault(409, applied=True))
    grant = await holder.renew(CART, "a.1", 10)
    assert grant
    server.faults.append(Fault(409, applied=True))
    assert await holder.drop(CART, "a.1")
    assert not await other.locked(CART)


async def test_a_storm_of_conflicts_is_weathered(server: KubernetesServer, pods: list[Pod]) -> None:
    server.faults.append(Fault(409, times=5))
    assert isinstance(await pods[0].take(CART, "a.1", 10), Grant)
    server.faults.append(Fault(409, times=10**6))
    with pytest.raises(TimeoutError):
        await pods[0].renew(CART, "a.1", 10)


async def test_a_write_that_may_still_come_is_kept_out(server: KubernetesServer, pods: list[Pod]) -> None:
    """The take was answered 504 and is done later; the release in between must not find the lock free and leave."""
    late, other, _ = pods
    await late.drop(CART, "a.0")
    server.faults += [Fault(504, late=0.3), Fault(504, methods=frozenset({"GET"}))]
    with pytest.raises(UnclearError):
        await late.take(CART, "a.1", 3600)
    await late.drop(CART, "a.1")
    await eventually(lambda: server.late == 0)
    assert not await other.locked(CART)


async def test_a_server_that_hangs_is_given_up_in_time(server: KubernetesServer, pods: list[Pod]) -> None:
    server.faults.append(Fault(-1, applied=True, delay=1.5, methods=frozenset({"GET", "POST", "PATCH"}), times=9))
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises((TimeoutError, ConnectionError)):
        await pods[0].take(CART, "a.1", 10)
    assert loop.time() - began < 2.3


async def test_a_server_that_is_gone_is_an_error_that_may_pass(server: KubernetesServer) -> None:
    pod = Pod(server)
    server.url = "http://127.0.0.1:9"
    async with pod:
        with pytest.raises(ConnectionError) as caught:
            await pod.take(CART, "a.1", 10)
        assert pod.transient(caught.value)


async def test_429_is_honoured(server: KubernetesServer, pods: list[Pod]) -> None:
    server.faults.append(Fault(429, retry_after=1))
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert isinstance(await pods[0].take(CART, "a.1", 10), Grant)
    assert 1 <= loop.time() - began < 1.5
    server.faults.append(Fault(429, retry_after=30))
    began = loop.time()
    with pytest.raises(ConnectionError):
        await pods[0].renew(CART, "a.1", 10)
    assert loop.time() - began < 1


async def test_a_lease_that_somebody_deleted_is_made_again_and_fences_rise(
    server: KubernetesServer, pods: list[Pod]
) -> None:
    holder, other, _ = pods
    first = await holder.take(CART, "a.1", 10)
    server.leases.clear()
    assert await holder.renew(CART, "a.1", 10) is None
    second = await other.take(CART, "b.1", 10)
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert second.fence > first.fence - 2_000_000  # dates have whole seconds


async def test_rules_that_wait_for_an_answer_share_the_next_write(server: KubernetesServer, pods: list[Pod]) -> None:
    server.delay = lambda: 0.02
    taking = [asyncio.create_task(pods[0].take(BOOK, f"a.{n}", 10, shared=True)) for n in range(50)]
    grants = await asyncio.gather(*taking)
    assert all(isinstance(grant, Grant) for grant in grants)
    assert len(server.calls) < 8
    rules = [pods[0].take(CART, "a.1", 10), pods[0].take(CART, "b.1", 10), pods[0].drop(CART, "a.1")]
    granted, refused, released = await asyncio.gather(*rules)
    assert isinstance(granted, Grant)
    assert isinstance(refused, Busy)
    assert released is True


# Who may.


async def test_a_role_without_patch_is_enough(server: KubernetesServer, pods: list[Pod]) -> None:
    server.verbs["app"] = frozenset({"get", "create", "update"})
    holder, other, _ = pods
    await holder.take(CART, "a.1", 10)
    lease_of(server)["metadata"]["annotations"]["example.com/mine"] = "kept"
    assert await holder.renew(CART, "a.1", 10)
    assert isinstance(await other.take(CART, "b.1", 10), Busy)
    assert await holder.drop(CART, "a.1")
    assert isinstance(await other.take(CART, "b.1", 10), Grant)
    assert lease_of(server)["metadata"]["annotations"]["example.com/mine"] == "kept"
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert isinstance(await holder.take(CART, "a.2", 10), Busy)
    await other.renew(CART, "b.1", 10)
    assert loop.time() - began < 0.3  # it does not ask for what it may not each time
    holder.passes(20)  # to it, the lease that it saw has lapsed: only the version tells that it was renewed
    assert isinstance(await holder.take(CART, "a.2", 10), Busy)


async def test_the_printed_role_is_enough_and_has_nothing_to_spare(server: KubernetesServer, pods: list[Pod]) -> None:
    role, binding = yaml.safe_load_all(rbac_yaml("shop"))
    assert {thing["metadata"]["namespace"] for thing in (role, binding)} == {"shop"}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (rule,) = role["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
    server.verbs["app"] = frozenset(rule["verbs"])
    holder, other, _ = pods
    async with Lock("cart", backend=holder.lock()):
        waiting = asyncio.create_task(Lock("cart", backend=other.lock()).acquire(timeout=5))
        await eventually(lambda: any("watch=true" in call for call in server.calls))
        await eventually(lambda: in_line(server, CATALOG))
    await (await waiting).release()
    used = {"GET": "get", "POST": "create", "PATCH": "patch"}
    verbs = {used[call.split()[0]] for call in server.calls} | {"list", "watch"}
    assert verbs == set(rule["verbs"])


async def test_without_the_right_to_watch_waiters_poll_and_it_is_said_once(
    server: KubernetesServer, pods: list[Pod], caplog: pytest.LogCaptureFixture
) -> None:
    server.verbs["app"] = VERBS - {"watch", "list"}
    holder, other, _ = pods
    async with Lock("cart", backend=holder.lock()):
        waiting = asyncio.create_task(Lock("cart", backend=other.lock(), retry_interval=0.05).acquire(timeout=9))
        await eventually(lambda: len(caplog.records) == 1)
        assert not await other.listen()
    loop = asyncio.get_running_loop()
    began = loop.time()
    handle = await waiting
    assert loop.time() - began < 0.3
    await handle.release()
    assert [record.message for record in caplog.records if "poll" in record.message] == [caplog.records[0].message]


async def test_a_missing_right_may_be_on_its_way_and_is_an_error_later(
    server: KubernetesServer, pods: list[Pod]
) -> None:
    pod = pods[0]
    server.verbs["app"] = frozenset()
    taking = asyncio.create_task(pod.take(CART, "a.1", 10))
    await eventually(lambda: len(server.calls) > 2)
    server.verbs["app"] = VERBS
    assert isinstance(await taking, Grant)
    server.verbs["app"] = frozenset()
    with pytest.raises(CoordinationBackendError, match="schema kubernetes") as caught:
        await pod.renew(CART, "a.1", 10)
    assert pod.transient(caught.value)
    pod._opened -= 60
    assert not pod.transient(caught.value)


async def test_a_missing_namespace_is_a_clear_error(server: KubernetesServer) -> None:
    server.verbs["app"] = VERBS
    async with Pod(server) as pod:
        pod._api._namespace = "nowhere"
        with pytest.raises(CoordinationBackendError, match="nowhere"):
            await pod.take(CART, "a.1", 10)


def kubeconfig(path: Path, server: KubernetesServer, token: str = "secret", **cluster: Any) -> str:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "c", "cluster": {"server": server.url, **cluster}}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
            }
        )
    )
    return str(path)


async def test_a_kubeconfig_says_where_and_a_new_token_is_read_from_it(
    server: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kubeconfig(tmp_path / "config", server)
    async with KubernetesLockAdapter(kubeconfig=path) as backend:
        handle = await Lock("cart", backend=backend).acquire()
        server.tokens = {"another": "app"}
        kubeconfig(tmp_path / "config", server, "another")
        await handle.extend()
        server.tokens = {}
        with pytest.raises(CoordinationBackendError, match="401"):
            await handle.extend()
    server.tokens = {"another": "app"}
    monkeypatch.setenv("KUBECONFIG", path)
    async with KubernetesLeaderElectionAdapter(namespace="default") as elections:
        assert (await elections.acquire_or_renew(name="jobs", token="a.1", duration=5)).holder == "a.1"


async def test_a_pod_finds_its_cluster_and_reads_a_rotated_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes_asyncio.config import incluster_config

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    tls = tls_for(authority)
    (tmp_path / "namespace").write_text("default\n")
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with kubernetes_server(tls) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
        async with KubernetesProvider() as provider:
            await provider.take(CART, "a.1", 10)
            server.tokens = {"rotated": "app"}
            (tmp_path / "token").write_text("rotated\n")
            assert await provider.renew(CART, "a.1", 10)


def tls_for(authority: trustme.CA) -> Any:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


async def test_no_cluster_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CoordinationBackendError, match="give kubeconfig="):
        await KubernetesProvider(kubeconfig=str(tmp_path / "none")).__aenter__()


async def test_a_borrowed_client_stays_open(server: KubernetesServer) -> None:
    from kubernetes_asyncio.client import ApiClient, Configuration

    configuration = Configuration(host=server.url)
    configuration.api_key["BearerToken"] = "Bearer secret"
    async with ApiClient(configuration) as client:
        async with KubernetesProvider.from_client(client, namespace="default") as provider:
            await provider.take(CART, "a.1", 10)
        async with KubernetesProvider.from_client(client) as provider:
            assert await provider.locked(CART)


# Wake-ups.


async def test_a_watch_survives_its_end_its_silence_and_old_versions(server: KubernetesServer, pods: list[Pod]) -> None:
    holder, other, _ = pods
    for trouble in ("compact", "end", "silent"):
        lock = Lock(trouble, backend=holder.lock())
        handle = await lock.acquire()
        waiting = asyncio.create_task(Lock(trouble, backend=other.lock()).acquire(timeout=5))
        await eventually(partial(in_line, server, f"grel.lock.{trouble}"))
        if trouble == "compact":
            server.compact()
            server.end_watches()
            await eventually(lambda: sum("watch=true" in call for call in server.calls) > 2)
        elif trouble == "end":
            server.end_watches()
        server.silent = trouble == "silent"
        loop = asyncio.get_running_loop()
        began = loop.time()
        await handle.release()
        await (await waiting).release()
        assert loop.time() - began < (2 if trouble == "silent" else 0.9)


async def test_an_idle_process_watches_nothing(server: KubernetesServer, pods: list[Pod]) -> None:
    holder, other, _ = pods
    async with Lock("cart", backend=holder.lock()):
        with pytest.raises(TimeoutError):
            await Lock("cart", backend=other.lock()).acquire(timeout=0.1)
    await eventually(lambda: not server.watching())


async def test_renewals_wake_nobody(server: KubernetesServer, pods: list[Pod]) -> None:
    holder, other, _ = pods
    await holder.take(CART, "a.1", 10)
    with other.watch(CART) as watch:
        assert await other.listen()
        await watch.wait(0.1)  # the hint about what may have been missed before
        await other.take(CART, "b.1", 10, queue=10)
        for _ in range(3):
            await holder.renew(CART, "a.1", 10)
        began = asyncio.get_running_loop().time()
        await watch.wait(0.2)
        assert asyncio.get_running_loop().time() - began >= 0.2
        await holder.drop(CART, "a.1")
        await watch.wait(5)
    assert isinstance(await other.take(CART, "b.1", 10), Grant)


# What people see.


async def test_kubectl_tells_the_truth(server: KubernetesServer, pods: list[Pod]) -> None:
    holder, other, _ = pods
    await holder.take(CART, "web-7.secret", 0.5)
    lease = lease_of(server)
    assert lease["spec"]["holderIdentity"] == "web-7"
    assert lease["spec"]["leaseDurationSeconds"] == 1
    assert lease["spec"]["leaseTransitions"] == 0
    assert lease["metadata"]["annotations"]["grel.dev/name"] == "cart"
    assert lease["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "grel"
    await holder.renew(CART, "web-7.secret", 20.2)
    assert lease_of(server)["spec"]["leaseDurationSeconds"] == 21
    await holder.drop(CART, "web-7.secret")
    assert lease_of(server)["spec"]["holderIdentity"] == ""
    assert kubernetes_api.micro_time(1_800_000_000_000_000) == "2027-01-15T08:00:00.000000Z"
    await other.take(CART, "web-8.secret", 10)
    assert lease_of(server)["spec"]["leaseTransitions"] == 1
    await holder.take(BOOK, "web-7.secret", 10, shared=True)
    assert lease_of(server, "grel.rwlock.book")["spec"]["holderIdentity"] == "1 readers"


async def test_no_token_can_be_read_off_a_lease(server: KubernetesServer, pods: list[Pod]) -> None:
    holder, other, _ = pods
    secret = secrets.token_hex(16)
    await holder.take(BOOK, f"web.{secret}", 10)
    await other.take(BOOK, f"wait.{secret}", 10, queue=5)
    await holder.downgrade(BOOK, f"web.{secret}", 10)
    text = json.dumps(server.leases)
    assert secret not in text
    record, _ = await other.peek(BOOK)
    (sealed,) = record.readers
    assert not await other.drop(BOOK, sealed)
    assert await other.owned(BOOK, f"web.{secret}")


async def test_a_lease_of_somebody_else_and_of_a_newer_format_is_left_alone(
    server: KubernetesServer, pods: list[Pod]
) -> None:
    holder, other, _ = pods
    await holder.take(CART, "a.1", 10)
    lease_of(server)["metadata"]["annotations"]["grel.dev/format"] = "2"
    with pytest.raises(CoordinationBackendError, match="upgrade"):
        await other.take(CART, "b.1", 10)
    with pytest.raises(CoordinationBackendError):
        await Lock("cart", backend=other.lock()).acquire(timeout=1)
    del lease_of(server)["metadata"]["annotations"]
    lease_of(server)["metadata"]["resourceVersion"] = "7"
    with pytest.raises(CoordinationBackendError, match="prefix"):
        await other.take(CART, "b.1", 10)
    lease_of(server)["spec"] = {}
    assert isinstance(await other.take(CART, "b.1", 10), Grant)


async def test_a_lease_holds_so_many_readers_and_says_so(pods: list[Pod]) -> None:
    holder = pods[0]
    tokens = [f"{'reader' * 1000}-{number}.x" for number in range(50)]
    taking = [holder.take(BOOK, token, 10, shared=True) for token in tokens]
    answers = await asyncio.gather(*taking, return_exceptions=True)
    let_in = [token for token, answer in zip(tokens, answers, strict=True) if isinstance(answer, Grant)]
    assert 30 < len(let_in) < 45
    assert all("readers" in str(answer) for answer in answers if not isinstance(answer, Grant))
    assert await holder.renew(BOOK, let_in[0], 10)
    assert await holder.drop(BOOK, let_in[0])


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=300), st.sampled_from(["lock", "rwlock"])), unique=True, max_size=9)
)
def test_names_never_meet_and_are_names(pairs: list[tuple[str, str]]) -> None:
    pairs = [pair for pair in pairs if pair[0].isprintable()]
    names = [lease_name("grel", Key(kind, name)) for name, kind in pairs]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 253 and NAME.fullmatch(name) for name in names)


def test_names_made_to_meet_do_not() -> None:
    same = ["users:42", "users/42", "users.42", "USERS_42", "users-42", "users42", "-users42", "users42-"]
    same += ["usersz3a42", "usersz3z342", "x" * 300, "x" * 301, "x" * 300 + "y"]
    names = [lease_name("grel", Key("lock", name)) for name in same]
    assert len(set(names)) == len(names)
    assert "grel.lock.users-42" in names
    prefix = "p" * 175
    hashed = lease_name(prefix, Key("lock", "y" * 200))
    for name in (hashed.rpartition(".")[2], hashed.rpartition(".")[2].removeprefix("zz")):
        assert lease_name(prefix, Key("lock", name)) != hashed


async def test_importing_the_library_imports_no_client() -> None:
    code = "import sys, grel_core.coordination; print('aiohttp' in sys.modules or 'kubernetes_asyncio' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().strip() == "False"
