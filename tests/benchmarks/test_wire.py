"""Wire benchmark: how rounds are combined."""

from __future__ import annotations

from benchmarks.wire import _ratio


def test_ratio_is_the_median_over_the_rounds() -> None:
    assert _ratio([1.0, 10.0, 3.0], [1.0, 1.0, 3.0]) == 1.0  # the ratio of the medians is 3
