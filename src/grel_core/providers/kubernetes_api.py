"""Leases as an API server takes them: over HTTP, by name, with credentials that are read again.

kubernetes-asyncio finds the cluster and the credentials. The requests are made here, on the aiohttp that comes with it:
its own client knows no deadlines, cannot clear a field, and fails on a 429. docs/kubernetes.md has the list.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import random
import re
import ssl
import string
import urllib.request
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from grel_core.clock import from_microseconds, utcnow
from grel_core.errors import CoordinationBackendError
from grel_core.lease.names import Key
from grel_core.lease.queue import Watches

logger = logging.getLogger("grel")

PLAIN = frozenset(string.ascii_lowercase.replace("z", "") + string.digits + "-")
LONGEST = 253
"""Bytes of a name."""
PATIENCE = 1.0
"""Seconds for which a 403 is asked again, as a server that just started knows no roles; and a watch opens or idles."""
WATCH = 60
"""Seconds after which a watch is opened anew: a server that went away may leave it open and silent for as long."""
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, BUSY = map(HTTPStatus, (401, 403, 404, 429))
Lease = dict[str, Any]


class UnclearError(ConnectionError):
    """No answer, or one that leaves open whether anything was done."""


class RefusedError(CoordinationBackendError):
    """The API server said no."""

    def __init__(self, status: int, what: str, message: str) -> None:
        self.status = status
        hint = "; `python -m grel_core schema kubernetes` prints the role it takes" * (status == FORBIDDEN)
        super().__init__(f"{what}: the API server answered {status}, {message!r}{hint}")


class Answer(NamedTuple):
    """What the API server said."""

    status: int
    body: Lease
    retry_after: float = 0

    def certain(self, what: str) -> Lease:
        """The body, if the answer is the one hoped for; else `RefusedError`."""
        if self.status in {HTTPStatus.OK, HTTPStatus.CREATED}:
            return self.body
        raise RefusedError(self.status, what, self.body.get("message", ""))


class Cluster(NamedTuple):
    """Where the API server is, and as whom it is called."""

    host: str
    headers: Mapping[str, str]
    options: Mapping[str, Any]
    namespace: str


def find(kubeconfig: str | None, context: str | None) -> Cluster:
    """The cluster of a kubeconfig, else the one that this pod runs in. Blocks, since it reads files: for a thread."""
    from kubernetes_asyncio import client, config

    configuration = client.Configuration()
    path = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        if path is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
            beside = Path(config.incluster_config.SERVICE_TOKEN_FILENAME).with_name("namespace")
            return describe(configuration, beside.read_text(encoding="utf-8").strip())
        load = config.load_kube_config(path, context, client_configuration=configuration, persist_config=False)
        current: Any = asyncio.run(load).current_context
        return describe(configuration, current["context"].get("namespace") or "default")
    except (config.ConfigException, OSError, TypeError) as error:
        raise CoordinationBackendError(
            f"no Kubernetes cluster is known here ({error}); give kubeconfig=, set KUBECONFIG, or run inside a pod"
        ) from error


def describe(configuration: Any, namespace: str, *, tls: bool = True) -> Cluster:
    """What is needed of a `Configuration` of kubernetes-asyncio; without `tls`, the session brings its own."""
    options = {"proxy": configuration.proxy, "server_hostname": configuration.tls_server_name}
    if tls and configuration.host.startswith("https:"):
        options["ssl"] = made = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            made.load_cert_chain(configuration.cert_file, configuration.key_file)
        if not configuration.verify_ssl:
            made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    # A token file may end in a line break, which no header can hold.
    key: Any = configuration.get_api_key_with_prefix("BearerToken")
    token = ((asyncio.run(key) if asyncio.iscoroutine(key) else key) or "").strip()
    headers = {"Accept": "application/json"} | ({"Authorization": token} if token else {})
    return Cluster(configuration.host.rstrip("/"), headers, {k: v for k, v in options.items() if v}, namespace)


def lease_name(prefix: str, key: Key) -> str:
    """What the Lease of `key` is called: no two keys meet, and plain names stay readable.

    `z` and two digits stand for a byte that Kubernetes does not take, so that `zz` can only announce a hash.
    """
    text = ".".join(map(spell, (prefix, *key)))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text if len(text) <= LONGEST else f"{text[:180].rstrip('.-')}.zz{digest}"


def spell(text: str) -> str:
    """`text` in letters, digits and inner hyphens, reversibly."""
    spelled = "".join(c if c in PLAIN else "".join(f"z{byte:02x}" for byte in c.encode()) for c in text)
    return re.sub("^-|-$", "z2d", spelled)


def micro_time(microseconds: int) -> str:
    """The only spelling of a time that an API server takes: six digits, always."""
    return from_microseconds(microseconds).isoformat(timespec="microseconds").replace("+00:00", "Z")


def version_of(lease: Lease) -> dict[str, str]:
    """What tells this state of `lease` from any other, also of one that is deleted and made again."""
    return {name: lease["metadata"][name] for name in ("uid", "resourceVersion")}


def seal(token: str) -> str:
    """What a Lease holds of a token: everybody who may read Leases sees it, and cannot make the token of it."""
    return f"{token.rpartition('.')[0]}.{hashlib.sha256(token.encode()).hexdigest()[:32]}"


def rbac_yaml(namespace: str) -> str:
    """The Role and RoleBinding with the fewest rights that suffice in `namespace`."""
    template = resources.files(__package__).joinpath("kubernetes.yaml").read_text(encoding="utf-8")
    return template.replace("{namespace}", namespace)


class LeaseApi:
    """Requests about Leases."""

    def __init__(
        self, find: Callable[[], Cluster], namespace: str | None, timeout: float, session: aiohttp.ClientSession | None
    ) -> None:
        self._find, self._timeout, self._borrowed = find, timeout, session
        self._namespace = namespace
        self._puts = False
        self._loop = asyncio.get_running_loop()
        self._finding = asyncio.Lock()
        self.ahead = -math.inf
        """Seconds since 1970 by the server's clock, less those of the event loop's."""

    async def open(self) -> None:
        """Find the cluster. Nothing is sent yet: a server that is down now may be up when it is needed."""
        self._cluster = await asyncio.to_thread(self._find)
        proxies = bool(urllib.request.getproxies())
        self._session = self._borrowed or aiohttp.ClientSession(trust_env=proxies, read_bufsize=2**21)

    async def close(self) -> None:
        """Close what was opened."""
        if self._borrowed is None:
            await self._session.close()

    async def get(self, name: str, deadline: float) -> Lease | None:
        """The Lease `name`, by the word of the store itself; None when there is none."""
        answer = await self.call("GET", name, deadline)
        return None if answer.status == NOT_FOUND else answer.certain(f"Lease {name!r}")

    async def write(self, lease: Lease, deadline: float) -> Answer:
        """Create `lease`, or change it if its metadata name the version that it has now."""
        name, ours = lease["metadata"]["name"], lease["metadata"]
        if "resourceVersion" not in ours:
            return await self.call("POST", "", deadline, lease)
        if not self._puts:
            answer = await self.call("PATCH", name, deadline, lease)
            if answer.status != FORBIDDEN:
                return answer
        # A role made for elections may have `update` and lack `patch`.
        if (now := await self.get(name, deadline)) is None:
            return Answer(NOT_FOUND, {})
        theirs = now["metadata"]
        kept = {part: theirs.get(part, {}) | ours[part] for part in ("annotations", "labels")}
        answer = await self.call("PUT", name, deadline, {**lease, "metadata": theirs | ours | kept})
        self._puts = answer.status != FORBIDDEN
        return answer

    async def call(self, method: str, name: str, deadline: float, body: Any = None, **query: str) -> Answer:
        """One request. It is sent again only where the answer says that nothing was done.

        Raises:
            ConnectionError: it wants to be asked again, but not in time.
            UnclearError: the connection failed, or the server has trouble.
            TimeoutError: there was no answer by `deadline`, on the event loop's clock.
        """
        patience = self._loop.time() + min(PATIENCE, self._timeout / 4)
        renewed = False
        while True:
            cluster = self._cluster
            answer = await self._send(method, name, deadline, body, query)
            if answer.status == UNAUTHORIZED and not renewed:
                renewed = True
                await self._renew(cluster)
            elif answer.status == BUSY or (answer.status == FORBIDDEN and self._loop.time() < patience):
                pause = answer.retry_after or 0.1
                if self._loop.time() + pause >= deadline:
                    raise ConnectionError(f"the API server answered {answer.status}, to be asked again in {pause} s")
                await asyncio.sleep(pause)
            else:
                return answer

    async def _renew(self, stale: Cluster) -> None:
        """Read the credentials again, unless somebody did since `stale` was read."""
        async with self._finding:
            if self._cluster is stale:
                self._cluster = await asyncio.to_thread(self._find)

    async def _send(self, method: str, name: str, deadline: float, body: Any, query: Mapping[str, str]) -> Answer:
        # Half of the time at most, so that some is left to find out what became of a write.
        left = min(deadline - self._loop.time(), self._timeout / 2)
        if left <= 0:
            raise TimeoutError("the API server did not answer in time")
        query = {"timeout": f"{round(left * 1000) + 1}ms", **query}
        try:
            async with self.request(method, name, query, left, body) as response:
                text = await response.read()
        except aiohttp.ClientError as error:
            raise UnclearError(f"{method} of a Lease: the connection to the API server failed") from error
        headers = response.headers
        date = parsedate_to_datetime(headers["Date"]) if "Date" in headers else utcnow()
        ahead = date.timestamp() - self._loop.time()
        if not ahead <= self.ahead <= ahead + 2:  # in whole seconds: an older estimate is often the better one
            self.ahead = ahead
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UnclearError(f"{method} of a Lease: the API server answered {response.status}")
        try:
            document = json.loads(text)
        except ValueError:  # the text of a 429 is no JSON
            document = {"message": text.decode(errors="replace")[:200]}
        pause = headers.get("Retry-After", "")
        return Answer(response.status, document, float(pause) if pause.isdigit() else 0)

    def request(self, method: str, name: str, query: Mapping[str, str], seconds: float, body: Any = None) -> Any:
        """The request, to be entered with `async with`."""
        cluster = self._cluster
        place = f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace or cluster.namespace}/leases/{name}"
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        return self._session.request(
            method,
            cluster.host + place.rstrip("/"),
            params=query,
            data=None if body is None else json.dumps(body, ensure_ascii=False).encode(),
            headers={**cluster.headers, "Content-Type": kind},
            timeout=aiohttp.ClientTimeout(total=seconds),
            **cluster.options,
        )


class LeaseWatch:
    """One watch over all Leases with a label, kept up for as long as somebody waits. It only gives hints."""

    def __init__(self, api: LeaseApi, labels: dict[str, str], watches: Watches, seen: Callable[[Lease], None]) -> None:
        self._api, self._watches, self._seen = api, watches, seen
        self._label = ",".join(f"{name}={value}" for name, value in labels.items())
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._hears = self._told = False

    async def listen(self) -> bool:
        """Make sure that the watch runs. False: right now it hears nothing."""
        if self._task is None or self._task.done():
            self._tried.clear()
            self._task = self._loop.create_task(self._run(), name="grel: watch Leases")
            self._loop.call_later(PATIENCE, self._check, self._task)
        try:
            async with asyncio.timeout(PATIENCE):
                await self._tried.wait()
        except TimeoutError:
            self._tried.set()  # it hangs: nobody else needs to wait for it
        return self._hears

    def _check(self, task: asyncio.Task[None]) -> None:
        if not self._watches:
            task.cancel()
        elif not task.done():
            self._loop.call_later(PATIENCE, self._check, task)

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        version, pause = "", 0.0
        while True:
            try:
                version, pause = await self._follow(version or await self._newest()), 0.0
            except (OSError, ValueError, CoordinationBackendError) as error:  # a time-out is an OSError, too
                version, forbidden = "", getattr(error, "status", 0) == FORBIDDEN
                pause = 30.0 if forbidden else 1.0
                if forbidden and not self._told:
                    logger.warning("waiters on Kubernetes poll, since Leases cannot be watched: %s", error)
                    self._told = True
            self._hears = False
            self._tried.set()
            await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _newest(self) -> str:
        """The version of the collection: that of a single Lease may be too old to watch from."""
        deadline = self._loop.time() + PATIENCE
        answer = await self._api.call("GET", "", deadline, labelSelector=self._label, limit="1")
        self._watches.wake_all()  # anything may have been missed
        version: str = answer.certain("listing Leases")["metadata"]["resourceVersion"]
        return version

    async def _follow(self, version: str) -> str:
        """Pass events on until the watch ends; the version to go on from, "" when that one is too old."""
        query = {"watch": "true", "labelSelector": self._label, "resourceVersion": version}
        query |= {"allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH)}
        try:
            async with self._api.request("GET", "", query, WATCH + 5) as response:
                Answer(response.status, {}).certain("watching Leases")
                self._hears = True
                self._tried.set()
                async for line in response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return ""
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._seen(event["object"])
        except aiohttp.ClientError as error:
            raise UnclearError("watching Leases: the connection failed") from error
        return version
