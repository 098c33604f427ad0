from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.weights.store import WeightStore


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    """A claimed store in tmp_path/weights."""
    opened = WeightStore.open(tmp_path / "weights")
    opened.claim("run-1")
    return opened
