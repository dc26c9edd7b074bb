"""What the routes of an app call, and with which types: read from the app itself."""

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, get_args
from weakref import WeakKeyDictionary

import fastapi.routing
from fastapi import params
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.requests import HTTPConnection


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


_types: WeakKeyDictionary[Any, dict[str, TypeAdapter[Any] | None]] = WeakKeyDictionary()


def path_value(connection: HTTPConnection, field: str) -> object:
    """The path parameter `field` as the endpoint would get it: `007` and `7` are one number.

    Raises:
        RequestValidationError: its value is not of the type that the endpoint, or a dependency of its, declares.
    """
    value, endpoint = connection.path_params[field], connection.scope["endpoint"]
    known = _types.setdefault(endpoint, {})
    if field not in known:
        declared = (_declared(call, field) for call in [endpoint, *calls(connection.scope.get("route"))])
        known[field] = next((TypeAdapter(annotation) for annotation in declared if annotation is not None), None)
    adapter = known[field]
    try:
        return value if adapter is None else adapter.validate_python(value)
    except ValidationError as error:
        wrong = [{**one, "loc": ("path", field, *one["loc"])} for one in error.errors(include_url=False)]
        if connection.scope["type"] == "websocket":
            raise WebSocketRequestValidationError(wrong) from error
        raise RequestValidationError(wrong) from error


def _declared(call: Any, field: str) -> Any:
    """The annotation of the parameter `field` of `call`; None when it has none, or takes a dependency by that name."""
    parameter = signature_of(call).parameters.get(field)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return None
    parts = [*get_args(parameter.annotation), parameter.default]
    return None if any(isinstance(part, params.Depends) for part in parts) else parameter.annotation
