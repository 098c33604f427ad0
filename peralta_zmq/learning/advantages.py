"""Advantages of rollouts from their rewards, and filters that remove rollouts.

A rollout is one completion of a problem; a group is all rollouts of one problem. To add a function,
write it here and add its line to the table in `registry.py`. The function's keywords become options
in [advantage] or [filter].

    def advantage(rewards, lengths, *, option=...) -> list[float]

turns the rewards of K rollouts into K advantages; `lengths` are the numbers of generated tokens.
The K rollouts are one group, or all rollouts of the step if the function has a keyword
`group_adv_norm` and its value is False.

    def filter(rollout, *, option=...) -> bool

returns True if the rollout has the defect that the filter detects. An enforced filter removes the
tokens of such rollouts from the loss; the rewards of these rollouts still count in the metrics and
in the advantages of the group. The keywords `vocab_size` and `max_completion_length` get their
values from the run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import fmean

import numpy as np

from peralta_zmq.rollout import Rollout, RolloutGroup, equal_within_rounding

AdvantageFunction = Callable[[Sequence[float], Sequence[int]], list[float]]


# Advantages


def advantages_of(
    groups: Sequence[RolloutGroup], advantage: AdvantageFunction, *, keep_zero_std: bool = False
) -> list[list[float]]:
    """Compute the advantages of each group's rollouts.

    If all rewards of a group are equal, its list of advantages is empty, and its rewards do not
    count in a mean over the whole step. `keep_zero_std` turns off this exception.
    """
    trained = [group for group in groups if keep_zero_std or group.has_signal]
    rewards = [group.rewards for group in trained]
    lengths = [[rollout.num_generated for rollout in group.rollouts] for group in trained]
    # `advantage` has its options bound (functools.partial). inspect.signature shows the value of a
    # bound option as its default, so `option.default` is the configured value.
    option = inspect.signature(advantage).parameters.get("group_adv_norm")
    if option is None or option.default:
        by_group = map(advantage, rewards, lengths)
    else:
        values = iter(advantage([*chain(*rewards)], [*chain(*lengths)]) if trained else ())
        by_group = (list(islice(values, len(group))) for group in rewards)
    return [next(by_group) if keep_zero_std or group.has_signal else [] for group in groups]


def group_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - mean(R): REINFORCE with the mean reward of the group as baseline."""
    return _deviations(rewards, fmean(rewards))


def group_zscore(
    rewards: Sequence[float], lengths: Sequence[int], *, eps: float = 1e-8, ddof: int = 0
) -> list[float]:
    """(R - mean) / (std + eps) (GRPO); std divides by K - ddof for K rollouts."""
    deviations = _deviations(rewards, fmean(rewards))
    variance = math.fsum(each**2 for each in deviations) / max(1, len(rewards) - ddof)
    return _scaled(deviations, math.sqrt(variance) + eps)


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - mean of the other K - 1 rewards (RLOO, PipelineRL); 0 for a single rollout."""
    share_of_others = 1 - 1 / len(rewards)  # R - mean = share_of_others * (R - mean of the others)
    return _scaled(_deviations(rewards, fmean(rewards)), share_of_others)


def length_weighted(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - sum(R * length) / sum(length) (Surogate's length_weighted_mean)."""
    return _deviations(rewards, _token_mean(rewards, lengths))


def token_whitening(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    eps: float = 1e-5,
    group_adv_norm: bool = False,
) -> list[float]:
    """(R - mean) / (std + eps), weighted by generated tokens (AReaL).

    The weighted mean and the weighted std (of the population) are over all rollouts of the step, or
    over each group with `group_adv_norm`.
    """
    deviations = _deviations(rewards, _token_mean(rewards, lengths))
    variance = _token_mean([each**2 for each in deviations], lengths)
    return _scaled(deviations, math.sqrt(variance) + eps)


def _deviations(rewards: Sequence[float], baseline: float) -> list[float]:
    """R - baseline; exactly 0 if all rewards are equal within rounding.

    Otherwise a division by the standard deviation would turn rounding errors into advantages of 1.
    """
    if equal_within_rounding(rewards):
        return [0.0] * len(rewards)
    return [reward - baseline for reward in rewards]


def _scaled(deviations: Sequence[float], divisor: float) -> list[float]:
    """Each deviation divided by `divisor`, which is 0 only if the deviations are."""
    return [each / (divisor or 1.0) for each in deviations]


def _token_mean(values: Sequence[float], lengths: Sequence[int]) -> float:
    """Mean of the values, each weighted by its length in tokens."""
    weighted = (value * length for value, length in zip(values, lengths, strict=True))
    return math.fsum(weighted) / sum(lengths)


# Filters


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter function with its options bound."""

    name: str  # in metrics
    detects: Callable[[Rollout], bool]
    enforce: bool = False  # remove detected rollouts from the loss instead of only counting them


def apply_filters(
    groups: Sequence[RolloutGroup], filters: Sequence[Filter]
) -> tuple[list[list[bool]], dict[str, float]]:
    """Return one flag per rollout for each group, and the metrics.

    A flag is False for a rollout removed from the loss. The metric `filter/NAME` is the share of
    rollouts that filter NAME detected; `filter/taken_out` is the share removed from the loss.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    included, metrics = [True] * len(rollouts), dict[str, float]()
    for rule in filters:
        detected = [rule.detects(rollout) for rollout in rollouts]
        metrics[f"filter/{rule.name}"] = fmean(detected)
        if rule.enforce:
            included = [flag and not hit for flag, hit in zip(included, detected, strict=True)]
    if filters:
        metrics["filter/taken_out"] = fmean(not flag for flag in included)
    flags = iter(included)
    return [list(islice(flags, len(group.rollouts))) for group in groups], metrics


def gibberish(
    rollout: Rollout,
    *,
    vocab_size: int,
    token_id_threshold: int = 100_000,
    logprob_offset: float = 2.0,
) -> bool:
    """Detect a token with a large id and a very low probability (Surogate).

    The id is above token_id_threshold, and logprob < -ln(vocab_size) - logprob_offset.
    """
    is_unlikely = rollout.logprobs < -math.log(vocab_size) - logprob_offset
    has_large_id = rollout.token_ids > token_id_threshold
    return bool((rollout.loss_mask & has_large_id & is_unlikely).any())


def repetition(
    rollout: Rollout,
    *,
    max_completion_length: int,
    window: int = 3000,
    prob_threshold: float = 0.99,
) -> bool:
    """Detect `window` consecutive tokens that were almost certain (Surogate).

    Almost certain: a probability above prob_threshold. The window is at most half of
    max_completion_length, so that the filter also works in runs with short completions.
    """
    window = max(1, min(window, max_completion_length // 2))
    is_certain = rollout.logprobs[rollout.loss_mask] > math.log(prob_threshold)
    # Runs of certain tokens lie between the uncertain tokens.
    boundaries = np.concatenate([[-1], np.flatnonzero(~is_certain), [len(is_certain)]])
    return bool((np.diff(boundaries) - 1).max() >= window)


def overlong(rollout: Rollout) -> bool:
    """Detect a completion that was cut off at the maximum length."""
    return rollout.finish_reason == "length"
