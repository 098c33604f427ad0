"""A run for each chaos test; its programs are ended after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_programs import RealRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RealRun]:
    started = RealRun(tmp_path)
    yield started
    started.close()
