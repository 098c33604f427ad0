"""Rollout filters, which detect rollouts that should not be trained on.

To add one, write `def name(rollout, *, option=...) -> bool` here, True for a detected rollout, and
add its line to the table in `registry.py`. Keywords become options in [filter]; `vocab_size` and
`max_completion_length` come from the run. An enforced filter removes the rollout's tokens from the
loss; its reward still counts in the metrics and in the advantages of its group.
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
    """A filter function with its options bound."""

    name: str  # in metrics
    detects: Callable[[Rollout], bool]
    enforce: bool = False  # remove detected rollouts from the loss instead of only counting them


def apply_filters(
    groups: Sequence[RolloutGroup], filters: Sequence[Filter]
) -> tuple[list[list[bool]], dict[str, float]]:
    """Return a flag per group and rollout, False if it is removed from the loss; and metrics.

    `filter/NAME` is the share of rollouts that a filter detected, `filter/taken_out` the share
    removed from the loss.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    included, metrics = [True] * len(rollouts), dict[str, float]()
    for rule in filters:
        detected = [rule.detects(rollout) for rollout in rollouts]
        metrics[f"filter/{rule.name}"] = _share(detected)
        if rule.enforce:
            included = [a and not b for a, b in zip(included, detected, strict=True)]
    if filters:
        metrics["filter/taken_out"] = _share([not flag for flag in included])
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


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / max(1, len(flags))
