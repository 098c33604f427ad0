"""Which engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from peralta_zmq import registry
from peralta_zmq.errors import ConfigError, import_extra
from peralta_zmq.registry import LiveEngineFactory

# Settings of [engine] that not every shipped engine has -> the engines that have them.
ENGINES_WITH = {"quantize": ("mlx",)}


def check_engine(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if an engine lacks a setting of [engine] or its library."""
    for option, engines in ENGINES_WITH.items():
        value = settings.get(option)
        if value is not None and registry.is_shipped("engine", name) and name not in engines:
            raise ConfigError(
                f"engine.{option} {value} is not an option of engine '{name}'; "
                f"remove it or set engine.name to {' or '.join(engines)}"
            )
    if name == "mlx":
        import_extra("mlx_lm", extra="mlx", needed_by="engine.name 'mlx'")


def live_engine(name: str) -> LiveEngineFactory:
    """The class with which a trainer that has `engine.name` set to `name` evaluates its model.

    It is the named engine if that can open a torch model in memory, else the native engine.
    """
    factory = registry.resolve("engine", name)
    if not hasattr(factory, "open_live"):
        factory = registry.resolve("engine", "native")
    return cast(LiveEngineFactory, factory)
