"""Advantage functions: from the rewards of K rollouts to K advantages.

To add one, write a function here and add its line to the table in `registry.py`. `rewards` and
`lengths` (generated tokens) have one entry per rollout; keywords become options in [advantage].
The K rollouts are one group. For a function with the keyword `group_adv_norm` set to false they
are all rollouts of the step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import chain, islice
from statistics import fmean

from peralta_zmq.errors import UserCodeError
from peralta_zmq.rollout import RolloutGroup

AdvantageFunction = Callable[[Sequence[float], Sequence[int]], list[float]]


def advantages_of(
    groups: Sequence[RolloutGroup], advantage: AdvantageFunction
) -> list[list[float]]:
    """Compute the advantages of each group's rollouts.

    Raises UserCodeError if the function does not return one finite number per rollout.
    """
    rewards = [group.rewards for group in groups]
    lengths = [[rollout.num_generated for rollout in group.rollouts] for group in groups]
    option = inspect.signature(advantage).parameters.get("group_adv_norm")
    if option is None or option.default:
        return [_checked(advantage, r, n) for r, n in zip(rewards, lengths, strict=True)]
    advantages = iter(_checked(advantage, [*chain(*rewards)], [*chain(*lengths)]))
    return [list(islice(advantages, len(group))) for group in rewards]


def group_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - mean(R), the baseline of REINFORCE in Peralta."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def group_zscore(
    rewards: Sequence[float], lengths: Sequence[int], *, eps: float = 1e-8, ddof: int = 0
) -> list[float]:
    """(R - mean) / (std + eps) (GRPO); std is the population's unless ddof is 1."""
    mean = fmean(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof)
    return [(reward - mean) / (math.sqrt(variance) + eps) for reward in rewards]


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - mean of the other K - 1 rewards (RLOO, PipelineRL)."""
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


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
    """(R - mean) / (std + eps) with each rollout weighted by its generated tokens (AReaL).

    Biased variance. Over all rollouts of the step, or over each group with `group_adv_norm`.
    """
    mean = _token_mean(rewards, lengths)
    variance = _token_mean([(reward - mean) ** 2 for reward in rewards], lengths)
    return [(reward - mean) / (math.sqrt(variance) + eps) for reward in rewards]


def _token_mean(values: Sequence[float], lengths: Sequence[int]) -> float:
    weighted = (value * length for value, length in zip(values, lengths, strict=True))
    return math.fsum(weighted) / sum(lengths)


def _checked(
    advantage: AdvantageFunction, rewards: Sequence[float], lengths: Sequence[int]
) -> list[float]:
    advantages = advantage(rewards, lengths)
    function = getattr(advantage, "func", advantage)
    name = f"advantage '{function.__module__}.{function.__qualname__}'"
    if len(advantages) != len(rewards):
        raise UserCodeError(
            f"{name} returned {len(advantages)} advantages for {len(rewards)} rewards; "
            "return one for each, in their order"
        )
    for value in advantages:
        if not math.isfinite(value):
            raise UserCodeError(
                f"{name} returned the advantage {value} for the rewards "
                f"{list(rewards)!r:.200}; return finite numbers"
            )
    return advantages
