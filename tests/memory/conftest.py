"""The shape of a model without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_data import QWEN

from peralta_zmq.memory import ModelShape, read_shape


@pytest.fixture
def qwen(tmp_path: Path) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return read_shape(tmp_path)
