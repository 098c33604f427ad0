"""One optimizer step over the micro-batches of all ranks, with its diagnostics.

In order: count the tokens of the step on all ranks, compute the loss and its gradient for each
micro-batch, sum metrics and gradients over the ranks, clip, and step the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import torch
from torch import Tensor

from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.distributed import SINGLE, Ranks
from peralta_zmq.learning.losses import STRICT_LOG_RATIO, TokenLoss, Tokens, token_mean
from peralta_zmq.learning.packing import Batch
from peralta_zmq.learning.step_metrics import Mismatch

SENDER_KL, SENDER_TOKENS = "sender_kl/", "sender_tokens/"  # sums that do not become metrics


# Score(token_ids [M], trees, scored [N], temperature=...) returns the logprobs [N] of the tokens
# at the indices `scored` of a row; ScoreWithEntropy returns them and the entropies [N] of the
# distributions. `temperature` is a number or a tensor [N].
Score: TypeAlias = Callable[..., Tensor]
ScoreWithEntropy: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of an optimizer step."""

    metrics: dict[str, float]
    skip_reason: str = ""  # empty if the step was taken
    mismatch: dict[str, Mismatch] = field(default_factory=dict[str, Mismatch])  # by sender


def take_step(
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    score: Score,
    loss: TokenLoss,
    max_grad_norm: float,
    ranks: Ranks = SINGLE,
    score_with_entropy: ScoreWithEntropy | None = None,
) -> StepResult:
    """Accumulate the gradients of all batches on all ranks, clip them, and step the optimizer.

    The loss divides by the totals of the whole step, so the split into micro-batches and ranks
    does not change the gradient. All ranks skip a step whose gradient norm is not finite.
    Metrics: loss, grad_norm, entropy, mismatch_kl, ess, skipped, and those of the loss.
    `score_with_entropy`, if set, replaces `score` and fills `Tokens.entropy`. Raises ConfigError
    when the loss returns something other than its contract says.
    """
    step_tokens, step_sequences, num_batches = _totals(batches, ranks)
    sums: dict[str, float] = {}
    for batch in batches:
        row = (batch.token_ids, batch.trees, batch.scored)
        if score_with_entropy is None:
            logprobs, entropy = score(*row, temperature=batch.temperatures), None
        else:
            logprobs, entropy = score_with_entropy(*row, temperature=batch.temperatures)
        if not batch.mask.any():  # filler of a rank in lockstep: run the backward pass only
            (logprobs.sum() * 0.0).backward()
            continue
        tokens = Tokens(
            logprobs=logprobs,
            old_logprobs=batch.old_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
            sequence=batch.sequence,
            num_sequences=batch.num_sequences,
            step_tokens=step_tokens,
            step_sequences=step_sequences,
            prox_logprobs=logprobs.detach() if batch.prox_logprobs is None else batch.prox_logprobs,
            ref_logprobs=batch.ref_logprobs,
            teacher_logprobs=batch.teacher_logprobs,
            entropy=entropy,
        )
        value, loss_metrics = _checked_loss(loss, tokens)
        value.backward()
        diagnostics = _diagnostics(tokens, batch.senders)
        estimate = {"entropy": diagnostics.pop("entropy")}  # replaced by a loss that computes it
        summands = {**estimate, **loss_metrics, **diagnostics, "loss": value}
        for name, summand in summands.items():
            sums[name] = sums.get(name, 0.0) + float(summand.detach())
    metrics = ranks.sum_metrics(sums)
    mismatch = _pop_mismatch(metrics)
    num_not_finite = metrics.pop("not_finite", 0.0)
    ratio, square = metrics.pop("ratio", 0.0), metrics.pop("ratio_square", 0.0)
    grad_norm = _clip_and_step(optimizer, max_grad_norm, ranks) if num_batches else 0.0
    loss_value, mismatch_kl = metrics.pop("loss", 0.0), metrics.pop("mismatch_kl", 0.0)
    skip_reason = ""
    if not math.isfinite(grad_norm):
        skip_reason = _skip_reason(loss, loss_value, num_not_finite)
    return StepResult(
        {
            "loss": loss_value,
            "grad_norm": grad_norm,
            "mismatch_kl": mismatch_kl,
            "ess": ratio**2 / (step_tokens * square) if square else 1.0,
            "skipped": float(bool(skip_reason)),
            **metrics,
        },
        skip_reason,
        {} if skip_reason else mismatch,
    )


