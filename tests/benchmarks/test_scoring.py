"""The scoring bench: its bounds."""

from __future__ import annotations

import pytest

from benchmarks import scoring

RATES = {
    "alone": [2.0], "sleeps": [1.8], "sleeps_in_process": [0.6], "computes": [1.5],
    "computes_in_process": [1.0],
}  # fmt: skip


def test_bound_is_the_engine_or_what_the_cores_left_over_can_score() -> None:
    found = {claim.name: claim for claim in scoring.claims(RATES, cores=2)}
    assert found["sleeps_vs_in_process"].ratio == pytest.approx(3.0)
    assert (found["sleeps_share"].bound, found["sleeps_share"].share) == (2.0, 0.9)
    # At 5/3 groups/s the engine needs 5/6 of the two cores, and the third that is left over can
    # score 5/3 groups of 4 completions of 0.05 s.
    assert found["computes_share"].bound == pytest.approx(5 / 3)
    fast = {**RATES, "alone": [100.0]}
    found = {claim.name: claim for claim in scoring.claims(fast, cores=2)}
    assert found["sleeps_share"].bound == 20.0  # 16 workers, 0.8 s for each group
