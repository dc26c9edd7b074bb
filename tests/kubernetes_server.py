"""A strict double of an API server's Leases, over real HTTP on loopback.

Its rules and errors are those of kube-apiserver 1.36; `vendor/test_kubernetes_contract.py` holds both to the same
checks. What it does not model it refuses with 501, so that no test passes on a guess. Faults can be planted.
"""

import asyncio
import copy
import json
import re
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

GROUP = "coordination.k8s.io"
API = f"{GROUP}/v1"
PATH = f"/apis/{API}/namespaces/{{namespace}}/leases"
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
NAME = re.compile(rf"{LABEL}(\.{LABEL})*")
QUALIFIED = re.compile(rf"({LABEL}(\.{LABEL})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"(?=.{0,63}$)([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,]\d{6}(Z|[+-]\d\d:\d\d)")
SPEC = {
    "holderIdentity": str,
    "leaseDurationSeconds": int,
    "leaseTransitions": int,
    "acquireTime": None,
    "renewTime": None,
}
META = {"name", "namespace", "uid", "resourceVersion", "creationTimestamp", "labels", "annotations", "managedFields"}
PATCHES = {f"application/{kind}+json" for kind in ("merge-patch", "strategic-merge-patch", "json-patch")}
WRITES = frozenset({"POST", "PUT", "PATCH"})
VERBS = frozenset({"get", "list", "watch", "create", "update", "patch", "delete"})
CHANGED = "the object has been modified; please apply your changes to the latest version and try again"
Lease = dict[str, Any]


class RefusalError(Exception):
    """What the server answers in the place of what was asked for."""

    def __init__(self, code: int, reason: str, message: str, details: Lease | None = None, **headers: str) -> None:
        self.code, self.headers = code, {name.replace("_", "-"): value for name, value in headers.items()}
        self.body: Lease = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
        self.body |= {"message": message} | ({"reason": reason} if reason else {})
        self.body |= {"details": details} if details else {}


def details(name: str | None, kind: str = "leases", **more: Any) -> Lease:
    return {**({"name": name} if name else {}), "group": GROUP, "kind": kind, **more}


def bad(message: str) -> RefusalError:
    return RefusalError(400, "BadRequest", message)


def undecodable(why: str) -> RefusalError:
    return bad(f'Lease in version "v1" cannot be handled as a Lease: {why}')


def invalid(name: str, field: str, why: str, reason: str = "FieldValueInvalid") -> RefusalError:
    causes = [{"reason": reason, "message": why, "field": field}]
    message = f'Lease.{GROUP} "{name}" is invalid: {field}: {why}'
    return RefusalError(422, "Invalid", message, details(name, "Lease", causes=causes))


def conflict(name: str, why: str = CHANGED, kind: str = "leases") -> RefusalError:
    message = f'Operation cannot be fulfilled on {kind}.{GROUP} "{name}": {why}'
    return RefusalError(409, "Conflict", message, details(name, kind))


def not_found(name: str) -> RefusalError:
    return RefusalError(404, "NotFound", f'leases.{GROUP} "{name}" not found', details(name))


def micro_time(value: Any) -> str:
    if not isinstance(value, str):
        raise undecodable("json: cannot unmarshal number into Go struct field LeaseSpec.spec of type string")
    try:
        if not MICRO_TIME.fullmatch(value):
            raise ValueError
        time = datetime.fromisoformat(value.replace(",", ".")).astimezone(UTC)
    except (ValueError, OverflowError):
        layout = "2006-01-02T15:04:05.000000Z07:00"
        raise undecodable(f'parsing time "{value}" as "{layout}": cannot parse') from None
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def typed(name: str, value: Any) -> Any:
    """One field of a spec, as Go reads it."""
    kind = SPEC[name]
    if kind is None:
        return micro_time(value)
    small = kind is str or (isinstance(value, int) and -(2**31) <= value < 2**31)
    if not isinstance(value, kind) or isinstance(value, bool) or not small:
        field = f"Go struct field LeaseSpec.spec.{name} of type {'string' if kind is str else 'int32'}"
        raise undecodable(f"json: cannot unmarshal {json.dumps(value)} into {field}")
    return value


def read(document: Any) -> tuple[Lease, list[str]]:
    """A Lease as the server's decoder makes it, and the fields that it drops."""
    if not isinstance(document, dict):
        raise undecodable("json: cannot unmarshal into Go value of type v1.Lease")
    if document.get("apiVersion", API) != API or document.get("kind", "Lease") != "Lease":
        raise undecodable(f"no kind {document.get('kind')!r} is registered for {document.get('apiVersion')!r}")
    metadata, spec = document.get("metadata") or {}, document.get("spec") or {}
    dropped = [f"metadata.{name}" for name in metadata if name not in META]
    dropped += [f"spec.{name}" for name in spec if name not in SPEC]
    metadata = {name: value for name, value in metadata.items() if name in META and value is not None}
    for name, value in metadata.items():
        texts = list(value.values()) if name in {"labels", "annotations"} and isinstance(value, dict) else [value]
        if name != "managedFields" and not all(isinstance(text, str) for text in texts):
            raise undecodable(f"json: cannot unmarshal into Go struct field ObjectMeta.metadata.{name} of type string")
    spec = {name: typed(name, value) for name, value in spec.items() if name in SPEC and value is not None}
    return {"kind": "Lease", "apiVersion": API, "metadata": metadata, "spec": spec}, dropped


def validate(lease: Lease) -> None:
    metadata, spec = lease["metadata"], lease["spec"]
    name = metadata.get("name", "")
    if not name:
        raise invalid(name, "metadata.name", "Required value: name or generateName is required", "FieldValueRequired")
    if len(name) > 253 or not NAME.fullmatch(name):
        raise invalid(name, "metadata.name", f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of')
    notes, labels = metadata.get("annotations", {}), metadata.get("labels", {})
    if any(not QUALIFIED.fullmatch(key) for key in (*notes, *labels)):
        raise invalid(name, "metadata.annotations", "Invalid value: a qualified name must consist of")
    if any(not LABEL_VALUE.fullmatch(value) for value in labels.values()):
        raise invalid(name, "metadata.labels", "Invalid value: a valid label must be")
    if sum(len(key.encode()) + len(value.encode()) for key, value in notes.items()) > 262_144:
        raise invalid(name, "metadata.annotations", "Too long: may not be more than 262144 bytes", "FieldValueTooLong")
    for field, least in (("leaseDurationSeconds", 1), ("leaseTransitions", 0)):
        if spec.get(field, least) < least:
            raise invalid(name, f"spec.{field}", f"Invalid value: {spec[field]}: must be greater than {least - 1}")


def merged(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merged(new.get(key), value)
    return new


def version(text: str) -> int:
    """A `resourceVersion`; the server does not say much about one that is no number."""
    if not text.isdigit():
        raise RefusalError(500, "", f'strconv.ParseUint: parsing "{text}": invalid syntax')
    return int(text)


@dataclass
class Fault:
    """What goes wrong with the next `times` requests by one of `methods`."""

    status: int = 0
    """What is answered; 0: the connection is cut, -1: what it should be."""
    methods: frozenset[str] = WRITES
    times: int = 1
    applied: bool = False
    """Whether it is done all the same."""
    late: float = 0.0
    """Seconds after the answer at which it is done."""
    wait: float = 0.0
    """Seconds before it is done."""
    delay: float = 0.0
    """Seconds that the answer takes then."""
    retry_after: int = 0

    def answer(self, request: web.Request) -> web.StreamResponse:
        if self.status == 0:
            assert request.transport is not None
            request.transport.abort()
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else {}
        if self.status == 429:
            text = "Too many requests, please try again later.\n"
            return web.Response(status=429, text=text, headers=headers)
        body = RefusalError(self.status, "Fault", "planted", None).body
        return web.json_response(body, status=self.status or 500, headers=headers)


class KubernetesServer:
    """Leases in memory, served by a thread. Attributes may be set, and `compact` called, from any other."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.url = ""
        self.tls = tls
        self.tokens = {"secret": "app"}
        self.verbs = {"app": VERBS}
        """What each user may do in the namespace `default`; nobody may do anything elsewhere."""
        self.leases: dict[str, Lease] = {}
        self.faults: list[Fault] = []
        self.delay: Callable[[], float] = lambda: 0.0
        self.silent = False
        """Watches stay open and say nothing."""
        self.calls: list[str] = []
        self.bookmark_interval = 60.0
        self._version = self._oldest = 100
        self._log: list[tuple[int, str, Lease]] = []
        self._watches: set[asyncio.Queue[tuple[int, str, Lease] | None]] = set()
        self.late = 0
        """Requests that were answered and are still to be done."""
        self._late: set[asyncio.Task[Any]] = set()

    async def serve(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        app = web.Application(client_max_size=3_145_728, middlewares=[self._around])
        app.router.add_route("*", PATH, self._collection)
        app.router.add_route("*", PATH + "/{name}", self._item)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self.tls).start()
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
        self._loop = asyncio.get_running_loop()
        ready()
        await stop.wait()
        self.end_watches()
        await runner.cleanup()

    def compact(self) -> None:
        """Forget what happened: a watch from before now gets a 410."""
        self._log.clear()
        self._version += 1
        self._oldest = self._version

    def watching(self) -> int:
        """How many watches are open."""
        return len(self._watches)

    def end_watches(self) -> None:
        """Close them all."""
        for watch in list(self._watches):
            self._loop.call_soon_threadsafe(watch.put_nowait, None)

    @web.middleware
    async def _around(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Who asks, may they, and what goes wrong."""
        self.calls.append(f"{request.method} {request.path_qs}")
        try:
            self._admit(request)
            await asyncio.sleep(self.delay())
            fault = next((fault for fault in self.faults if request.method in fault.methods), None)
            answer: web.StreamResponse = await (self._fail(fault, request, handler) if fault else handler(request))
            await asyncio.sleep(self.delay())
        except RefusalError as refusal:
            return web.json_response(refusal.body, status=refusal.code, headers=refusal.headers)
        return answer

    async def _fail(self, fault: Fault, request: web.Request, handler: Any) -> web.StreamResponse:
        fault.times -= 1
        if not fault.times:
            self.faults.remove(fault)
        await request.read()
        if fault.late:
            self.late += 1
            self._late.add(asyncio.create_task(self._do_late(fault.late, request, handler)))
        await asyncio.sleep(fault.wait)
        done: web.StreamResponse | None = await handler(request) if fault.applied else None
        await asyncio.sleep(fault.delay)
        return done if done is not None and fault.status < 0 else fault.answer(request)

    async def _do_late(self, seconds: float, request: web.Request, handler: Any) -> None:
        await asyncio.sleep(seconds)
        with suppress(RefusalError):
            await handler(request)
        self.late -= 1

    def _admit(self, request: web.Request) -> None:
        header = request.headers.get("Authorization")
        user = "system:anonymous" if header is None else self.tokens.get(header.removeprefix("Bearer "))
        if user is None:
            raise RefusalError(401, "Unauthorized", "Unauthorized")
        name, namespace = request.match_info.get("name"), request.match_info["namespace"]
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(request.method, request.method.lower())
        if verb == "get" and not name:
            verb = "watch" if request.query.get("watch") in {"true", "1"} else "list"
        if namespace != "default" or verb not in self.verbs.get(user, ()):
            what = f"leases.{GROUP}{f' {chr(34)}{name}{chr(34)}' if name else ''} is forbidden"
            where = f'resource "leases" in API group "{GROUP}" in the namespace "{namespace}"'
            raise RefusalError(403, "Forbidden", f'{what}: User "{user}" cannot {verb} {where}', details(name))

    # What is kept.

    def _store(self, kind: str, lease: Lease) -> Lease:
        name = lease["metadata"]["name"]
        self._version += 1
        lease["metadata"]["resourceVersion"] = str(self._version)
        if kind == "DELETED":
            del self.leases[name]
        else:
            self.leases[name] = lease
        event = (self._version, kind, copy.deepcopy(lease))
        self._log.append(event)
        for watch in self._watches:
            watch.put_nowait(event)
        return lease

    def _create(self, lease: Lease, *, by_post: bool) -> Lease:
        validate(lease)
        metadata = lease["metadata"]
        name = metadata["name"]
        if by_post and metadata.get("resourceVersion"):
            raise RefusalError(500, "", "resourceVersion should not be set on objects to be created")
        if name in self.leases:
            raise RefusalError(409, "AlreadyExists", f'leases.{GROUP} "{name}" already exists', details(name))
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata |= {"namespace": "default", "uid": str(uuid.uuid4()), "creationTimestamp": now}
        metadata["managedFields"] = [{"manager": "test", "operation": "Update", "apiVersion": API, "time": now}]
        return self._store("ADDED", lease)

    def _replace(self, name: str, lease: Lease, *, patch: bool = False) -> tuple[Lease, int]:
        metadata, now = lease["metadata"], self.leases.get(name)
        uid, seen = metadata.get("uid"), metadata.get("resourceVersion", "")
        if metadata.setdefault("name", name) != name:
            raise bad(f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})")
        stored = now["metadata"]["uid"] if now else ""
        if uid and uid != stored and not patch:
            key = f"StorageError: invalid object, Code: 4, Key: /registry/leases/default/{name}"
            raise conflict(
                name, f"{key}, Precondition failed: UID in precondition: {uid}, UID in object meta: {stored}"
            )
        if now is None:  # whatever its version
            return self._create(lease, by_post=False), 201
        if not seen or not version(seen):
            raise invalid(name, "metadata.resourceVersion", "Invalid value: 0: must be specified for an update")
        if seen != now["metadata"]["resourceVersion"]:
            raise conflict(name)
        if uid and uid != stored:
            raise invalid(name, "metadata.uid", f'Invalid value: "{uid}": field is immutable')
        metadata |= {key: now["metadata"][key] for key in ("uid", "creationTimestamp", "namespace", "managedFields")}
        validate(lease)
        return (now if lease == now else self._store("MODIFIED", lease)), 200

    # Verbs.

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            return await self._post(request)
        if request.method != "GET":
            raise RefusalError(
                405, "MethodNotAllowed", "the server does not allow this method on the requested resource"
            )
        if request.query.get("watch") in {"true", "1"}:
            return await self._watch(request)
        chosen = selector(request)
        items = [lease for _, lease in sorted(self.leases.items()) if chosen(lease)]
        items = [
            {k: lease[k] for k in ("metadata", "spec")} for lease in items[: int(request.query.get("limit", 0)) or None]
        ]
        listing = {"kind": "LeaseList", "apiVersion": API, "metadata": {"resourceVersion": str(self._version)}}
        return web.json_response({**listing, "items": items})

    async def _post(self, request: web.Request) -> web.Response:
        lease, dropped = read(await body(request))
        if lease["metadata"].get("namespace", "default") != "default":
            raise bad("the namespace of the provided object does not match the namespace sent on the request")
        return reply(self._create(lease, by_post=True), dropped, 201)

    async def _item(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        match request.method:
            case "GET":
                if (wanted := request.query.get("resourceVersion")) and version(wanted) > self._version:
                    raise RefusalError(504, "Timeout", "Timeout: Too large resource version", None, Retry_After="1")
                return reply(self._known(name))
            case "PUT":
                lease, dropped = read(await body(request))
                lease, code = self._replace(name, lease)
                return reply(lease, dropped, code)
            case "PATCH":
                return await self._patch(request, name)
            case "DELETE":
                return self._delete(name, await request.json() if request.can_read_body else {})
        raise RefusalError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _known(self, name: str) -> Lease:
        if name not in self.leases:
            raise not_found(name)
        return self.leases[name]

    async def _patch(self, request: web.Request, name: str) -> web.Response:
        if request.content_type not in PATCHES:
            raise RefusalError(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
        if "json-patch" in request.content_type:
            raise RefusalError(501, "NotImplemented", "this double has no JSON patch")
        lease, dropped = read(merged(copy.deepcopy(self._known(name)), await request.json()))
        return reply(self._replace(name, lease, patch=True)[0], dropped)

    def _delete(self, name: str, options: Lease) -> web.Response:
        metadata = self._known(name)["metadata"]
        for key, wanted in options.get("preconditions", {}).items():
            if wanted != metadata[key]:
                why = f"the {key} in the precondition ({wanted}) does not match that in record ({metadata[key]})"
                raise conflict(name, why, "Lease")
        self._store("DELETED", copy.deepcopy(self.leases[name]))
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return web.json_response({**status, "details": details(name, uid=metadata["uid"])})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since, chosen = version(request.query.get("resourceVersion") or "0"), selector(request)
        news: asyncio.Queue[tuple[int, str, Lease] | None] = asyncio.Queue()
        self._watches.add(news)
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            old = [(0, "ADDED", lease) for lease in self.leases.values()] if not since else self._log
            old = [event for event in old if since == 0 or event[0] > since]
            await stream.prepare(request)
            if 0 < since < self._oldest:
                gone = RefusalError(410, "Expired", f"too old resource version: {since} ({self._oldest})")
                await send(stream, "ERROR", gone.body)
                return stream
            for _, kind, lease in old:
                if chosen(lease):
                    await send(stream, kind, lease)
            await self._stream(request, stream, news, chosen)
        finally:
            self._watches.discard(news)
        return stream

    async def _stream(self, request: web.Request, stream: web.StreamResponse, news: Any, chosen: Any) -> None:
        loop = asyncio.get_running_loop()
        seconds = float(request.query.get("timeoutSeconds") or 0)
        end = loop.time() + (seconds or 1800)
        marks = request.query.get("allowWatchBookmarks") == "true"
        while (left := end - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(left, self.bookmark_interval if marks else left)):
                    event = await news.get()
            except TimeoutError:
                if marks and not self.silent:
                    mark = {"kind": "Lease", "apiVersion": API, "metadata": {"resourceVersion": str(self._version)}}
                    await send(stream, "BOOKMARK", mark)
                continue
            if event is None:
                return
            if not self.silent and chosen(event[2]):
                await send(stream, event[1], event[2])


async def send(stream: web.StreamResponse, kind: str, thing: Lease) -> None:
    await stream.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")


async def body(request: web.Request) -> Any:
    if request.content_type not in {"application/json", "application/octet-stream"}:
        raise RefusalError(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise bad(f"the object provided is unrecognized (must be of type Lease): {error}") from None


def reply(lease: Lease, dropped: list[str] | None = None, code: int = 200) -> web.Response:
    headers = {"Warning": ", ".join(f'299 - "unknown field \\"{field}\\""' for field in dropped)} if dropped else {}
    return web.json_response(lease, status=code, headers=headers)


def selector(request: web.Request) -> Callable[[Lease], bool]:
    """What `fieldSelector` and `labelSelector` choose."""
    field, _, name = request.query.get("fieldSelector", "").partition("=")
    if field not in {"", "metadata.name"}:
        raise bad(f'"{field}" is not a known field selector: only "metadata.name", "metadata.namespace"')
    labels = [text.split("=") for text in request.query.get("labelSelector", "").split(",") if text]

    def chosen(lease: Lease) -> bool:
        own = lease["metadata"].get("labels", {})
        return (not field or lease["metadata"]["name"] == name) and all(own.get(key) == value for key, value in labels)

    return chosen


@contextmanager
def kubernetes_server(tls: ssl.SSLContext | None = None) -> Iterator[KubernetesServer]:
    """A server that runs while the body does."""
    server, stop, ready = KubernetesServer(tls), asyncio.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(ready.set, stop)

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="kubernetes")
    thread.start()
    try:
        assert ready.wait(10)
        yield server
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()
