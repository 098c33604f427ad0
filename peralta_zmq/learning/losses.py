"""Losses per token. Each is a formula; the trainer masks, sums and normalizes for all of them.

Shapes: everything is [B, T]; `logprobs` carry gradient, `old_logprobs` are the sampler's,
`advantages` repeat the rollout's on each of its tokens. Further keywords come from [loss].
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 10.0


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **_: float
) -> Tensor:
    """-A log pi: the policy gradient with a baseline (Peralta)."""
    return -advantages * logprobs


def grpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - eps, 1 + eps_high) A), r = pi / mu (arXiv 2402.03300, no KL)."""
    high = epsilon if epsilon_high is None else epsilon_high
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages)
