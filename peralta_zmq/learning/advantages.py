"""What each rollout contributes to the loss: advantages from rewards, and rollout filters.

A rollout is one completion of a problem; a group is all rollouts of one problem. To add a function,
write it here and add its line to the table in `registry.py`. Its keywords become options in
[advantage] or [filter].

    def advantage(rewards, lengths, *, option=...) -> list[float]

turns the rewards of K rollouts into K advantages; `lengths` are the numbers of generated tokens.
The K rollouts are one group, or all rollouts of the step if the function has a keyword
`group_adv_norm` and it is False.

    def filter(rollout, *, option=...) -> bool

returns True for a rollout that it detects. An enforced filter removes the tokens of detected
rollouts from the loss; their rewards still count in the metrics and in the advantages of their
group. The keywords `vocab_size` and `max_completion_length` get their values from the run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import fmean

import numpy as np

from peralta_zmq.rollout import Rollout, RolloutGroup

AdvantageFunction = Callable[[Sequence[float], Sequence[int]], list[float]]


# Advantages


def advantages_of(
    groups: Sequence[RolloutGroup], advantage: AdvantageFunction, *, keep_zero_std: bool = False
) -> list[list[float]]:
    """Compute the advantages of each group's rollouts.

    A group without signal, in which all rewards are equal, has none: its list is empty, and its
    rewards do not count in the step. With `keep_zero_std` it is treated as the other groups.
    """
    trained = [group for group in groups if keep_zero_std or group.has_signal]
    rewards = [group.rewards for group in trained]
    lengths = [[rollout.num_generated for rollout in group.rollouts] for group in trained]
    option = inspect.signature(advantage).parameters.get("group_adv_norm")
    if option is None or option.default:
        by_group = map(advantage, rewards, lengths)
    else:
        values = iter(advantage([*chain(*rewards)], [*chain(*lengths)]) if trained else ())
        by_group = (list(islice(values, len(group))) for group in rewards)
    return [next(by_group) if keep_zero_std or group.has_signal else [] for group in groups]


def group_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - mean(R), the baseline of REINFORCE in Peralta."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def group_zscore(
    rewards: Sequence[float], lengths: Sequence[int], *, eps: float = 1e-8, ddof: int = 0
) -> list[float]:
    """(R - mean) / (std + eps) (GRPO); std is the population's unless ddof is 1."""
    mean = fmean(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - ddof)
    return _standardized(rewards, mean, variance, eps)


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - mean of the other K - 1 rewards (RLOO, PipelineRL); 0 for a single rollout."""
    total, num_others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / num_others if num_others else 0.0 for reward in rewards]


def length_weighted(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - sum(R * length) / sum(length) (Surogate's length_weighted_mean)."""
    baseline = _token_mean(rewards, lengths)
    return [reward - baseline for reward in rewards]


def token_whitening(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    eps: float = 1e-5,
    group_adv_norm: bool = False,
) -> list[float]:
    """(R - mean) / (std + eps), each rollout weighted by its generated tokens (AReaL).

    Mean and std (of the population) are over all rollouts of the step, or over each group with
    `group_adv_norm`.
    """
    mean = _token_mean(rewards, lengths)
    variance = _token_mean([(reward - mean) ** 2 for reward in rewards], lengths)
    return _standardized(rewards, mean, variance, eps)


def _standardized(
    rewards: Sequence[float], mean: float, variance: float, eps: float
) -> list[float]:
    """(R - mean) / (std + eps), but 0 if the divisor is 0: equal rewards, without eps."""
    divisor = math.sqrt(variance) + eps
    return [(reward - mean) / divisor if divisor else 0.0 for reward in rewards]


def _token_mean(values: Sequence[float], lengths: Sequence[int]) -> float:
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
    """Return a flag per group and rollout, False if removed from the loss, and the metrics.

    The metric `filter/NAME` is the share of rollouts that a filter detected, `filter/taken_out` the
    share removed from the loss.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    included, metrics = [True] * len(rollouts), dict[str, float]()
    for rule in filters:
        detected = [rule.detects(rollout) for rollout in rollouts]
        metrics[f"filter/{rule.name}"] = fmean(detected)
        if rule.enforce:
            included = [keep and not found for keep, found in zip(included, detected, strict=True)]
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
    """Detect a token with an id above the threshold and a very low probability (Surogate).

    Very low: logprob < -ln(vocab_size) - logprob_offset.
    """
    unlikely = rollout.logprobs < -math.log(vocab_size) - logprob_offset
    rare = rollout.token_ids > token_id_threshold
    return bool((rollout.loss_mask & rare & unlikely).any())


def repetition(
    rollout: Rollout,
    *,
    max_completion_length: int,
    window: int = 3000,
    prob_threshold: float = 0.99,
) -> bool:
    """Detect `window` consecutive tokens with a probability above the threshold (Surogate).

    The window is at most half of max_completion_length, so that it can occur in short completions.
    """
    window = max(1, min(window, max_completion_length // 2))
    certain = rollout.logprobs[rollout.loss_mask] > math.log(prob_threshold)
    breaks = np.flatnonzero(~certain)
    ends = np.concatenate([[-1], breaks, [len(certain)]])
    return bool((np.diff(ends) - 1).max() >= window)


def overlong(rollout: Rollout) -> bool:
    """Detect a completion that reached the maximum length before its end token."""
    return rollout.finish_reason == "length"
