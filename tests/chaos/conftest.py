"""A field for each chaos test; its programs are ended after the test."""

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
