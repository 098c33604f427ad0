"""The objectives of a loss, per token; composition.OBJECTIVES has their formulas and options.

    def objective(ratio, advantages, logprobs, parts) -> (loss, flags)

The first three arguments and the loss have the shape [N]. `logprobs` are those of the policy, and
`ratio` is the policy's probability divided by that of an older policy; both have a gradient. The
flags, bool [N] by the name of their metric, are true for the tokens that the objective clips.
vespo, which needs the ratios of a whole rollout, is in losses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from peralta_zmq.learning.composition import Composition

Result: TypeAlias = tuple[Tensor, dict[str, Tensor]]


def reinforce(ratio: Tensor, advantages: Tensor, logprobs: Tensor, parts: Composition) -> Result:
    """-A pi, with epsilon_high weighted by the ratio up to 1 + epsilon_high."""
    if parts.epsilon_high is None:
        return -advantages * logprobs, {}
    return _weighted(ratio, advantages * logprobs, 1 + parts.epsilon_high)


def cispo(ratio: Tensor, advantages: Tensor, logprobs: Tensor, parts: Composition) -> Result:
    """-A pi weighted by the ratio up to epsilon_high."""
    return _weighted(ratio, advantages * logprobs, parts.epsilon_high)


def importance(ratio: Tensor, advantages: Tensor, logprobs: Tensor, parts: Composition) -> Result:
    """-A pi weighted by the ratio, up to sequence_clip_high if set."""
    loss, _ = _weighted(ratio, advantages * logprobs, parts.sequence_clip_high)
    return loss, {}


def _weighted(ratio: Tensor, objective: Tensor, limit: float | None) -> Result:
    """-sg[min(ratio, limit)] objective."""
    weight = ratio.detach()
    if limit is None:
        return -weight * objective, {}
    return -weight.clamp(max=limit) * objective, {"clip_ratio/high_mean": weight > limit}


def on_policy(ratio: Tensor, advantages: Tensor, logprobs: Tensor, parts: Composition) -> Result:
    """-A exp(pi - sg[pi]): the value is -A, the gradient that of reinforce."""
    return -advantages * (logprobs - logprobs.detach()).exp(), {}


def unclipped(ratio: Tensor, advantages: Tensor, logprobs: Tensor, parts: Composition) -> Result:
    """-A r."""
    return -advantages * ratio, {}


def ppo(ratio: Tensor, advantages: Tensor, logprobs: Tensor, parts: Composition) -> Result:
    """PPO's clip, two-sided with delta (arXiv 2505.07291), dual with c_clip (arXiv 1912.09729).

    The metrics have TRL's names; a flag is true where the clip removes the gradient.
    """
    low = 1 - parts.epsilon
    high = 1 + (parts.epsilon if parts.epsilon_high is None else parts.epsilon_high)
    clipped = ratio.clamp(low, high)
    if parts.delta is not None:
        ratio = ratio.clamp(max=parts.delta)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if parts.c_clip is not None:
        bounded = torch.minimum(loss, -parts.c_clip * advantages)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss, {
        "clip_ratio/low_mean": (ratio.detach() < low) & (advantages < 0),
        "clip_ratio/high_mean": (ratio.detach() > high) & (advantages > 0),
    }


def sapo(ratio: Tensor, advantages: Tensor, logprobs: Tensor, parts: Composition) -> Result:
    """-A sigmoid(t (r - 1)) 4 / t: a soft clip, whose gradient at r = 1 is that of -A r."""
    is_positive = advantages > 0
    t = torch.where(is_positive, parts.sapo_temperature_pos, parts.sapo_temperature_neg)
    t = t.to(ratio.dtype)
    return -advantages * torch.sigmoid(t * (ratio - 1)) * 4 / t, {}


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Composition], Result]] = {
    "reinforce": reinforce,
    "importance": importance,
    "on_policy": on_policy,
    "ratio": unclipped,
    "ppo": ppo,
    "cispo": cispo,
    "sapo": sapo,
}
