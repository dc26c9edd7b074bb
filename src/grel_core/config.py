"""Configuration, once: argument, else the environment, else the default."""

import logging
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grel_core.component import worker_identity

logger = logging.getLogger("grel")

LONGEST = 10 * 366 * 86_400.0
"""Seconds in the longest duration; a longer one is a mistake, and not every store could count that far."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST, allow_inf_nan=False)]
"""A positive, finite number of seconds, at most ten years."""

_FALSE = {"0", "false", "no", "off"}
_TRUE = {"1", "true", "yes", "on"}


class BaseLockConfig(BaseModel):
    """What every primitive can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str | None = Field(default=None, min_length=1, max_length=128, pattern=r"^\P{Cc}+$")
    """Who holds, to people: fixed for life, and no secret. None: this process, which a forked child is not."""

    @property
    def identity(self) -> str:
        """The worker, whose name may be that of the process."""
        return self.worker or worker_identity()


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
        new_config = checked(type(self._config), new_config)
        if new_config.worker not in {None, self._config.worker}:
            raise ValueError("worker is fixed for life; leave it out of the new configuration")
        self._config = new_config.model_copy(update={"worker": self._config.worker})


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
    if isinstance(worker := given.get("worker"), UUID):
        given["worker"] = str(worker)
    if env_load is None and not (env_load := flag("GREL_ENV_LOAD")):
        _mention_unread()
    found: dict[str, str] = {}
    if env_load:
        known = _variables(env_prefix or f"GREL_{kind}_")
        for prefix in (env_prefix,) if env_prefix else prefixes(kind, name):
            found = {field: v for field in model.model_fields if (v := f"{prefix}{field}".upper()) in known} | found
        found = {field: variable for field, variable in found.items() if field not in given}
        given |= {field: _value(model, field, known[variable]) for field, variable in found.items()}
    return validated(model, given, f"{kind.lower()} {name!r}", found)


@lru_cache(maxsize=64)
def _variables(prefix: str) -> dict[str, str]:
    """The variables that begin with `prefix`, read once per process."""
    return {variable: text for variable, text in os.environ.items() if variable.startswith(prefix.upper())}


def _value(model: type[BaseLockConfig], field: str, text: str) -> float | str:
    annotation = model.model_fields[field].annotation
    if annotation is bool and text.strip().lower() in _TRUE | _FALSE:
        return text.strip().lower() in _TRUE
    try:
        return float(text) if annotation is float else text
    except ValueError:
        return text


def prefixes(kind: str, name: str) -> tuple[str, ...]:
    """The prefixes of the variables that `name` reads, the most specific one first.

    A name that cannot be spelled as part of a variable reads only the ones for its whole kind.
    """
    segment = re.sub(r"[^A-Z0-9]+", "_", name.upper())
    own = (f"GREL_{kind}_{segment}_",) if name != "default" and re.fullmatch(r"[A-Za-z][A-Za-z0-9._:/-]*", name) else ()
    return (*own, f"GREL_{kind}_")


def validated(model: type[Config], values: Mapping[str, Any], what: str, variables: Mapping[str, str]) -> Config:
    """`model` made of `values`, or one sentence about the first thing that is wrong with them."""
    try:
        return model.model_validate(values, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        # What is wrong with the whole may come from any variable.
        named = [variable for known, variable in variables.items() if field in {known, ""}]
        source = f" (from {', '.join(named)})" if named else ""
        message = first["msg"].removeprefix("Value error, ")
        kind = TypeError if first["type"].endswith("_type") and not named else ValueError
        raise kind(f"{what}: {field or 'configuration'}{source}: {message}") from None


def checked(model: type[Config], config: Config) -> Config:
    """`config`, which is to be a `model`; looked at again, since `model_copy(update={...})` lets anything pass."""
    if not isinstance(config, model):
        raise TypeError(f"expected {model.__name__}, not {type(config).__name__}")
    return validated(type(config), config.model_dump(), model.__name__, {})


def flag(variable: str) -> bool:
    """Whether an environment variable is switched on."""
    return os.environ.get(variable, "").strip().lower() in _TRUE


@lru_cache(maxsize=1)
def _mention_unread() -> None:
    """Say once per process that variables are set which nobody reads."""
    ignored = sorted(v for v in os.environ if re.match(r"GREL_(LOCK|READWRITELOCK|TASKLOCK|LEADERELECTION)_", v))
    if ignored:
        logger.warning("%s are set but not read; set GREL_ENV_LOAD=1 to read them", ", ".join(ignored))
