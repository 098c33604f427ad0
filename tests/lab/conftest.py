"""A machine for each test of the lab, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.machine import Machine
from lab.packages import LabMissing


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A computer with two empty disks, switched off."""
    try:
        return Machine(tmp_path)
    except LabMissing as missing:
        pytest.skip(str(missing))
