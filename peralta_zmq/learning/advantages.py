"""How much better than its siblings each rollout was. One function each, no torch.

`rewards` are those of the K rollouts compared with each other, `lengths` the generated tokens of
each; returns K advantages. Further keywords are options in [advantage]. K rollouts are one group,
unless the function has the keyword `group_adv_norm` and it is false: then they are all rollouts
of the step.
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
    """The advantages of each group's rollouts.

    Raises PartError, naming the function, when it does not give a finite number for each.
    """
    rewards = [group.rewards for group in groups]
    lengths = [[rollout.num_generated for rollout in group.rollouts] for group in groups]
    if not over_the_step(advantage):
        return [_checked(advantage, *each) for each in zip(rewards, lengths, strict=True)]
    found = iter(_checked(advantage, [*chain(*rewards)], [*chain(*lengths)]))
    return [list(islice(found, len(group))) for group in rewards]


def over_the_step(advantage: AdvantageFunction) -> bool:
    """Whether it compares all rollouts of a step, and not those of one group."""
    choice = inspect.signature(advantage).parameters.get("group_adv_norm")
    return choice is not None and not choice.default


def group_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - mean(R): Peralta's REINFORCE baseline."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def group_zscore(
    rewards: Sequence[float], lengths: Sequence[int], *, eps: float = 1e-8, ddof: int = 0
) -> list[float]:
    """(R - mean) / (std + eps), population standard deviation unless ddof is 1: GRPO."""
    mean = fmean(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof)
    return [(reward - mean) / (math.sqrt(variance) + eps) for reward in rewards]


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - mean of the other K - 1 rewards: PipelineRL."""
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def length_weighted(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - sum(R * length) / sum(length): Surogate's length_weighted_mean."""
    baseline = _token_mean(rewards, lengths)
    return [reward - baseline for reward in rewards]


def token_whitening(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    eps: float = 1e-5,
    group_adv_norm: bool = False,
) -> list[float]:
    """(R - mean) / (std + eps), each rollout counted once per generated token (AReaL).

    Biased variance; over the step, or over each group with `group_adv_norm`.
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
    found = advantage(rewards, lengths)
    if len(found) != len(rewards):
        raise UserCodeError(
            f"{_name(advantage)} gives {len(found)} advantages for {len(rewards)} rewards; "
            "return one for each, in their order"
        )
    for value in found:
        if not math.isfinite(value):
            raise UserCodeError(
                f"{_name(advantage)} gives the advantage {value} for the rewards "
                f"{list(rewards)!r:.200}; return finite numbers"
            )
    return found


def _name(advantage: AdvantageFunction) -> str:
    function = getattr(advantage, "func", advantage)
    return f"advantage '{function.__module__}.{function.__qualname__}'"
