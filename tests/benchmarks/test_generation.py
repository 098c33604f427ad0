"""The generation bench: varying lengths, counted tokens and bounds."""

from __future__ import annotations

import statistics
from typing import Any, cast

import pytest

from benchmarks import generation


class Peers:
    """Take one second per token of the longest completion."""

    def original(self, num_new: int) -> float:
        return num_new

    def hf_batched(self, num_prompts: int, num_new: int) -> float:
        assert num_prompts == 8
        return num_new


def test_varying_lengths_have_one_distribution_for_all_programs() -> None:
    lengths_of = generation.varying_lengths()
    assert {name: len(lengths) for name, lengths in lengths_of.items()} == {
        "ours": 128, "hf": 64, "original": 16
    }  # fmt: skip
    means = [statistics.mean(lengths) for lengths in lengths_of.values()]
    assert means == pytest.approx([28.0] * 3, rel=0.05)  # uniform from 8 to 48


def test_batched_programs_compute_the_longest_completion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = {"ours": [9], "hf": [*[10] * 31, 20, *[10] * 31, 30], "original": [8, 8, 8, 10]}
    monkeypatch.setattr(generation, "varying_lengths", lambda: lengths)
    rates = generation.variants(cast(Any, Peers()))
    assert rates["original_varied"]() == 34 / 10
    assert rates["hf_varied"]() == 670 / 50  # two batches, of 20 and 30
