"""The tokenizer of the engines' tests, and the engines themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_data import ENGINES, Opener

from peralta_zmq import models


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return models.load_tokenizer(models.EMBEDDED)


@pytest.fixture(params=ENGINES)
def opener(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Opener:
    return Opener(request.param, tmp_path, monkeypatch)
