"""How the wire's bench puts its rounds together."""

from __future__ import annotations

import pytest

from benchmarks.wire import _one_after_the_other, _ratio


def test_a_ratio_is_the_median_of_the_ratios_of_each_round() -> None:
    assert _ratio([1.0, 10.0, 3.0], [1.0, 1.0, 3.0]) == 1.0  # that of the medians is 3


def test_the_bound_takes_a_message_and_then_checks_it() -> None:
    assert _one_after_the_other(6000.0, 3000.0) == pytest.approx(2000.0)
