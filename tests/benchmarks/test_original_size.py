"""Claims of the benchmark at the original's size."""

from __future__ import annotations

import pytest

from benchmarks import original_size

OURS = {"generate": 2.0, "score": 0.0, "transfer": 0.5, "train": 5.0, "publish": 2.0, "reload": 0.5}
ORIGINAL = dict.fromkeys(original_size.PARTS, 20.0)


def test_steps_per_hour_adds_up_all_parts() -> None:
    steps, *parts = original_size.claims(OURS, ORIGINAL)
    assert (steps.name, steps.ours, steps.peer) == ("steps_per_hour", 360.0, 30.0)
    assert steps.ratio == pytest.approx(12.0)
    assert {each.name: each.ratio for each in parts}["train_seconds"] == pytest.approx(4.0)


def test_part_of_zero_seconds_has_no_ratio() -> None:
    parts = {each.name: each for each in original_size.claims(OURS, ORIGINAL)}
    assert parts["score_seconds"].ours == 0.0
    assert parts["score_seconds"].ratio is None
