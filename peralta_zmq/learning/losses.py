"""Losses: one formula each, over the flat generated tokens of a micro-batch (see tokens).

Each divides by the totals of the whole optimizer step. Further keywords come from [loss].
"""

from __future__ import annotations

from torch import Tensor, minimum

from peralta_zmq.learning.tokens import Tokens

MAX_LOG_RATIO = 10.0


def reinforce(tokens: Tokens, **_: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum(m A pi) / sum(m): the policy gradient with a baseline (Peralta)."""
    summed = (tokens.mask * tokens.advantages * tokens.logprobs).sum()
    return -summed / tokens.step_tokens, {}


def grpo(
    tokens: Tokens, *, epsilon: float = 0.2, epsilon_high: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum m min(r A, clip(r, 1 - eps, 1 + eps_high) A) / sum(m), r = pi / mu.

    arXiv 2402.03300, without the KL term.
    """
    high = epsilon if epsilon_high is None else epsilon_high
    log_ratio = tokens.logprobs - tokens.old_logprobs
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + high)
    gain = minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    return -(tokens.mask * gain).sum() / tokens.step_tokens, {}
