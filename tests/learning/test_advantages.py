from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from sample_data import group_of

from peralta_zmq.learning.advantages import (
    advantages_of,
    group_mean,
    group_zscore,
    leave_one_out,
    length_weighted,
    token_whitening,
)

REWARDS = [1, 0, 0, 1]
LENGTHS = [4, 4, 4, 4]
HALF = [0.5, -0.5, -0.5, 0.5]


def test_group_mean_of_two_in_four() -> None:
    assert group_mean(REWARDS, LENGTHS) == HALF


def test_group_mean_of_one_in_four() -> None:
    assert group_mean([1, 0, 0, 0], LENGTHS) == [0.75, -0.25, -0.25, -0.25]


def test_zscore_of_two_in_four_is_one() -> None:
    # mean .5, every deviation .5, so the population deviation is .5
    assert group_zscore(REWARDS, LENGTHS) == pytest.approx([1, -1, -1, 1], abs=1e-7)


def test_zscore_with_large_eps_is_smaller() -> None:
    # .5 / (.5 + .0001) = .99980004
    scores = group_zscore(REWARDS, LENGTHS, eps=1e-4)
    assert scores == pytest.approx([0.99980004, -0.99980004, -0.99980004, 0.99980004], abs=1e-8)


def test_zscore_with_ddof_one_uses_sample_deviation() -> None:
    # variance 4 * .25 / 3 = 1/3, so .5 / sqrt(1/3) = .8660254
    scores = group_zscore(REWARDS, LENGTHS, ddof=1)
    assert scores == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254], abs=1e-7)


def test_leave_one_out_of_two_in_four_is_two_thirds() -> None:
    # 1 - (2 - 1) / 3 and 0 - 2 / 3
    assert leave_one_out(REWARDS, LENGTHS) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_leave_one_out_of_two_is_the_difference() -> None:
    assert leave_one_out([3, 1], [4, 4]) == [2, -2]


def test_length_weighted_is_the_mean_when_lengths_are_equal() -> None:
    assert length_weighted(REWARDS, LENGTHS) == HALF


def test_length_weighted_baseline_favours_long_rollouts() -> None:
    # (1 * 10 + 1 * 2) / (10 + 20 + 8 + 2) = .3
    assert length_weighted(REWARDS, [10, 20, 8, 2]) == pytest.approx([0.7, -0.3, -0.3, 0.7])


@pytest.mark.parametrize("advantage", [group_mean, group_zscore, leave_one_out])
def test_other_advantages_ignore_lengths(advantage: Any) -> None:
    assert advantage(REWARDS, LENGTHS) == advantage(REWARDS, [1, 2, 3, 4])


def test_whitening_weights_rollouts_by_tokens() -> None:
    # tokens 1 1 1 0: mean .75, variance (3 * .0625 + .5625) / 4 = .1875, deviation .4330127
    # .25 / (.4330127 + .00001) and -.75 / (.4330127 + .00001)
    scores = token_whitening([1, 0], [3, 1])
    assert scores == pytest.approx([0.5773369, -1.7320108], abs=1e-7)


def test_whitening_gives_mean_zero_and_variance_one() -> None:
    lengths = [3, 11, 7, 2]
    scores = token_whitening([0.5, -2, 4, 4], lengths, eps=0)
    tokens = [score for score, n in zip(scores, lengths, strict=True) for _ in range(n)]
    assert math.fsum(tokens) == pytest.approx(0, abs=1e-12)
    assert math.fsum(each**2 for each in tokens) / len(tokens) == pytest.approx(1)


def test_whitening_is_exact_for_large_rewards() -> None:
    # float32 would see no difference: 1e6 + .01 is 1e6 there
    assert token_whitening([1e6 + 0.01, 1e6], [1, 1], eps=0) == pytest.approx([1, -1], rel=1e-6)


GROUPS = [group_of([1, 0], lengths=[2, 2]), group_of([5, 3, 4], lengths=[1, 1, 2])]


def test_advantages_are_computed_per_group() -> None:
    assert advantages_of(GROUPS, group_mean) == [[0.5, -0.5], [1, -1, 0]]


def test_whitening_normalizes_over_the_step() -> None:
    # tokens 1 1 0 0 5 3 4 4: mean 2.25, mean square 68/8 = 8.5, variance 8.5 - 5.0625 = 3.4375
    whiten = functools.partial(token_whitening, eps=0.0)
    deviation = math.sqrt(3.4375)
    expected = [[-1.25, -2.25], [2.75, 0.75, 1.75]]
    found = advantages_of(GROUPS, whiten)
    assert [[each * deviation for each in group] for group in found] == [
        pytest.approx(group) for group in expected
    ]


def test_whitening_with_group_adv_norm_normalizes_per_group() -> None:
    # 1 1 0 0: mean .5, deviation .5; 5 3 4 4: mean 4, variance 2/4
    whiten = functools.partial(token_whitening, eps=0.0, group_adv_norm=True)
    first, second = advantages_of(GROUPS, whiten)
    assert first == pytest.approx([1, -1])
    assert second == pytest.approx([2**0.5, -(2**0.5), 0])
