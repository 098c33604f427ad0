"""Which rollouts are better not learned from. One function each, no torch.

A filter is `def name(rollout, *, option=...) -> bool`: True when it catches the rollout. Options
come from [filter]; `vocab_size` and `max_completion_length`, when a filter has them, from the run.
An enforced filter takes the rollout's tokens out of the loss; its reward still counts in the
baseline of its group, and in what is reported. Knows rollouts; knows nothing of losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from peralta_zmq.rollout import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter with its options, and whether it takes out what it catches or only counts."""

    name: str  # in metrics
    catches: Callable[[Rollout], bool]
    enforce: bool = False


def apply_filters(
    groups: Sequence[RolloutGroup], filters: Sequence[Filter]
) -> tuple[list[list[bool]], dict[str, float]]:
    """Whether each rollout of each group stays in the loss; and metrics.

    `filter/NAME` is the share of rollouts that a filter caught, `filter/taken_out` that of those
    that are not learned from.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    stays, metrics = [True] * len(rollouts), dict[str, float]()
    for each in filters:
        caught = [each.catches(rollout) for rollout in rollouts]
        metrics[f"filter/{each.name}"] = _share(caught)
        if each.enforce:
            stays = [here and not out for here, out in zip(stays, caught, strict=True)]
    if filters:
        metrics["filter/taken_out"] = _share([not here for here in stays])
    following = iter(stays)
    return [list(islice(following, len(group.rollouts))) for group in groups], metrics


def gibberish(
    rollout: Rollout,
    *,
    vocab_size: int,
    token_id_threshold: int = 100_000,
    logprob_offset: float = 2.0,
) -> bool:
    """A rare token (id above the threshold) that was drawn against all odds (Surogate).

    logprob < -ln(vocab_size) - logprob_offset; never, when the vocabulary has no such id.
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
    """`window` tokens in a row, each drawn with a probability above the threshold (Surogate).

    The window is half of max_completion_length at most, or short answers would never be caught.
    """
    needed = max(1, min(window, max_completion_length // 2))
    certain = rollout.logprobs[rollout.loss_mask] > math.log(prob_threshold)
    breaks = np.flatnonzero(~certain)
    ends = np.concatenate([[-1], breaks, [len(certain)]])
    return bool((np.diff(ends) - 1).max() >= needed)


def overlong(rollout: Rollout) -> bool:
    """Cut off at the largest length before it ended."""
    return rollout.finish_reason == "length"


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / max(1, len(flags))
