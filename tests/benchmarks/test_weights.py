"""Weights benchmark: how rounds are combined."""

from __future__ import annotations

import pytest

from benchmarks.weights import ratio_of_rounds


def test_ratio_is_the_median_over_the_peer_rounds() -> None:
    ours = [1.0, 2.0, 9.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0]  # medians 2, 4, 1
    assert ratio_of_rounds(ours, [20.0, 20.0, 3.0]) == pytest.approx(5.0)  # of 10, 5 and 3
