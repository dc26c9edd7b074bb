"""What a real API server does with Leases, as read off kube-apiserver 1.36.2 and etcd 3.6.

It holds the double in `tests/kubernetes_server.py` to that; with GREL_TEST_KUBECONFIG, it asks that cluster instead.
"""

import asyncio
import json
import os
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import pytest

from grel_core.providers.kubernetes_api import Cluster, find
from tests.kubernetes_server import GROUP, Lease, kubernetes_server

pytestmark = pytest.mark.anyio
TIME = "2026-01-01T00:00:00.000001Z"


class Reply(NamedTuple):
    status: int
    body: Any
    headers: Any


def lease(name: str, **spec: Any) -> Lease:
    return {"apiVersion": f"{GROUP}/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}


class Client:
    """Bare requests, so that nothing of the library stands between the test and the server."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self.cluster, self.session = cluster, session
        self.headers = dict(cluster.headers)

    def url(self, name: str = "", namespace: str = "") -> str:
        place = f"{self.cluster.host}/apis/{GROUP}/v1/namespaces/{namespace or self.cluster.namespace}/leases"
        return f"{place}/{name}" if name else place

    async def ask(
        self, method: str, name: str = "", body: Any = None, *, kind: str = "", namespace: str = "", **query: str
    ) -> Reply:
        headers = {**self.headers, "Content-Type": f"application/{kind}json"}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self.session.request(
            method, self.url(name, namespace), data=data, headers=headers, params=query, **self.cluster.options
        ) as response:
            text = await response.text()
            try:
                return Reply(response.status, json.loads(text), response.headers)
            except ValueError:
                return Reply(response.status, text, response.headers)

    async def new(self, **spec: Any) -> tuple[str, Lease]:
        name = f"c-{uuid.uuid4().hex[:10]}"
        reply = await self.ask("POST", body=lease(name, **spec))
        assert reply.status == 201, reply.body
        return name, reply.body

    async def merge(self, name: str, patch: Any) -> Reply:
        return await self.ask("PATCH", name, patch, kind="merge-patch+")

    async def watch(self, seconds: float, **query: str) -> tuple[int, list[Any]]:
        """What comes within `seconds`; None at the end if the server ended it."""
        events: list[Any] = []
        params = {"watch": "true", **query}
        async with self.session.get(self.url(), params=params, headers=self.headers, **self.cluster.options) as stream:
            try:
                async with asyncio.timeout(seconds):
                    while line := await stream.content.readline():
                        events.append(json.loads(line))
                    events.append(None)
            except TimeoutError:
                stream.close()
            return stream.status, events


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        if path := os.environ.get("GREL_TEST_KUBECONFIG"):
            yield Client(await asyncio.to_thread(find, path, None), session)
            return
        with kubernetes_server() as server:
            yield Client(Cluster(server.url, {"Authorization": "Bearer secret"}, {}, "default"), session)


def refused(reply: Reply, status: int, reason: str = "", **details: str) -> Any:
    """The reply is a Status of that kind."""
    assert (reply.status, reply.body["kind"], reply.body["code"]) == (status, "Status", status)
    assert reply.body.get("reason", "") == reason
    assert {key: reply.body["details"][key] for key in details} == details
    return reply.body


# Creating and reading.


async def test_a_created_lease_has_metadata_and_what_was_given(client: Client) -> None:
    spec = {"holderIdentity": "me", "leaseDurationSeconds": 15, "renewTime": TIME, "leaseTransitions": 0}
    name, made = await client.new(**spec)
    metadata = made["metadata"]
    assert metadata["resourceVersion"].isdigit()
    assert re.fullmatch("[0-9a-f-]{36}", metadata["uid"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", metadata["creationTimestamp"])
    assert "generation" not in metadata
    assert made["spec"] == spec
    assert (await client.ask("GET", name)).body == made


async def test_of_many_who_create_one_does(client: Client) -> None:
    name, _ = await client.new()
    refused(await client.ask("POST", body=lease(name)), 409, "AlreadyExists", name=name, group=GROUP, kind="leases")
    other = f"{name}-2"
    replies = await asyncio.gather(*(client.ask("POST", body=lease(other, holderIdentity=str(i))) for i in range(20)))
    assert sorted(reply.status for reply in replies) == [201] + [409] * 19


async def test_creating_takes_no_version_and_no_other_namespace(client: Client) -> None:
    body = lease("c-version")
    body["metadata"]["resourceVersion"] = "5"
    assert (await client.ask("POST", body=body)).status == 500
    body["metadata"] = {"name": "c-version", "namespace": "kube-system"}
    refused(await client.ask("POST", body=body), 400, "BadRequest")
    assert (await client.ask("POST", body=lease("x"), namespace="no-such")).status in {403, 404}


async def test_what_is_missing_is_404(client: Client) -> None:
    refused(await client.ask("GET", "c-none"), 404, "NotFound", name="c-none", group=GROUP, kind="leases")
    refused(await client.merge("c-none", {"spec": {}}), 404, "NotFound")
    refused(await client.ask("DELETE", "c-none"), 404, "NotFound")


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("2026-01-01T00:00:00.000000Z", "2026-01-01T00:00:00.000000Z"),
        ("2026-01-01T00:00:00.123456+02:00", "2025-12-31T22:00:00.123456Z"),
        (None, None),
        ("2026-01-01T00:00:00Z", ...),
        ("2026-01-01T00:00:00.123Z", ...),
        ("2026-01-01T00:00:00.123456789Z", ...),
        ("2026-01-01T00:00:00.123456", ...),
        ("2026-01-01 00:00:00.123456Z", ...),
        ("2026-01-01T00:00:60.123456Z", ...),
        ("", ...),
        (1767225600, ...),
    ],
)
async def test_a_time_has_six_digits_and_a_zone(client: Client, value: Any, stored: Any) -> None:
    if stored is ...:
        refused(await client.ask("POST", body=lease("c-time", renewTime=value)), 400, "BadRequest")
    else:
        assert (await client.new(renewTime=value))[1]["spec"].get("renewTime") == stored


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("leaseDurationSeconds", 0, 422),
        ("leaseDurationSeconds", -1, 422),
        ("leaseDurationSeconds", 1, 201),
        ("leaseDurationSeconds", 2**31 - 1, 201),
        ("leaseDurationSeconds", 2**31, 400),
        ("leaseDurationSeconds", 1.0, 400),
        ("leaseDurationSeconds", "15", 400),
        ("leaseDurationSeconds", True, 400),
        ("leaseTransitions", -1, 422),
        ("leaseTransitions", 0, 201),
        ("holderIdentity", "", 201),
        ("holderIdentity", "hé", 201),
        ("holderIdentity", 5, 400),
    ],
)
async def test_fields_are_checked(client: Client, field: str, value: Any, status: int) -> None:
    reply = await client.ask("POST", body=lease(f"c-{uuid.uuid4().hex[:10]}", **{field: value}))
    assert reply.status == status
    if status == 201:
        assert reply.body["spec"][field] == value
    elif status == 422:
        assert reply.body["details"]["causes"][0]["field"] == f"spec.{field}"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("a.b-c", 201),
        ("a" * 253, 201),
        ("a" * 254, 422),
        ("UPPER", 422),
        ("with_underscore", 422),
        ("a..b", 422),
        ("-a", 422),
        ("a:b", 422),
        ("", 422),
    ],
)
async def test_names_are_checked(client: Client, name: str, status: int) -> None:
    reply = await client.ask("POST", body=lease(name))
    assert reply.status == status
    if status == 201:
        await client.ask("DELETE", name)
    else:
        assert reply.body["details"]["causes"][0]["field"] == "metadata.name"


async def test_annotations_have_a_limit(client: Client) -> None:
    for size, status in ((262_144, 201), (262_145, 422)):
        body = lease(f"c-{uuid.uuid4().hex[:10]}")
        body["metadata"]["annotations"] = {"example.com/k": "x" * (size - 13)}
        assert (await client.ask("POST", body=body)).status == status
        await client.ask("DELETE", body["metadata"]["name"])


async def test_unknown_fields_are_dropped_with_a_warning(client: Client) -> None:
    reply = await client.ask("POST", body=lease(f"c-{uuid.uuid4().hex[:10]}", bar=1))
    assert "bar" not in reply.body["spec"]
    assert "unknown field" in reply.headers["Warning"]


async def test_what_is_no_lease_is_refused(client: Client) -> None:
    assert (await client.ask("POST", body=b"{no")).status == 400
    assert (await client.ask("POST", body=b"<x/>", kind="nonsense+")).status == 415


# Changing: only over the version that was seen.


async def test_put_needs_the_version_that_is_there(client: Client) -> None:
    name, made = await client.new(holderIdentity="a")
    new = {**made, "spec": {"leaseTransitions": 1}}
    reply = await client.ask("PUT", name, new)
    assert reply.status == 200
    assert int(reply.body["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    assert reply.body["spec"] == new["spec"]
    refused(await client.ask("PUT", name, made), 409, "Conflict", name=name, kind="leases")
    for seen, status in (("0", 422), (None, 422), ("abc", 500), (5, 400)):
        metadata = {**made["metadata"], "resourceVersion": seen}
        assert (await client.ask("PUT", name, {**made, "metadata": metadata})).status == status
    assert (await client.ask("PUT", name, {**made, "metadata": {**made["metadata"], "name": "other"}})).status == 400


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_of_many_who_change_one_does(client: Client, method: str) -> None:
    name, made = await client.new()
    kind = "merge-patch+" if method == "PATCH" else ""
    bodies = [{**made, "spec": {"holderIdentity": str(number)}} for number in range(20)]
    replies = await asyncio.gather(*(client.ask(method, name, body, kind=kind) for body in bodies))
    assert sorted(reply.status for reply in replies) == [200] + [409] * 19


async def test_put_creates_what_is_missing_unless_it_names_a_uid(client: Client) -> None:
    name, made = await client.new()
    await client.ask("DELETE", name)
    refused(await client.ask("PUT", name, made), 409, "Conflict")
    refused(await client.ask("GET", name), 404, "NotFound")
    body = lease(name)
    body["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
    again = await client.ask("PUT", name, body)
    assert again.status == 201
    assert again.body["metadata"]["uid"] != made["metadata"]["uid"]
    assert int(again.body["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    refused(await client.ask("PUT", name, made), 409, "Conflict")


async def test_a_change_to_the_same_is_none(client: Client) -> None:
    name, made = await client.new(holderIdentity="a")
    reply = await client.ask("PUT", name, made)
    assert (reply.status, reply.body["metadata"]["resourceVersion"]) == (200, made["metadata"]["resourceVersion"])


async def test_a_merge_patch_guards_the_version_only_if_it_names_one(client: Client) -> None:
    name, made = await client.new(holderIdentity="a", leaseTransitions=1)
    replies = await asyncio.gather(*(client.merge(name, {"spec": {"holderIdentity": str(i)}}) for i in range(10)))
    assert {reply.status for reply in replies} == {200}
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "spec": {"holderIdentity": "y"}}
    refused(await client.merge(name, stale), 409, "Conflict")
    reply = await client.merge(name, {"spec": {"holderIdentity": None}})
    assert reply.body["spec"] == {"leaseTransitions": 1}
    refused(await client.merge(name, {"spec": {"leaseDurationSeconds": 0}}), 422, "Invalid")
    assert (await client.merge(name, {"metadata": {"resourceVersion": ""}, "spec": {}})).status == 422
    assert (await client.merge(name, {"metadata": {"uid": str(uuid.uuid4())}, "spec": {}})).status == 422


async def test_deleting_takes_preconditions(client: Client) -> None:
    name, made = await client.new()
    for wrong in ({"resourceVersion": "1"}, {"uid": str(uuid.uuid4())}):
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": wrong}
        refused(await client.ask("DELETE", name, options), 409, "Conflict")
    reply = await client.ask("DELETE", name)
    assert (reply.body["status"], reply.body["details"]["uid"]) == ("Success", made["metadata"]["uid"])


# Listing and watching.


async def test_a_list_can_be_narrowed(client: Client) -> None:
    name, _ = await client.new()
    await client.merge(name, {"metadata": {"labels": {"grel.dev/test": name}}})
    for query in ({"fieldSelector": f"metadata.name={name}"}, {"labelSelector": f"grel.dev/test={name}"}):
        listing = (await client.ask("GET", **query)).body
        assert listing["kind"] == "LeaseList"
        assert [item["metadata"]["name"] for item in listing["items"]] == [name]
        assert listing["metadata"]["resourceVersion"].isdigit()
    assert (await client.ask("GET", fieldSelector="spec.holderIdentity=a")).status == 400


async def test_a_watch_tells_what_happened_since_a_version(client: Client) -> None:
    name, made = await client.new()
    mine = {"fieldSelector": f"metadata.name={name}"}
    assert [event["type"] for event in (await client.watch(0.4, **mine))[1]] == ["ADDED"]
    since = {**mine, "resourceVersion": made["metadata"]["resourceVersion"]}
    coming = asyncio.create_task(client.watch(0.8, **since))
    await client.merge(name, {"spec": {"holderIdentity": "1"}})
    changed = await client.merge(name, {"spec": {"holderIdentity": "2"}})
    await client.ask("PUT", name, changed.body)  # changes nothing
    await client.ask("DELETE", name)
    for _, events in (await coming, await client.watch(0.4, **since)):
        assert [event["type"] for event in events] == ["MODIFIED", "MODIFIED", "DELETED"]
        assert [event["object"]["spec"]["holderIdentity"] for event in events[:2]] == ["1", "2"]
        assert int(events[2]["object"]["metadata"]["resourceVersion"]) > int(
            changed.body["metadata"]["resourceVersion"]
        )


async def test_a_watch_ends_when_it_was_told_to(client: Client) -> None:
    name, made = await client.new()
    since = {"fieldSelector": f"metadata.name={name}", "resourceVersion": made["metadata"]["resourceVersion"]}
    assert await client.watch(5, **since, timeoutSeconds="1") == (200, [None])


async def test_a_version_that_is_too_old_is_an_event(client: Client) -> None:
    status, events = await client.watch(3, resourceVersion="1")
    assert status == 200
    assert (events[0]["type"], events[0]["object"]["code"], events[0]["object"]["reason"]) == ("ERROR", 410, "Expired")
    assert events[1] is None


async def test_a_version_from_the_future_is_504(client: Client) -> None:
    name, _ = await client.new()
    reply = await client.ask("GET", name, resourceVersion="99999999")
    assert (reply.status, reply.body["reason"], reply.headers["Retry-After"]) == (504, "Timeout", "1")


# Who may.


async def test_a_bad_token_is_401_and_none_is_403(client: Client) -> None:
    client.headers = {"Authorization": "Bearer nonsense"}
    assert (await client.ask("GET", "x")).status == 401
    client.headers = {}
    reply = await client.ask("GET", "x")
    refused(reply, 403, "Forbidden")
    assert "system:anonymous" in reply.body["message"]
