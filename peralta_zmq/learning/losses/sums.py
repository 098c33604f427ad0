"""What the losses have in common: ratios, and sums that no split into micro-batches changes."""

from __future__ import annotations

import torch
from torch import Tensor

from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.tokens import Tokens

MAX_LOG_RATIO = 20.0  # beyond e^20 it is a broken sampler: no ratio may overflow


def ratio_of(log_ratio: Tensor, *, limit: float = MAX_LOG_RATIO) -> Tensor:
    """exp of a log ratio held within +-limit; beyond it there is no gradient."""
    return log_ratio.clamp(-limit, limit).exp()


def token_mean(tokens: Tokens, values: Tensor) -> Tensor:
    """This micro-batch's part of the mean over all unmasked tokens of the step."""
    return (values * tokens.mask).sum() / tokens.step_tokens


def sequence_sum(tokens: Tokens, values: Tensor) -> Tensor:
    """The sum over the unmasked tokens of each rollout, [num_sequences]."""
    summed = values.new_zeros(tokens.num_sequences)
    return summed.index_add(0, tokens.sequence, values * tokens.mask.to(values.dtype))


def sequence_lengths(tokens: Tokens) -> Tensor:
    """Unmasked tokens of each rollout, at least 1 so that it may divide, [num_sequences]."""
    return sequence_sum(tokens, torch.ones_like(tokens.logprobs)).clamp(min=1)


def sequence_mean(tokens: Tokens, values: Tensor) -> Tensor:
    """The mean over the unmasked tokens of each rollout, [num_sequences]; 0 where there is none."""
    return sequence_sum(tokens, values) / sequence_lengths(tokens)


def wanted(logprobs: Tensor | None, *, loss: str, option: str, model: str) -> Tensor:
    """The logprobs of another model. Raises ConfigError when the run has no such model."""
    if logprobs is None:
        raise ConfigError(
            f"loss.name {loss} with loss.{option} above 0 needs the logprobs of a {model}, and "
            f"this run has none; set loss.{option} to 0"
        )
    return logprobs
