"""Configuration, once: argument, else the environment, else the default."""

import logging
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grel_core.component import worker_identity

logger = logging.getLogger("grel")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A positive, finite number of seconds."""
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number of seconds that may be 0."""

_TRUE = {"1", "true", "yes", "on"}


class BaseLockConfig(BaseModel):
    """What every primitive can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    worker: str = Field(default_factory=worker_identity, min_length=1, max_length=128)
    """Who holds, to people. Not a secret, and fixed for life."""


Config = TypeVar("Config", bound=BaseLockConfig)


class Reconfigurable(Generic[Config]):
    """Something whose configuration can be replaced while it runs.

    An operation reads the configuration once, when it begins: what began under one ends under it.
    """

    _config: Config

    @property
    def config(self) -> Config:
        """The configuration in force, frozen."""
        return self._config

    def reconfigure(self, new_config: Config) -> None:
        """Use `new_config` from the next operation on.

        Raises:
            TypeError: it is not this kind of configuration.
            ValueError: it changes `worker`, which is fixed for life.
        """
        if type(new_config) is not type(self._config):
            raise TypeError(f"expected {type(self._config).__name__}, not {type(new_config).__name__}")
        if new_config.worker != self._config.worker:
            raise ValueError("worker is fixed for life; copy it: `config.model_copy(update={...})` keeps it")
        self._config = new_config


def load_config(
    model: type[Config],
    kind: str,
    name: str,
    arguments: Mapping[str, Any],
    *,
    env_prefix: str | None,
    env_load: bool | None,
) -> Config:
    """The configuration of one instance.

    Precedence: argument, then `GREL_<KIND>_<NAME>_<FIELD>`, then `GREL_<KIND>_<FIELD>`, then the default.
    `env_prefix` replaces both prefixes. `env_load=None` follows the process-wide flag `GREL_ENV_LOAD`, which is off
    unless it is set to 1, true, yes or on.

    Raises:
        ValueError: a value is impossible; the message names the field, and the variable if it came from one.
    """
    given = {field: value for field, value in arguments.items() if value is not None}
    if "worker" in given:
        given["worker"] = str(given["worker"])
    if not (flag("GREL_ENV_LOAD") if env_load is None else env_load):
        if env_load is None:
            _mention_unread()
        return validated(model, given, f"{kind.lower()} {name!r}")
    found: dict[str, str] = {}
    for prefix in (env_prefix,) if env_prefix else prefixes(kind, name):
        for field in model.model_fields:
            variable = f"{prefix}{field}".upper()
            if field not in given and variable in os.environ:
                given[field] = os.environ[variable]
                found[field] = variable
    return validated(model, given, f"{kind.lower()} {name!r}", found)


def prefixes(kind: str, name: str) -> tuple[str, ...]:
    """The prefixes of the variables that `name` reads, the most specific one first.

    A name that cannot be spelled as part of a variable reads only the ones for its whole kind.
    """
    segment = re.sub(r"[^A-Z0-9]+", "_", name.upper())
    own = (f"GREL_{kind}_{segment}_",) if name != "default" and re.fullmatch(r"[A-Za-z][A-Za-z0-9._:/-]*", name) else ()
    return (*own, f"GREL_{kind}_")


def validated(
    model: type[Config], values: Mapping[str, Any], what: str, variables: Mapping[str, str] | None = None
) -> Config:
    """`model` made of `values`, or one sentence about the first thing that is wrong with them."""
    try:
        return model.model_validate(dict(values), strict=not variables)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "configuration"
        source = f" (from {variables[field]})" if variables and field in variables else ""
        message = first["msg"].removeprefix("Value error, ")
        raise (TypeError if first["type"].endswith("_type") else ValueError)(
            f"{what}: {field}{source}: {message}"
        ) from None


def flag(variable: str) -> bool:
    """Whether an environment variable is switched on."""
    return os.environ.get(variable, "").strip().lower() in _TRUE


@lru_cache(maxsize=1)
def _mention_unread() -> None:
    """Say once per process that variables are set which nobody reads."""
    ignored = sorted(v for v in os.environ if re.match(r"GREL_(LOCK|READWRITELOCK|TASKLOCK|LEADERELECTION)_", v))
    if ignored:
        logger.warning("%s are set but not read; set GREL_ENV_LOAD=1 to read them", ", ".join(ignored))
