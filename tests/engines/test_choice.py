"""Which engine runs."""

from __future__ import annotations

from peralta_zmq.engines.choice import live_engine
from peralta_zmq.engines.hf import HfEngine
from peralta_zmq.engines.native import NativeEngine


class FolderEngine:
    """A user's engine that cannot open a torch model in memory."""

    @staticmethod
    def open() -> None: ...


def test_trainer_evaluates_with_an_engine_for_models_in_memory() -> None:
    assert live_engine("hf") is HfEngine
    assert live_engine(f"{__name__}.FolderEngine") is NativeEngine
