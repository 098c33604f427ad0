"""Losses that clip the ratio of the policy to what sampled, per token or per rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from peralta_zmq.learning.losses.sums import ratio_of, sequence_mean, token_mean
from peralta_zmq.learning.tokens import Tokens

GRPO_LOG_RATIO = 10.0


def grpo(
    tokens: Tokens,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    c_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-mean min(r A, clip(r, 1 - eps, 1 + eps_high) A), r = exp(clamp(pi - mu, -10, 10)).

    Over all tokens of the step (arXiv 2402.03300 without its KL). With `c_clip` > 1 a negative
    advantage costs at most c_clip |A| (dual clip, arXiv 1912.09729).
    """
    ratio = ratio_of(tokens.logprobs - tokens.old_logprobs, limit=GRPO_LOG_RATIO)
    per_token = _clipped(ratio, tokens.advantages, epsilon, epsilon_high, c_clip)
    return token_mean(tokens, per_token), {
        name: token_mean(tokens, outside)
        for name, outside in _outside(ratio, tokens.advantages, epsilon, epsilon_high).items()
    }


def decoupled_ppo(
    tokens: Tokens,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    c_clip: float | None = None,
    use_decoupled_loss: bool = True,
    behav_imp_weight_cap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean(w max(-A r, -A clip(r))), r = exp(pi - prox), w = exp(prox - mu) (AReaL).

    A weight above `behav_imp_weight_cap` becomes 0, and its token stays in the mean. Without
    prox, or without `use_decoupled_loss`, it is PPO on mu.
    """
    prox = tokens.prox_logprobs if use_decoupled_loss else None
    proximal = tokens.old_logprobs if prox is None else prox
    ratio, weight = ratio_of(tokens.logprobs - proximal), ratio_of(proximal - tokens.old_logprobs)
    metrics = _outside(ratio, tokens.advantages, epsilon, epsilon_high)
    if behav_imp_weight_cap is not None:
        capped = (weight > behav_imp_weight_cap).to(weight.dtype)
        weight = weight * (1 - capped)
        metrics["masked/behav_imp_weight"] = capped
    per_token = _clipped(ratio, tokens.advantages, epsilon, epsilon_high, c_clip) * weight
    return token_mean(tokens, per_token), {
        name: token_mean(tokens, value) for name, value in metrics.items()
    }


def gspo(
    tokens: Tokens, *, epsilon: float = 3e-4, epsilon_high: float | None = 4e-4
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s) A) for each rollout, s = exp(mean of pi - mu); the mean over the rollouts.

    arXiv 2507.18071, with its bounds.
    """
    ratio = ratio_of(sequence_mean(tokens, tokens.logprobs - tokens.old_logprobs))
    advantages = sequence_mean(tokens, tokens.advantages)
    per_sequence = _clipped(ratio, advantages, epsilon, epsilon_high, None)
    # a rollout without an unmasked token has ratio 1 and advantage 0 here: it adds nothing
    return per_sequence.sum() / tokens.step_sequences, {
        name: outside.sum() / tokens.step_sequences
        for name, outside in _outside(ratio, advantages, epsilon, epsilon_high).items()
    }


def _clipped(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None, c: float | None
) -> Tensor:
    high = epsilon if epsilon_high is None else epsilon_high
    clipped = ratio.clamp(1 - epsilon, 1 + high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if c is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -c * advantages), loss)


def _outside(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None
) -> dict[str, Tensor]:
    """1 where the clip takes the gradient away, else 0, by TRL's names."""
    ratio, high = ratio.detach(), epsilon if epsilon_high is None else epsilon_high
    low = (ratio < 1 - epsilon) & (advantages < 0)
    above = (ratio > 1 + high) & (advantages > 0)
    return {
        "clip_ratio/low_mean": low.to(ratio.dtype),
        "clip_ratio/high_mean": above.to(ratio.dtype),
    }
