"""A guest machine for each test of the lab; skips where it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.machine import Machine
from lab.packages import LabMissing


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A guest with two empty disks that is not running yet."""
    try:
        return Machine(tmp_path)
    except LabMissing as missing:
        pytest.skip(str(missing))
