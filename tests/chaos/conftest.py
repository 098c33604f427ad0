"""A field for each chaos test, with nothing left running after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from field import Field


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    started = Field(tmp_path)
    yield started
    started.close()
