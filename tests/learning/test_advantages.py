from __future__ import annotations

import pytest

from peralta_zmq.learning.advantages import (
    group_mean,
    group_zscore,
    leave_one_out,
    length_weighted,
)

REWARDS = [1, 0, 0, 1]
LENGTHS = [4, 4, 4, 4]
HALF = [0.5, -0.5, -0.5, 0.5]


def test_group_mean_of_half_right_is_a_half() -> None:
    assert group_mean(REWARDS, LENGTHS) == HALF


def test_group_mean_of_one_right_in_four() -> None:
    assert group_mean([1, 0, 0, 0], LENGTHS) == [0.75, -0.25, -0.25, -0.25]


def test_zscore_of_half_right_is_one() -> None:
    # mean .5, every deviation .5, so the population deviation is .5
    assert group_zscore(REWARDS, LENGTHS) == pytest.approx([1, -1, -1, 1], abs=1e-7)


def test_zscore_with_a_large_eps_is_a_little_less() -> None:
    # .5 / (.5 + .0001) = .99980004
    scores = group_zscore(REWARDS, LENGTHS, eps=1e-4)
    assert scores == pytest.approx([0.99980004, -0.99980004, -0.99980004, 0.99980004], abs=1e-8)


def test_zscore_with_the_sample_deviation() -> None:
    # variance 4 * .25 / 3 = 1/3, so .5 / sqrt(1/3) = .8660254
    scores = group_zscore(REWARDS, LENGTHS, ddof=1)
    assert scores == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254], abs=1e-7)


def test_leave_one_out_of_half_right_is_two_thirds() -> None:
    # 1 - (2 - 1) / 3 and 0 - 2 / 3
    assert leave_one_out(REWARDS, LENGTHS) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_leave_one_out_of_two_is_the_difference() -> None:
    assert leave_one_out([3, 1], [4, 4]) == [2, -2]


def test_length_weighted_is_the_mean_when_lengths_are_equal() -> None:
    assert length_weighted(REWARDS, LENGTHS) == HALF


def test_length_weighted_counts_a_long_rollout_more() -> None:
    # (1 * 10 + 1 * 2) / (10 + 20 + 8 + 2) = .3
    assert length_weighted(REWARDS, [10, 20, 8, 2]) == pytest.approx([0.7, -0.3, -0.3, 0.7])


@pytest.mark.parametrize("advantage", [group_mean, group_zscore, leave_one_out])
def test_lengths_do_not_matter_to_the_others(advantage) -> None:  # type: ignore[no-untyped-def]
    assert advantage(REWARDS, LENGTHS) == advantage(REWARDS, [1, 2, 3, 4])