def _totals(batches: Sequence[Batch], ranks: Ranks) -> tuple[float, float, int]:
    """Unmasked tokens and rollouts that have one, each at least 1, and batches, on all ranks."""
    tokens = sum(float(batch.mask.sum()) for batch in batches)
    rollouts = sum(len(batch.sequence[batch.mask > 0].unique()) for batch in batches)
    totals = torch.tensor([tokens, rollouts, len(batches)], dtype=torch.float64)
    ranks.all_reduce(totals)
    return max(1.0, float(totals[0])), max(1.0, float(totals[1])), int(totals[2])


def _checked_loss(loss: TokenLoss, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Call the loss, which may be a user's function, and check its result."""
    name = _name(loss)
    result = cast("object", loss(tokens))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ConfigError(f"loss '{name}' must return a scalar and a dict of metrics")
    value, metrics = cast("tuple[object, dict[str, object]]", result)
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
        raise ConfigError(f"loss '{name}' must return a scalar that depends on tokens.logprobs")
    for metric, number in metrics.items():
        if not isinstance(number, Tensor) or number.ndim:
            raise ConfigError(f"metric '{metric}' of loss '{name}' must be a scalar tensor")
    return value, cast("dict[str, Tensor]", metrics)


@torch.no_grad()
def _diagnostics(tokens: Tokens, senders: Sequence[str]) -> dict[str, Tensor]:
    """Summands of entropy, of mismatch_kl (k3 of sampler and policy), of ess, and by sender.

    The entropy of the policy, in nats, is estimated from the sampled tokens as mean(-r pi); this is
    unbiased when sampling truncates nothing (no top-k, top-p or min-p).
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    log_ratio = log_ratio.clamp(-STRICT_LOG_RATIO, STRICT_LOG_RATIO)
    ratio = log_ratio.exp()
    kl = ratio - log_ratio - 1
    sums = {
        "entropy": token_mean(tokens, -ratio * tokens.logprobs),
        "mismatch_kl": token_mean(tokens, kl),
        "ratio": (tokens.mask * ratio).sum(),
        "ratio_square": (tokens.mask * ratio.square()).sum(),
        "not_finite": (~tokens.logprobs.isfinite()).sum(),
    }
    for prefix, values in ((SENDER_KL, kl), (SENDER_TOKENS, torch.ones_like(kl))):
        by_rollout = kl.new_zeros(tokens.num_sequences)
        by_rollout.index_add_(0, tokens.sequence, tokens.mask * values)
        for sender, value in zip(senders, by_rollout.cpu(), strict=False):
            sums[prefix + sender] = sums.get(prefix + sender, 0.0) + value
    return sums


def _pop_mismatch(metrics: dict[str, float]) -> dict[str, Mismatch]:
    """Remove the sums by sender from the metrics; senders without unmasked tokens have no entry."""
    mismatch: dict[str, Mismatch] = {}
    for name in [name for name in metrics if name.startswith(SENDER_TOKENS)]:
        sender = name.removeprefix(SENDER_TOKENS)
        kl, num_tokens = metrics.pop(SENDER_KL + sender), metrics.pop(name)
        if num_tokens:
            mismatch[sender] = Mismatch(kl, num_tokens)
    return mismatch


def _clip_and_step(optimizer: torch.optim.Optimizer, max_grad_norm: float, ranks: Ranks) -> float:
    """Clip the summed gradients, step if their norm is finite, and return the norm."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ranks.sum_gradients(parameters)
    grad_norm = float(ranks.full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)))
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def _skip_reason(loss: TokenLoss, value: float, num_not_finite: float) -> str:
    if num_not_finite:
        return f"{num_not_finite:.0f} logprobs of the policy are not finite"
    if not math.isfinite(value):
        return f"the loss is {value} although every logprob of the policy is finite"
    return f"the gradient of loss '{_name(loss)}' is not finite although its value is {value:.6g}"


def _name(loss: TokenLoss) -> str:
    return getattr(getattr(loss, "func", loss), "__name__", "loss")
