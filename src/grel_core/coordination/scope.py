"""Where an app runs, and whether its leases reach that far."""

import logging
import multiprocessing
import os
from collections.abc import Iterable

from grel_core.errors import CoordinationBackendError
from grel_core.lease.backend import LeaseBackend

logger = logging.getLogger("grel")

ENVIRONMENTS = ("development", "test", "staging", "production")


def declared_environment(given: str | None) -> str:
    """The environment that was given, else that of the variable `GREL_ENVIRONMENT`, else `development`.

    Raises:
        ValueError: there is no such environment.
    """
    environment = given or os.environ.get("GREL_ENVIRONMENT") or "development"
    if environment not in ENVIRONMENTS:
        what = "environment" if given else "GREL_ENVIRONMENT"
        raise ValueError(f"{what} is {environment!r}; use one of {', '.join(ENVIRONMENTS)}")
    return environment


def check_scope(stores: Iterable[LeaseBackend], environment: str) -> None:
    """Refuse a store that keeps its state in one process where there will be more; warn where there seem to be more.

    Raises:
        CoordinationBackendError: one of `stores` does, and `environment` is staging or production.
    """
    for store in stores:
        if store.scope != "process":
            continue
        if environment in {"staging", "production"}:
            raise CoordinationBackendError(
                f"{store!r} keeps its state in one process, and the environment is {environment}; use Redis, "
                "PostgreSQL or SQLite, or say Grelmicro(single_process=True) if there is but one process"
            )
        if _several_workers():
            logger.warning("%r keeps its state in one process, and there are several workers: each has its own", store)


def _several_workers() -> bool:
    """Whether this looks like one of several worker processes of a web server."""
    concurrency = os.environ.get("WEB_CONCURRENCY", "")
    return multiprocessing.parent_process() is not None or (concurrency.isdigit() and int(concurrency) > 1)
