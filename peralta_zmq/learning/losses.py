"""Losses that leave out what has drifted too far from what sampled it, token or whole rollout."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from peralta_zmq.learning.losses.sums import (
    ratio_of,
    sequence_mean,
    sequence_sum,
    token_mean,
    wanted,
)
from peralta_zmq.learning.tokens import Tokens

MAX_SEQUENCE_LOG_RATIO = 10.0
ORDERED = (  # options that are bounds, low and high
    ("token_mask_low", "token_mask_high"),
    ("geo_mask_low", "geo_mask_high"),
    ("sequence_mask_low", "sequence_mask_high"),
)


def importance(
    tokens: Tokens,
    *,
    ratio_type: Literal["token", "sequence"] = "token",
    token_mask_low: float = 0.125,
    token_mask_high: float = 8.0,
    geo_mask_low: float = 0.1,
    geo_mask_high: float = 10.0,
    sequence_mask_low: float = 0.0,
    sequence_mask_high: float = 100.0,
    sequence_clip_high: float = 10.0,
    adv_tau: float = 1.0,
    teacher_tau: float = 0.0,
    kl_tau: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum over kept tokens of sg[ratio (adv_tau A + teacher_tau (teacher - pi) - kl_tau lr)] pi.

    lr = pi - mu; the ratio is exp(lr) of the token, or of the whole rollout. Divided by all tokens
    of the step, dropped ones included; by rollout, each by its own length and then by the number
    of rollouts (Surogate, prime-rl). Raises ConfigError without a teacher that is asked for.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    ratio = ratio_of(log_ratio)
    dropped = {
        "masked/token_low": ratio < token_mask_low,
        "masked/token_high": ratio > token_mask_high,
    }
    dropped_sequences = {
        "masked/geo": _outside(
            ratio_of(sequence_mean(tokens, log_ratio)), geo_mask_low, geo_mask_high
        ),
        "masked/sequence": _extreme(tokens, ratio, sequence_mask_low, sequence_mask_high),
    }
    whole = [each[tokens.sequence] for each in dropped_sequences.values()]
    lost = torch.stack([*dropped.values(), *whole]).any(0)
    signal = adv_tau * tokens.advantages - kl_tau * log_ratio
    if teacher_tau:
        teacher = wanted(
            tokens.teacher_logprobs, loss="importance", option="teacher_tau", model="teacher"
        )
        signal = signal + teacher_tau * (teacher - tokens.logprobs.detach())
    weight = ratio if ratio_type == "token" else _of_sequence(tokens, log_ratio, sequence_clip_high)
    per_token = -(weight * signal * ~lost) * tokens.logprobs
    if ratio_type == "token":
        loss = token_mean(tokens, per_token)
    else:
        loss = sequence_mean(tokens, per_token).sum() / tokens.step_sequences
    return loss, {
        "masked/mean": token_mean(tokens, lost.to(ratio.dtype)),
        **{name: token_mean(tokens, each.to(ratio.dtype)) for name, each in dropped.items()},
        **{name: (each).sum() / tokens.step_sequences for name, each in dropped_sequences.items()},
    }


def dppo(
    tokens: Tokens,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    kl_tau: float = 1e-3,
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean(-keep A r + kl_tau lr^2), over all tokens of the step; gradient through r and lr^2.

    lr = pi - mu, r = e^lr. A token is dropped when its probability has risen by more than
    `dppo_mask_high` and A > 0, or fallen by more than `dppo_mask_low` and A <= 0 (prime-rl).
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    risen = (tokens.logprobs.exp() - tokens.old_logprobs.exp()).detach()
    better = tokens.advantages > 0
    low, high = (risen < -dppo_mask_low) & ~better, (risen > dppo_mask_high) & better
    gained = tokens.advantages * ratio_of(log_ratio) * ~(low | high)
    return token_mean(tokens, kl_tau * log_ratio**2 - gained), {
        "masked/mean": token_mean(tokens, (low | high).to(risen.dtype)),
        "masked/token_low": token_mean(tokens, low.to(risen.dtype)),
        "masked/token_high": token_mean(tokens, high.to(risen.dtype)),
    }


def _outside(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio < low) | (ratio > high)


def _extreme(tokens: Tokens, ratio: Tensor, low: float, high: float) -> Tensor:
    """Whether the smallest or the largest ratio of a rollout is out of bounds, [num_sequences]."""
    out = _outside(ratio, low, high).to(ratio.dtype)
    return sequence_sum(tokens, out) > 0


def _of_sequence(tokens: Tokens, log_ratio: Tensor, clip_high: float) -> Tensor:
    """The ratio of the whole rollout on each of its tokens, [N]."""
    summed = sequence_sum(tokens, log_ratio).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    return summed.exp().clamp(max=clip_high)[tokens.sequence]
