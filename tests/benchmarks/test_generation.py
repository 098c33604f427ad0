"""How the bench of generation plans, pays and bounds."""

from __future__ import annotations

import statistics
from typing import Any, cast

import pytest

from benchmarks import generation
from benchmarks.generation import Step


class Peers:
    """What takes a second for each token of the longest."""

    def original(self, num_new: int) -> float:
        return num_new

    def hf_batched(self, num_prompts: int, num_new: int) -> float:
        assert num_prompts == 8
        return num_new


def test_varied_lengths_are_of_one_kind_for_all() -> None:
    plans = generation.planned()
    assert {name: len(each) for name, each in plans.items()} == {
        "ours": 128, "hf": 64, "original": 16
    }  # fmt: skip
    means = [statistics.mean(each) for each in plans.values()]
    assert means == pytest.approx([28.0] * 3, rel=0.05)  # of 8 to 48, uniform


def test_who_cannot_refill_computes_the_longest_and_is_paid_for_what_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = {"ours": [9], "hf": [*[10] * 31, 20, *[10] * 31, 30], "original": [8, 8, 8, 10]}
    monkeypatch.setattr(generation, "planned", lambda: plans)
    ways = generation.variants(cast(Any, Peers()))
    assert ways["original_varied"]() == 34 / 10
    assert ways["hf_varied"]() == 670 / 50  # two batches, of 20 and 30


def test_a_bound_is_the_mean_of_that_before_and_that_after() -> None:
    speeds = iter([1.0, 4.0, 3.0])
    step, bound = generation.beside(lambda: next(speeds), lambda: Step(next(speeds), 0.0, 0.0))
    assert (step.whole, bound) == (4.0, 2.0)
