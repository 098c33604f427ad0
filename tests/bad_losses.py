"""Losses of one's own that fail in chosen ways."""

from __future__ import annotations

from torch import Tensor

from peralta_zmq.learning.losses import Tokens, reinforce

POISON = -99.0  # as the sampler's logprob of a token


def steep(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE whose value is a number and whose gradient is none where a token is poisoned."""
    value, metrics = reinforce(tokens)
    if (tokens.old_logprobs == POISON).any():
        value = value + (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt().sum()
    return value, metrics
