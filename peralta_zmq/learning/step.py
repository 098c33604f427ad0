"""One optimizer step over any number of micro-batches.

Knows tensors and losses; knows nothing of models: `score` gives the logprobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from peralta_zmq.learning.batch import Batch

TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # see losses


class Score(Protocol):
    """Logprobs of the tokens at the temperature that sampled them, all [B, T]."""

    def __call__(
        self, token_ids: Tensor, attention_mask: Tensor, *, temperature: Tensor | float
    ) -> Tensor: ...


def take_step(
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    score: Score,
    loss: TokenLoss,
    max_grad_norm: float,
) -> dict[str, float]:
    """Accumulate the gradient of all batches, clip, step; returns loss, grad_norm, mismatch_kl.

    Normalized over the generated tokens of the whole step, so that no split into micro-batches
    changes the gradient. A step whose gradient is not finite is skipped and says so.
    """
    num_tokens = max(1.0, sum(float(batch.loss_mask.sum()) for batch in batches))
    total, mismatch = 0.0, 0.0
    for batch in batches:
        logprobs = score(
            batch.token_ids, batch.attention_mask, temperature=batch.temperatures
        )  # fmt: skip
        per_token = loss(logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask)
        summed = (per_token * batch.loss_mask).sum() / num_tokens
        summed.backward()
        total += summed.item()
        mismatch += _mismatch(logprobs.detach(), batch) / num_tokens
    grad_norm = _clip_and_step(optimizer, max_grad_norm) if batches else 0.0
    return {
        "loss": total,
        "grad_norm": grad_norm,
        "mismatch_kl": mismatch,
        "skipped": float(not math.isfinite(grad_norm)),
    }


def _mismatch(logprobs: Tensor, batch: Batch) -> float:
    log_ratio = (logprobs - batch.old_logprobs).clamp(-10, 10) * batch.loss_mask
    return float((log_ratio.exp() - log_ratio - 1).sum())


def _clip_and_step(optimizer: torch.optim.Optimizer, max_grad_norm: float) -> float:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm
