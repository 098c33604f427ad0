"""Which engine runs."""

from __future__ import annotations

from typing import cast

from peralta_zmq import registry
from peralta_zmq.registry import LiveEngineFactory


def live_engine(name: str) -> LiveEngineFactory:
    """The class with which a trainer that has `engine.name` set to `name` evaluates its model.

    It is the named engine if that can open a torch model in memory, else the native engine.
    """
    factory = registry.resolve("engine", name)
    if not hasattr(factory, "open_live"):
        factory = registry.resolve("engine", "native")
    return cast(LiveEngineFactory, factory)
