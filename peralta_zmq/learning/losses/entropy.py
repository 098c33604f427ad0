"""A bonus for a policy that keeps its choices open, on top of any loss."""

from __future__ import annotations

import functools

from torch import Tensor

from peralta_zmq.learning.losses.sums import token_mean
from peralta_zmq.learning.tokens import TokenLoss, Tokens


def with_entropy_bonus(loss: TokenLoss, coefficient: float) -> TokenLoss:
    """The loss minus `coefficient` times the mean entropy over the tokens of the step."""

    @functools.wraps(getattr(loss, "func", loss))  # whoever complains names the loss
    def with_bonus(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = loss(tokens)
        assert tokens.entropy is not None, "who adds the bonus asks the policy for its entropy"
        entropy = token_mean(tokens, tokens.entropy)
        return value - coefficient * entropy, {**metrics, "entropy": entropy}

    return with_bonus
