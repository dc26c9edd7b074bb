"""Kubernetes: leases kept as Lease objects of the cluster that the application runs in. No server of its own.

An API server offers compare-and-swap and no clock. So the rules run here, on a record read before, and a write counts
only if nobody else wrote meanwhile; and every client counts on its own monotonic clock, from when it first saw a claim.
docs/kubernetes.md says why that is safe.
"""

import asyncio
import json
import math
import random
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self, cast

from grel_core.errors import CoordinationBackendError
from grel_core.lease.backend import T
from grel_core.lease.names import Key
from grel_core.lease.rules import Instant, Peek, Record, Rule, Waiter, heirs, settle
from grel_core.providers import kubernetes_api as api
from grel_core.providers.base import Provider
from grel_core.providers.kubernetes_api import Lease

Moment = tuple[int, str]
"""An instant of a record on this client's clock, and the write that set it."""

rbac_yaml = api.rbac_yaml

FORMAT = 1
MARK = "grel.dev/"
"""In front of our annotations and labels."""
LARGEST = 240_000
"""Bytes of state with which nobody more is let in: an API server takes 262,144 bytes of annotations."""
WRITERS = 32
"""So many last writers are named in a Lease, so that one whose answer was lost finds out."""
REMEMBERED = 4096
"""Names, and tokens, of which a process remembers what it saw last."""
STARTING = 10.0
"""Seconds after the start for which a missing right may be one that is still on its way."""
KEPT = ("fence", "holder", "duration", "since", "renewed", "meta", "lapsed", "transitions", "mark")
"""What of a record is the same on every clock."""


@dataclass(frozen=True, slots=True)
class View:
    """One Lease as this client sees it."""

    record: Record = field(default_factory=Record)
    moments: Mapping[str, Moment] = field(default_factory=dict)
    writers: tuple[str, ...] = ()
    """The last writes, the latest one first."""
    version: Mapping[str, str] | None = None
    """`uid` and `resourceVersion`; None when there is no such Lease."""

    def write(self, record: Record) -> "View":
        """The view of one who writes `record` over this one."""
        writer = secrets.token_hex(6)
        moments = {}
        for name, at in instants(record).items():
            known = self.moments.get(name)
            moments[name] = known if known and known[0] == at else (at, writer)
        return View(record, moments, (writer, *self.writers)[:WRITERS], self.version)


def instants(record: Record) -> dict[str, int]:
    """Every instant in `record`, by a name of its own."""
    return {
        "until": record.until,
        "start": record.start,
        "ended": record.ended,
        **{f"r:{token}": until for token, until in record.readers.items()},
        **{f"w:{waiter.token}": waiter.until for waiter in record.waiters},
    }


def encode(view: View, at: Instant) -> tuple[dict[str, str], dict[str, Any]]:
    """Annotations that hold all of `view`, instants as their distance from now, and a spec that tells people."""
    record, held = view.record, view.record.holder is not None
    who = (record.holder or "").rpartition(".")[0] or "unknown"
    state = {name: getattr(record, name) for name in KEPT}
    state["moments"] = {name: (when - at.now, writer) for name, (when, writer) in view.moments.items()}
    state["line"] = [(waiter.shared, waiter.called) for waiter in record.waiters]
    text = json.dumps(state, ensure_ascii=False, separators=(",", ":"))
    notes = {f"{MARK}format": str(FORMAT), f"{MARK}writers": " ".join(view.writers), f"{MARK}state": text}
    ends = record.until if held else max(record.readers.values(), default=at.now)
    renewed = record.renewed if held else at.wall
    seconds = math.ceil((at.wall + ends - at.now - renewed) / 1_000_000)
    return notes, {
        "holderIdentity": who if held else f"{len(record.readers)} readers" if record.readers else "",
        "leaseDurationSeconds": min(max(seconds, 1), 2**31 - 1),
        "acquireTime": api.micro_time(record.since or at.wall),
        "renewTime": api.micro_time(renewed),
        "leaseTransitions": record.transitions,
    }


def decode(lease: Lease, now: int, known: Iterable[View] = ()) -> View:
    """What `lease` says, as seen at `now` and in earlier views.

    An instant counts from when it was first seen. Whoever sees it later sees it too late, never too early, so that of
    two sightings of what one write set the earlier one is nearer to the truth.

    Raises:
        CoordinationBackendError: it is not ours, or of a newer format.
    """
    metadata = lease["metadata"]
    notes, version = metadata.get("annotations", {}), api.version_of(lease)
    if not (form := notes.get(f"{MARK}format", "")) and not lease.get("spec", {}).get("holderIdentity"):
        return View(version=version)
    if not form.isdigit() or int(form) > FORMAT:
        raise CoordinationBackendError(f"Lease {metadata['name']!r} has format {form!r}; upgrade, or change the prefix")
    state = json.loads(notes[f"{MARK}state"])
    at = {}
    for name, (distance, writer) in state["moments"].items():
        seen = [view.moments[name][0] for view in known if view.moments.get(name, ())[1:] == (writer,)]
        at[name] = min([now + distance, *seen])
    places = [(name[2:], until) for name, until in at.items() if name.startswith("w:")]
    record = Record(
        **{name: state[name] for name in KEPT},
        until=at["until"],
        start=at["start"],
        ended=at["ended"],
        readers={name[2:]: until for name, until in at.items() if name.startswith("r:")},
        waiters=tuple(Waiter(*place, *how) for place, how in zip(places, state["line"], strict=True)),
    )
    moments = {name: (when, state["moments"][name][1]) for name, when in at.items()}
    return View(record, moments, tuple(notes[f"{MARK}writers"].split()), version)


