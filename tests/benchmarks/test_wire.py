"""How the wire's bench puts its rounds together."""

from __future__ import annotations

from benchmarks.wire import _ratio


def test_a_ratio_is_the_median_of_the_ratios_of_each_round() -> None:
    assert _ratio([1.0, 10.0, 3.0], [1.0, 1.0, 3.0]) == 1.0  # that of the medians is 3
