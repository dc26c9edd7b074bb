"""What the routes of an app call, and with which types: read from the app itself."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args
from weakref import WeakKeyDictionary

import fastapi.routing
from fastapi import params
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.requests import HTTPConnection

from grel_core.lease.names import lock_name, placeholders


def signature_of(call: Any) -> inspect.Signature:
    """The signature of `call`, with its annotations evaluated where that is possible."""
    try:
        return inspect.signature(call, eval_str=True)
    except NameError:
        return inspect.signature(call)


def calls(route: Any) -> Iterator[Any]:
    """The endpoint of `route` and its methods, and every dependency below it."""
    endpoint = getattr(route, "endpoint", None)
    if endpoint is not None:
        yield endpoint
    if inspect.isclass(endpoint):
        yield from (method for _, method in inspect.getmembers(endpoint, inspect.isfunction))
    pending = [getattr(route, "dependant", None)]
    while pending:
        if (dependant := pending.pop()) is not None:
            yield from (below.call for below in dependant.dependencies)
            pending += dependant.dependencies


def all_calls(routes: Iterable[Any]) -> Iterator[Any]:
    """`calls` of each of `routes`, and of those in included routers and mounted apps."""
    # Since FastAPI 0.137 routes are a tree, and this is the only public way through it.
    flat = getattr(fastapi.routing, "iter_route_contexts", iter)
    for route in flat(routes):
        yield from calls(route)
        yield from all_calls(getattr(route, "routes", None) or ())


def runs_in_thread(endpoint: Any) -> bool:
    """Whether a framework calls `endpoint` in a worker thread."""
    while isinstance(endpoint, partial):
        endpoint = endpoint.func
    faces = (endpoint, inspect.unwrap(endpoint), type(endpoint).__call__)
    return not any(inspect.iscoroutinefunction(face) or inspect.isasyncgenfunction(face) for face in faces)


@contextmanager
def refusing(connection: HTTPConnection, *place: str) -> Iterator[None]:
    """Answer 422 when the body refuses, with a `ValueError`, what the client sent in that place."""
    try:
        yield
    except ValueError as error:
        message = "Value error, the name of a lock is not empty, at most 512 bytes, and without control characters"
        wrong: list[Any] = [{"type": "value_error", "loc": place, "msg": message}]
        if isinstance(error, ValidationError):
            wrong = [{**one, "loc": (*place, *one["loc"])} for one in error.errors(include_url=False)]
        websocket = connection.scope["type"] == "websocket"
        raise (WebSocketRequestValidationError if websocket else RequestValidationError)(wrong) from error


def path_name(connection: HTTPConnection, template: str) -> str:
    """The name that `template` gives with the path parameters, of the types that the endpoint declares.

    Raises:
        ValueError: the path has no such parameter.
        RequestValidationError: a value is not of its type, or cannot be part of a name.
    """
    fields = placeholders(template)
    if missing := [field for field in fields if field not in connection.path_params]:
        raise ValueError(f"the lock {template!r} needs {missing[0]!r}; name a parameter of the route's path")
    values = {field: path_value(connection, field) for field in fields}
    for field, value in values.items():
        with refusing(connection, "path", field):
            lock_name(f"-{{{field}}}", **{field: value})
    with refusing(connection, "path", *fields[-1:]):
        return lock_name(template, **values)


_types: WeakKeyDictionary[Any, dict[str, TypeAdapter[Any] | None]] = WeakKeyDictionary()


def path_value(connection: HTTPConnection, field: str) -> object:
    """The path parameter `field` as the endpoint, or a dependency, declares it: `007` and `7` are one number."""
    value, endpoint = connection.path_params[field], connection.scope["endpoint"]
    known = _types.setdefault(endpoint, {})
    if field not in known:
        declared = (_declared(call, field) for call in [endpoint, *calls(connection.scope.get("route"))])
        known[field] = next((TypeAdapter(annotation) for annotation in declared if annotation is not None), None)
    adapter = known[field]
    with refusing(connection, "path", field):
        return value if adapter is None else adapter.validate_python(value)


def _declared(call: Any, field: str) -> Any:
    """The annotation of the parameter `field` of `call`; None when it has none, or takes a dependency by that name."""
    parameter = signature_of(call).parameters.get(field)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return None
    parts = [*get_args(parameter.annotation), parameter.default]
    return None if any(isinstance(part, params.Depends) for part in parts) else parameter.annotation