def _run(rules: Iterable[Rule[Any]], record: Record, at: Instant) -> tuple[Record, list[Any]]:
    answers = []
    for rule in rules:
        record, answer = rule(record, at)
        answers.append(answer)
    return record, answers


def _remember(memory: "OrderedDict[Any, Any]", key: Any, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)


class Job(NamedTuple):
    """A rule on its way to a Lease, and who waits for its answer."""

    rule: Rule[Any]
    answer: "asyncio.Future[Any]"
    deadline: float


class KubernetesProvider(Provider):
    """Leases in `namespace` of a cluster: that of `kubeconfig` (else `KUBECONFIG`) and `context`, else the pod's own.

    Without a namespace, it is that of the pod or of the context. `rbac_yaml` has the role that it takes.
    """

    def __init__(
        self,
        namespace: str | None = None,
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
        prefix: str = "grel",
        backend_timeout: float = 5.0,
    ) -> None:
        super().__init__(prefix=prefix, backend_timeout=backend_timeout)
        self.namespace = namespace
        self._place = (kubeconfig, context)
        self._client: Any = None
        # A label has 63 characters; two long prefixes that share one only get each other's hints.
        self._labels = {"app.kubernetes.io/managed-by": "grel", f"{MARK}prefix": api.spell(prefix)[:63].rstrip("-")}
        self._name = lru_cache(REMEMBERED)(lambda key: api.lease_name(self.prefix, key))

    @classmethod
    def from_client(cls, client: Any, *, namespace: str = "default", **options: Any) -> Self:
        """A provider on an `ApiClient` of kubernetes-asyncio, which stays yours to close."""
        provider = cls(namespace, **options)
        provider._client = client
        return provider

    def identity(self) -> Any:
        return type(self), self._client or self._place, self.namespace, self.prefix, self.backend_timeout

    def __repr__(self) -> str:
        return f"<KubernetesProvider {self.namespace or 'in its own namespace'}>"

    def _forget(self) -> None:
        super()._forget()
        self._views: OrderedDict[Key, View] = OrderedDict()
        self._tokens: OrderedDict[str, str] = OrderedDict()
        """What the tokens that were used here look like in a Lease, and what they are."""
        self._doubts: dict[Key, Mapping[str, str] | None] = {}
        """Versions over which a write may still come that was never answered."""
        self._jobs: dict[Key, list[Job]] = {}
        self._workers: dict[Key, asyncio.Task[None]] = {}

    def _cluster(self) -> api.Cluster:
        if self._client is not None:
            return api.describe(self._client.configuration, self.namespace or "default", tls=False)
        return api.find(*self._place)

    async def _open(self) -> None:
        session = self._client and self._client.rest_client.pool_manager
        self._api = api.LeaseApi(self._cluster, self.namespace, self.backend_timeout, session)
        await self._api.open()
        self._opened = self.loop.time()
        self._watcher = api.LeaseWatch(self._api, self._labels, self.watches, self._hint)

    async def _drain(self) -> None:
        await super()._drain()
        if self._workers:
            await asyncio.wait(set(self._workers.values()))

    async def _close(self) -> None:
        await self._watcher.close()
        await self._api.close()

    def transient(self, error: BaseException) -> bool:
        if isinstance(error, api.RefusedError) and error.status == api.FORBIDDEN:
            return self.loop.time() < self._opened + STARTING
        return super().transient(error)

    async def listen(self) -> bool:
        self.check_loop()
        return await self._watcher.listen()

    def _hint(self, lease: Lease) -> None:
        """Wake whoever of this process may come in."""
        notes = lease["metadata"].get("annotations", {})
        now = self._instant().now
        with suppress(CoordinationBackendError, LookupError, ValueError):  # somebody else's, or spoilt by hand
            if any(token in self._tokens for token in heirs(settle(decode(lease, now).record, now))):
                self.watches.wake(Key(notes[f"{MARK}kind"], notes[f"{MARK}name"]))

    async def owned(self, key: Key, token: str) -> bool:
        _remember(self._tokens, api.seal(token), token)
        return await super().owned(key, token)

    async def apply(self, key: Key, rule: Rule[T]) -> T:
        loop = self.check_loop()
        if (token := getattr(rule, "token", None)) is not None:
            _remember(self._tokens, api.seal(token), token)
            rule = cast("Rule[T]", replace(cast(Any, rule), token=api.seal(token)))
        job = Job(rule, loop.create_future(), loop.time() + self.backend_timeout)
        self._jobs.setdefault(key, []).append(job)
        if key not in self._workers:
            self._workers[key] = loop.create_task(self._work(key), name=f"grel: {key.kind} {key.name!r}")
        async with asyncio.timeout_at(job.deadline):
            answer = await job.answer
        return cast(T, self._unsealed(*answer) if isinstance(rule, Peek) else answer)

    def _unsealed(self, record: Record, at: Instant) -> tuple[Record, Instant]:
        """`record` with the tokens of this process as they are; those of others stay sealed."""
        own = self._tokens
        return replace(
            record,
            holder=None if record.holder is None else own.get(record.holder, record.holder),
            readers={own.get(token, token): until for token, until in record.readers.items()},
            waiters=tuple(waiter._replace(token=own.get(waiter.token, waiter.token)) for waiter in record.waiters),
        ), at

    async def _work(self, key: Key) -> None:
        """Run the rules for one key in turn. Those that come while others are under way share the next write."""
        while jobs := [job for job in self._jobs.pop(key, ()) if job.deadline > self.loop.time()]:
            await self._commit(key, jobs)
        del self._workers[key]

    async def _commit(self, key: Key, jobs: list[Job]) -> None:
        settling = self._settle(key, [job.rule for job in jobs], max(job.deadline for job in jobs))
        task = self.loop.create_task(settling, name="grel: rules")
        await asyncio.wait([task])
        error = task.exception()
        if isinstance(error, CoordinationBackendError) and len(jobs) > 1:
            for job in jobs:  # one that cannot be done is no reason to refuse the others
                await self._commit(key, [job])
            return
        for number, job in enumerate(jobs):
            if not job.answer.done() and error is not None:
                job.answer.set_exception(error)
            elif not job.answer.done():
                job.answer.set_result(task.result()[number])

    async def _settle(self, key: Key, rules: list[Rule[Any]], deadline: float) -> list[Any]:
        """Run `rules` until it is certain what came of them."""
        sent: dict[str, tuple[View, list[Any]]] = {}
        # What was seen last is worth one try: if a write over it succeeds, it was the latest.
        last, pause = self._views.get(key), 0.005
        while True:
            view = last or await self._look(key, deadline, [seen for seen, _ in sent.values()])
            if mine := sent.keys() & set(view.writers):  # its answer was lost, or was a conflict with itself
                return sent[mine.pop()][1]
            at = self._instant()
            before = settle(view.record, at.now)
            record, answers = _run(rules, before, at)
            # A write that may still come is kept out by one that comes first.
            if record is not before or (last is None and key in self._doubts):
                written = view.write(record)
                sent[written.writers[0]] = written, answers
                if await self._write(key, view, written, at, deadline):
                    return answers
                await asyncio.sleep(random.uniform(0, pause))
                pause = min(2 * pause, 0.2)
            elif last is None:
                return answers
            last = None

    async def _look(self, key: Key, deadline: float, sent: list[View]) -> View:
        """The Lease as it is now."""
        lease = await self._api.get(self._name(key), deadline)
        last = self._views.get(key)
        view = View() if lease is None else decode(lease, self._instant().now, [*sent, last] if last else sent)
        if key in self._doubts and self._doubts[key] != view.version:
            del self._doubts[key]  # that write came, or can come no more
        _remember(self._views, key, view)
        return view

    async def _write(self, key: Key, old: View, new: View, at: Instant, deadline: float) -> bool:
        """Put `new` in the place of `old`. False: look what is there now."""
        notes, spec = encode(new, at)
        if len(new.moments) > len(old.moments) and len(notes[f"{MARK}state"].encode()) > LARGEST:
            claims = f"{len(old.record.readers)} readers and {len(old.record.waiters)} waiters"
            raise CoordinationBackendError(f"{key.kind} {key.name!r}: its Lease is full, with {claims}; try later")
        notes |= {f"{MARK}kind": key.kind, f"{MARK}name": key.name}
        metadata = {"name": self._name(key), "labels": self._labels, "annotations": notes, **(old.version or {})}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        try:
            answer = await self._api.write(lease, deadline)
        except (api.UnclearError, TimeoutError):
            self._doubts[key] = old.version
            return False
        match answer.status:
            case 409:
                return False
            case 404 if old.version is not None:
                return False
        made = answer.certain(f"{key.kind} {key.name!r}")
        self._doubts.pop(key, None)
        _remember(self._views, key, replace(new, version=api.version_of(made)))
        return True

    def _instant(self) -> Instant:
        """The clock of this client, and the server's wall clock as the `Date` of its answers shows it."""
        now = self.loop.time()
        return Instant(round(now * 1_000_000), round((now + self._api.ahead) * 1_000_000))
