"""Coordination for services that run as many replicas: `from grel_core import Grelmicro`."""

from grel_core.app import Grelmicro
from grel_core.errors import GrelmicroError, NotStartedError, OutOfContextError, ShuttingDownError

__all__ = ["Grelmicro", "GrelmicroError", "NotStartedError", "OutOfContextError", "ShuttingDownError"]
