from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
from sample_data import group_of, rollout_with

from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.advantages import (
    Filter,
    advantages_of,
    apply_filters,
    gibberish,
    group_mean,
    group_zscore,
    leave_one_out,
    length_weighted,
    max_rl,
    mean_advantages,
    normalized_rewards,
    overlong,
    repetition,
    token_advantages,
    token_whitening,
)
from peralta_zmq.rollout import Rollout, RolloutGroup

REWARDS = [1, 0, 0, 1]
LENGTHS = [4, 4, 4, 4]
HALF = [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize(
    ("advantage", "rewards", "expected"),
    [
        (group_mean, REWARDS, HALF),
        (group_mean, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        # mean .5, variance 4 * .25 / 3 = 1/3, so .5 / (sqrt(1/3) + .0001) = .8658754
        (group_zscore, REWARDS, [0.8658754, -0.8658754, -0.8658754, 0.8658754]),
        # 1 - (2 - 1) / 3 and 0 - 2 / 3
        (leave_one_out, REWARDS, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        (leave_one_out, [3, 1], [2, -2]),
        # 2/3 / (sqrt(1/3) + .0001) = 1.1545006
        (
            functools.partial(leave_one_out, scale_rewards="group"),
            REWARDS,
            [1.1545006, -1.1545006, -1.1545006, 1.1545006],
        ),
        (functools.partial(group_zscore, scale_rewards="none"), REWARDS, HALF),
        (max_rl, [1, 0, 0, 0], [3, -1, -1, -1]),  # (1 - .25) / .25
        (max_rl, [0, -1], [0, 0]),  # no success: the mean is not above 0
        (length_weighted, REWARDS, HALF),
    ],
)
def test_advantages_of_equal_lengths_by_hand(
    advantage: Any, rewards: list[float], expected: list[float]
) -> None:
    assert advantage(rewards, [4] * len(rewards)) == pytest.approx(expected, abs=1e-7)


def test_length_weighted_baseline_favours_long_rollouts() -> None:
    # (1 * 10 + 1 * 2) / (10 + 20 + 8 + 2) = .3
    assert length_weighted(REWARDS, [10, 20, 8, 2]) == pytest.approx([0.7, -0.3, -0.3, 0.7])


def test_whitening_weights_rollouts_by_tokens() -> None:
    # tokens 1 1 1 0: mean .75, variance (3 * .0625 + .5625) / 4 = .1875, deviation .4330127
    # .25 / (.4330127 + .00001) and -.75 / (.4330127 + .00001)
    scores = token_whitening([1, 0], [3, 1], step_rewards=[1, 0], step_lengths=[3, 1])
    assert scores == pytest.approx([0.5773369, -1.7320108], abs=1e-7)


def test_whitening_is_exact_for_large_rewards() -> None:
    # float32 would have a relative error of 1e-7 in the mean, and of .06 in the difference
    rewards = [1e6 + 1, 1e6]
    scores = token_whitening(rewards, [1, 1], step_rewards=rewards, step_lengths=[1, 1])
    assert scores == pytest.approx([0.99998, -0.99998], rel=1e-7)  # .5 / (.5 + .00001)


GROUPS = [group_of([1, 0], lengths=[2, 2]), group_of([5, 3, 4], lengths=[1, 1, 2])]


@pytest.mark.parametrize(
    ("advantage", "equal", "other"),
    [
        (group_mean, (0, 0), (0.5, -0.5)),
        # over the step: mean 3/4, standard deviation 0.433013
        (token_whitening, (0.577337, 0.577337), (0.577337, -1.732011)),
    ],
)
def test_keep_zero_std_gives_advantages_without_signal(
    advantage: Any, equal: tuple[float, ...], other: tuple[float, ...]
) -> None:
    first, second = advantages_of(
        [group_of([1, 1]), group_of([1, 0])], advantage, keep_zero_std=True
    )
    assert first == pytest.approx(equal, abs=1e-6) and second == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("advantage", [group_mean, leave_one_out, group_zscore])
def test_single_rollout_has_advantage_zero(advantage: Any) -> None:
    assert advantages_of([group_of([3])], advantage, keep_zero_std=True) == [[0]]


# Sums of equal terms; the mean of three times .1 is .10000000000000002, and .1 + .2 is not .3.
EQUAL = [[2.0, 2.0], [0.1, 0.1, 0.1], [0.1 + 0.2, 0.3], [0.0, 0.0], [-0.7 - 0.1, -0.8]]
SCALED = [group_zscore, functools.partial(group_zscore, scale_rewards="batch"), token_whitening]


@pytest.mark.parametrize("rewards", EQUAL)
@pytest.mark.parametrize("advantage", [group_mean, leave_one_out, length_weighted, *SCALED])
def test_rewards_equal_within_rounding_have_advantage_zero(
    advantage: Any, rewards: list[float]
) -> None:
    groups = [group_of(rewards, lengths=[*range(1, len(rewards) + 1)])]
    zero = [0.0] * len(rewards)
    assert advantages_of(groups, advantage, keep_zero_std=True) == [zero]


def test_whitening_normalizes_over_the_step() -> None:
    # tokens 1 1 0 0 5 3 4 4: mean 2.25, mean square 68/8 = 8.5, variance 8.5 - 5.0625 = 3.4375
    deviation = math.sqrt(3.4375) + 1e-5
    expected = [[-1.25, -2.25], [2.75, 0.75, 1.75]]
    found = advantages_of([*GROUPS, group_of([2, 2])], token_whitening)  # the last has no signal
    assert [[each * deviation for each in group] for group in found] == [
        *(pytest.approx(group) for group in expected),
        [],
    ]


def test_batch_scale_is_that_of_all_rewards_of_the_step() -> None:
    # rewards 1 0 | 5 3 4 | 2 2 (without signal): mean 17/7, squares 59 - 289/7 = 17.7142857
    groups, deviation = [*GROUPS, group_of([2, 2])], math.sqrt(17.7142857 / 6)
    expected = [[0.5, -0.5], [1, -1, 0], []]
    scaled = functools.partial(group_zscore, scale_rewards="batch")
    found = advantages_of(groups, scaled)
    assert [[each * (deviation + 1e-4) for each in group] for group in found] == [
        pytest.approx(group, abs=1e-7) for group in expected
    ]
    others = functools.partial(leave_one_out, scale_rewards="batch")
    factors = [2, 1.5, 1]  # K / (K - 1)
    assert advantages_of(groups, others) == [
        pytest.approx([factor * each for each in group])
        for factor, group in zip(factors, found, strict=True)
    ]


# Shaped rewards


def group_with_terms(*terms: dict[str, float]) -> Any:
    group = group_of([sum(values.values()) for values in terms])
    rollouts = [
        dataclasses.replace(rollout, rewards=values)
        for rollout, values in zip(group.rollouts, terms, strict=True)
    ]
    return dataclasses.replace(group, rollouts=rollouts)


def test_normalized_terms_are_weighted_and_summed() -> None:
    # right: 1 0 0 1, sample deviation .5773503; short: 10 30 20 -, mean 20, deviation 10
    group = group_with_terms(
        {"right": 1, "short": 10}, {"right": 0, "short": 30},
        {"right": 0, "short": 20}, {"right": 1},
    )  # fmt: skip
    one = 0.5 / 0.5774503
    expected = [one - 2 * 10 / 10.0001, -one + 2 * 10 / 10.0001, -one, one]
    assert normalized_rewards(group, {"short": 2}) == pytest.approx(expected, abs=1e-6)


def test_normalized_terms_of_a_single_reward_are_its_zscore() -> None:
    assert normalized_rewards(group_of([1, 0]), {}) == group_zscore([1, 0], [])


def test_weights_of_terms_are_those_of_the_environment() -> None:
    group = group_with_terms({"right": 1, "short": 0}, {"right": 0, "short": 1})
    weights = {group.task: {"short": 3.0}, "other": {"right": 9.0}}
    ((first, second),) = advantages_of([group], group_mean, term_weights=weights)
    assert first == -second == pytest.approx(-2 * 0.5 / (0.5**0.5 + 1e-4))


# Rewards of turns.


def group_with_turns(*rollouts: tuple[float, list[int], tuple[float, ...]]) -> RolloutGroup:
    """A group of rollouts with reward, loss mask and rewards of turns."""
    return dataclasses.replace(
        group_of([0]),
        rollouts=tuple(
            dataclasses.replace(
                rollout_with(reward, num_prompt=0, num_generated=len(mask)),
                loss_mask=np.array(mask, bool),
                turn_rewards=turn_rewards,
            )
            for reward, mask, turn_rewards in rollouts
        ),
    )


# Two turns with 2 and 1 tokens, three with 1, 3 and 1. Returns: 2 + 1 + 1 = 4 and 1 + 1 = 2;
# 0 + 2 + 2 + 1 = 5, 2 + 2 + 1 = 5 and 2 + 1 = 3.
TURNS = group_with_turns(
    (1, [0, 1, 1, 0, 0, 1], (2, 1)), (1, [0, 1, 0, 1, 1, 1, 0, 0, 1], (0, 2, 2))
)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # first turns 4 and 5: mean 4.5; second turns 2 and 5: 3.5; only one rollout has a third
        (group_mean, [(-0.5, -1.5), (0.5, 1.5, 0)]),
        # .5 / (sqrt(.5) + .0001) and 1.5 / (sqrt(4.5) + .0001)
        (group_zscore, [(-0.7070068, -0.7070734), (0.7070068, 0.7070734, 0)]),
        (leave_one_out, [(-1, -3), (1, 3, 0)]),
        (max_rl, [(-0.5 / 4.5, -1.5 / 3.5), (0.5 / 4.5, 1.5 / 3.5, 0)]),
        # (2 * 4 + 5) / 3 = 13 / 3; (2 + 3 * 5) / 4 = 17 / 4
        (length_weighted, [(-1 / 3, -9 / 4), (2 / 3, 3 / 4, 0)]),
    ],
)
def test_advantages_of_turns_by_hand(advantage: Any, expected: list[tuple[float, ...]]) -> None:
    ((first, second),) = advantages_of([TURNS], advantage)
    assert first == pytest.approx(expected[0], rel=1e-6)
    assert second == pytest.approx(expected[1], rel=1e-6)


def test_tokens_have_the_advantage_of_their_turn() -> None:
    rollout = TURNS.rollouts[1]
    values = token_advantages(rollout, (0.5, 1.5, 0.25))[rollout.loss_mask]
    assert values.tolist() == [0.5, 1.5, 1.5, 1.5, 0.25]
    assert mean_advantages(TURNS, [0.5, (0.5, 1.5, 0.25)]) == [0.5, 1.05]
    assert mean_advantages(TURNS, []) == []


def test_groups_with_and_without_rewards_of_turns_are_mixed() -> None:
    equal = group_with_turns((1, [0, 1, 0, 1], (0, 1)), (2, [0, 1, 0, 1], (0, 0)))
    groups = [GROUPS[0], equal, TURNS, GROUPS[1]]
    found = advantages_of(groups, group_mean)
    assert found == [[0.5, -0.5], [], [(-0.5, -1.5), (0.5, 1.5, 0)], [1, -1, 0]]
    kept = advantages_of(groups, group_mean, keep_zero_std=True)
    assert kept[1] == [(0, 0), (0, 0)]


def test_single_rollout_of_a_turn_is_not_compared() -> None:
    def others(rewards: Any, lengths: Any) -> list[float]:
        assert len(rewards) > 1
        return [*rewards]

    assert advantages_of([TURNS], others) == [[(4, 2), (5, 5, 0)]]


def scaled_by_step(rewards: Any, lengths: Any, *, step_rewards: Any) -> list[float]:
    return [*rewards]


@pytest.mark.parametrize(
    ("advantage", "weights", "setting"),
    [
        (token_whitening, None, "an advantage function with step_rewards"),
        (functools.partial(group_zscore, scale_rewards="batch"), None, "scale_rewards batch"),
        (scaled_by_step, None, "an advantage function with step_rewards"),
        (group_mean, {}, "normalize_then_sum"),
    ],
)
def test_settings_without_meaning_for_turns_are_refused(
    advantage: Any, weights: Any, setting: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{setting} cannot be combined with the rewards of t"):
        advantages_of([TURNS], advantage, term_weights=weights)


# Filters.


def rollout_of(
    logprobs: list[float], token_ids: list[int] | None = None, *, finish_reason: str = "stop"
) -> Rollout:
    """A prompt of two tokens, which are rare and certain, and these generated ones."""
    total = len(logprobs) + 2
    return Rollout(
        token_ids=np.array([9999, 9999, *(token_ids or [5] * len(logprobs))], np.int32),
        loss_mask=np.arange(total) >= 2,
        logprobs=np.array([0, 0, *logprobs], np.float32),
        policy_steps=np.array([-1, -1, *([0] * len(logprobs))], np.int32),
        reward=1.0,
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


ABOVE_500 = {"token_id_threshold": 500}


@pytest.mark.parametrize(
    ("token_id", "logprob", "detected", "options"),
    [
        (600, -8.95, True, ABOVE_500), (600, -8.85, False, ABOVE_500),  # -ln(1000) - 2 = -8.907755
        (500, -8.95, False, ABOVE_500), (501, -8.95, True, ABOVE_500),
        (600, -8.0, True, {**ABOVE_500, "logprob_offset": 1.0}),  # -7.907755
        (600, -8.0, False, {**ABOVE_500, "logprob_offset": 1.2}),  # -8.107755
        (999, -50.0, False, {"token_id_threshold": 1000}),  # above the whole vocabulary
        (999, -50.0, False, {}),  # so is the default
        (999, -50.0, True, {"token_id_threshold": 998, "vocab_size": 1001}),
    ],
)  # fmt: skip
def test_gibberish_detects_rare_improbable_token(
    token_id: int, logprob: float, detected: bool, options: dict[str, Any]
) -> None:
    rollout = rollout_of([-0.1, logprob, -0.1], [5, token_id, 700])
    assert gibberish(rollout, **{"vocab_size": 1000, **options}) is detected


SURE, UNSURE = math.log(0.995), math.log(0.985)
OF_4 = {"max_completion_length": 100, "window": 4}


@pytest.mark.parametrize(
    ("logprobs", "detected", "options"),
    [
        ([SURE] * 4, True, OF_4),
        ([SURE] * 3, False, OF_4),  # the certain prompt does not count
        ([SURE] * 3 + [UNSURE] + [SURE] * 3, False, OF_4),
        ([UNSURE] + [SURE] * 4 + [UNSURE], True, OF_4),
        ([UNSURE] * 9, False, OF_4),
        ([UNSURE] * 4, True, {"max_completion_length": 8, "prob_threshold": 0.98}),
        ([SURE] * 8, True, {"max_completion_length": 16}),  # the window is half of this at most
        ([SURE] * 8, True, {"max_completion_length": 17}),
        ([SURE] * 8, False, {"max_completion_length": 18}),
    ],
)
def test_repetition_detects_window_of_certain_tokens(
    logprobs: list[float], detected: bool, options: dict[str, Any]
) -> None:
    assert repetition(rollout_of(logprobs), **options) is detected


def test_overlong_detects_finish_reason_length() -> None:
    assert overlong(rollout_of([-1.0], finish_reason="length"))
    assert not overlong(rollout_of([-1.0]))


def long_rollout() -> Rollout:
    return rollout_with(0.0, finish_reason="length")


PLAIN = group_of([1, 0])
GROUP = dataclasses.replace(PLAIN, rollouts=(*PLAIN.rollouts, long_rollout(), long_rollout()))


def test_filter_without_enforce_only_counts() -> None:
    stays, counts = apply_filters([GROUP], [Filter("overlong", overlong)])
    assert stays == [[True] * 4]
    assert counts == {"filter/overlong": 2, "filter/taken_out": 0}


def test_rollout_detected_twice_is_counted_once() -> None:
    both = [Filter("overlong", overlong, enforce=True), Filter("all", lambda _: True, enforce=True)]
    stays, counts = apply_filters([GROUP], both)
    assert stays == [[False] * 4]
    assert counts == {"filter/overlong": 2, "filter/all": 4, "filter/taken_out": 4}


def test_no_filters_keep_all_and_report_nothing() -> None:
    assert apply_filters([PLAIN], []) == ([[True, True]], {})
