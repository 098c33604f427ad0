"""Losses without a clipped ratio: plain REINFORCE, and the group-relative one with a KL term."""

from __future__ import annotations

from torch import Tensor

from peralta_zmq.learning.losses.sums import ratio_of, sequence_mean, token_mean, wanted
from peralta_zmq.learning.tokens import Tokens

MAX_KL_LOG_RATIO = 10.0


def reinforce(
    tokens: Tokens, *, epsilon_high: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-mean(A pi), over all tokens of the step (Peralta).

    With `epsilon_high` each token is weighted by sg[clamp(exp(pi - mu), 0, 1 + epsilon_high)]
    (PipelineRL, 0.02 there).
    """
    objective = tokens.advantages * tokens.logprobs
    if epsilon_high is None:
        return -token_mean(tokens, objective), {}
    ratio = ratio_of((tokens.logprobs - tokens.old_logprobs).detach())
    clipped = (ratio > 1 + epsilon_high).to(ratio.dtype)
    loss = -token_mean(tokens, ratio.clamp(0, 1 + epsilon_high) * objective)
    return loss, {"clip_ratio/high_mean": token_mean(tokens, clipped)}


def grpo_kl(tokens: Tokens, *, beta: float = 0.001) -> tuple[Tensor, dict[str, Tensor]]:
    """-exp(pi - sg[pi]) A + beta k3, by each rollout's length, over the rollouts (async-grpo).

    k3 = e^c - c - 1 with c = clamp(ref - pi, -10, 10). Raises ConfigError without the logprobs of
    a reference, unless beta is 0.
    """
    per_token = -(tokens.logprobs - tokens.logprobs.detach()).exp() * tokens.advantages
    metrics: dict[str, Tensor] = {}
    if beta:
        reference = wanted(tokens.ref_logprobs, loss="grpo_kl", option="beta", model="reference")
        gap = (reference - tokens.logprobs).clamp(-MAX_KL_LOG_RATIO, MAX_KL_LOG_RATIO)
        kl = gap.exp() - gap - 1
        per_token = per_token + beta * kl
        metrics["kl"] = token_mean(tokens, kl.detach())
    return sequence_mean(tokens, per_token).sum() / tokens.step_sequences, metrics
