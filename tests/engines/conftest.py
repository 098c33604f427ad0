"""The tokenizer of the engines' tests."""

from __future__ import annotations

from typing import Any

import pytest

from peralta_zmq import models


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return models.load_tokenizer(models.EMBEDDED)
