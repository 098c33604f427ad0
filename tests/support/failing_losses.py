"""User losses that fail."""

from __future__ import annotations

from torch import Tensor

from peralta_zmq.learning.losses import Tokens, preset

POISON = -2.5  # old_logprobs of a poisoned token


def steep(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a finite value and a NaN gradient for poisoned tokens."""
    value, metrics = preset("reinforce")(tokens)
    if (tokens.old_logprobs == POISON).any():
        value = value + (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt().sum()
    return value, metrics
