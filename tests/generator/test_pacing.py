"""Generators of unequal speed stay within a step of the newest weights, and none is waited for.

.venv/bin/python -m pytest tests/test_pacing.py -m slow
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pacing import LIMITS, RUNS, STEPS, paced


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("num_generators", "kill"), RUNS)
def test_groups_are_young_and_few_are_dropped(
    num_generators: int, kill: bool, tmp_path: Path
) -> None:
    run = paced(tmp_path, num_generators, kill=kill)
    print(run)
    assert run.ages.total() == 16 * STEPS
    assert run.mean <= LIMITS["mean"]
    assert run.share_dropped < LIMITS["dropped"]
    assert run.longest_wait < 30
