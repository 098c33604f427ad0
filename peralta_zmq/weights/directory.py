"""The usual weight store: a folder that all machines see."""

from __future__ import annotations

from pathlib import Path

from peralta_zmq.weights.local_backend import LocalBackend
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import DELTA, WEIGHTS, Version

__all__ = ["DELTA", "WEIGHTS", "DirectoryStore", "Version"]


def DirectoryStore(folder: Path) -> WeightStore:
    """The store in a local or mounted folder."""
    return WeightStore(LocalBackend(folder))
