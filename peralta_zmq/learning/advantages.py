"""How much better than its siblings each rollout was. One function each, no torch.

`rewards` are the K rewards of one group, `lengths` the generated tokens of each; returns K
advantages. Further keywords come from the [advantage] section.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def group_mean(rewards: Sequence[float], lengths: Sequence[int], **_: float) -> list[float]:
    """R - mean(R): Peralta's REINFORCE baseline."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def group_zscore(
    rewards: Sequence[float], lengths: Sequence[int], *, eps: float = 1e-8, ddof: float = 0
) -> list[float]:
    """(R - mean) / (std + eps), population standard deviation unless ddof is 1: GRPO."""
    mean = fmean(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof)
    return [(reward - mean) / (variance**0.5 + eps) for reward in rewards]


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int], **_: float) -> list[float]:
    """R - mean of the other K - 1 rewards: PipelineRL."""
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def length_weighted(rewards: Sequence[float], lengths: Sequence[int], **_: float) -> list[float]:
    """R - sum(R * length) / sum(length): Surogate's length_weighted_mean."""
    baseline = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
    return [reward - baseline for reward in rewards]
