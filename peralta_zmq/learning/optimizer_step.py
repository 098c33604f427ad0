"""One optimizer step over any number of micro-batches.

Knows tensors and losses; knows nothing of models: `score` gives the logprobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.logprob_mismatch import Mismatch
from peralta_zmq.learning.packing import Batch
from peralta_zmq.learning.ranks import ALONE, Ranks
from peralta_zmq.learning.tokens import TokenLoss, Tokens
from peralta_zmq.rollout import PackedSequence

MAX_LOG_RATIO = 10.0  # of the diagnostics
BY_SENDER = "sender/"  # sums that are no metrics


class Score(Protocol):
    """Logprobs [N] of the tokens at `scored` in a row of segments, at their temperatures."""

    def __call__(
        self,
        token_ids: Tensor,
        segments: Sequence[PackedSequence],
        scored: Tensor,
        *,
        temperature: Tensor | float,
    ) -> Tensor: ...


class ScoreWithEntropy(Protocol):
    """The same with the entropy of the policy at each token, [N]."""

    def __call__(
        self,
        token_ids: Tensor,
        segments: Sequence[PackedSequence],
        scored: Tensor,
        *,
        temperature: Tensor | float,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step was; `problem` says why it was skipped, and is empty when it was not."""

    metrics: dict[str, float]
    problem: str = ""
    mismatch: dict[str, Mismatch] = field(default_factory=dict[str, Mismatch])  # by sender


def take_step(
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    score: Score,
    loss: TokenLoss,
    max_grad_norm: float,
    ranks: Ranks = ALONE,
    score_with_entropy: ScoreWithEntropy | None = None,
) -> Taken:
    """Accumulate the gradient of all batches of all ranks, clip, step.

    The loss divides by the totals of the whole step, so that no split into micro-batches or
    ranks changes the gradient. A step whose gradient is not finite is skipped, by all ranks, and
    says why.
    Metrics: loss, grad_norm, entropy, mismatch_kl, ess, skipped, and the loss's own. Raises
    ConfigError when the loss does not keep its contract. A loss that wants the entropy of the
    policy is given `score_with_entropy`, which is asked instead of `score`.
    """
    step_tokens, step_sequences, num_batches = _totals(batches, ranks)
    sums: dict[str, float] = {}
    for batch in batches:
        where = (batch.token_ids, batch.segments, batch.scored)
        if score_with_entropy is None:
            logprobs, entropy = score(*where, temperature=batch.temperatures), None
        else:
            logprobs, entropy = score_with_entropy(*where, temperature=batch.temperatures)
        tokens = replace(_tokens(batch, logprobs, step_tokens, step_sequences), entropy=entropy)
        if not tokens.mask.any():  # only here so that the ranks are lined up
            (logprobs.sum() * 0.0).backward()
            continue
        value, own = _checked(loss, tokens)
        value.backward()
        told = {
            "entropy": _entropy(tokens), **own, **_diagnostics(tokens),
            **_by_sender(tokens, batch.senders), "loss": value,
        }  # fmt: skip
        for name, each in told.items():
            sums[name] = sums.get(name, 0.0) + float(each.detach())
    metrics = ranks.merged(sums)
    mismatch = _pop_mismatch(metrics)
    unlikely = metrics.pop("not_finite", 0.0)
    ratio, square = metrics.pop("ratio", 0.0), metrics.pop("ratio_square", 0.0)
    grad_norm = _clip_and_step(optimizer, max_grad_norm, ranks) if num_batches else 0.0
    skipped = not math.isfinite(grad_norm)
    own = {name: each for name, each in metrics.items() if name not in ("loss", "mismatch_kl")}
    return Taken(
        {
            "loss": metrics.get("loss", 0.0),
            "grad_norm": grad_norm,
            "mismatch_kl": metrics.get("mismatch_kl", 0.0),
            "ess": ratio**2 / (step_tokens * square) if square else 1.0,
            "skipped": float(skipped),
            **own,
        },
        _problem(loss, metrics["loss"], unlikely) if skipped else "",
        {} if skipped else mismatch,
    )


@torch.no_grad()
def logprobs_of(score: Score, batch: Batch) -> Tensor:
    """What `score` thinks of the generated tokens, [N], without gradient."""
    return score(batch.token_ids, batch.segments, batch.scored, temperature=batch.temperatures)


def _totals(batches: Sequence[Batch], ranks: Ranks) -> tuple[float, float, int]:
    """Tokens that count in the whole step, rollouts that have one, each at least 1; batches."""
    tokens = sum(float(batch.mask.sum()) for batch in batches)
    rollouts = sum(len(batch.sequence[batch.mask > 0].unique()) for batch in batches)
    totals = torch.tensor([tokens, rollouts, len(batches)], dtype=torch.float64)
    ranks.add_up(totals)
    return max(1.0, float(totals[0])), max(1.0, float(totals[1])), int(totals[2])


def _tokens(batch: Batch, logprobs: Tensor, step_tokens: float, step_sequences: float) -> Tokens:
    prox = batch.prox_logprobs
    return Tokens(
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        sequence=batch.sequence,
        num_sequences=batch.num_sequences,
        step_tokens=step_tokens,
        step_sequences=step_sequences,
        prox_logprobs=logprobs.detach() if prox is None else prox,
        ref_logprobs=batch.ref_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
    )


def _checked(loss: TokenLoss, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """What the loss gives; it may be a user's own, which promises nothing."""
    name = _name(loss)
    given = cast("object", loss(tokens))
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
        raise ConfigError(f"loss '{name}' must return a scalar and a dict of metrics")
    value, own = cast("tuple[object, dict[str, object]]", given)
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
        raise ConfigError(f"loss '{name}' must return a scalar that depends on tokens.logprobs")
    for metric, each in own.items():
        if not isinstance(each, Tensor) or each.ndim:
            raise ConfigError(f"metric '{metric}' of loss '{name}' must be a scalar tensor")
    return value, cast("dict[str, Tensor]", own)


@torch.no_grad()
def _diagnostics(tokens: Tokens) -> dict[str, Tensor]:
    """k3 estimate of the distance to the sampler, and the sums behind the effective sample size."""
    apart = (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = apart.exp()
    return {
        "mismatch_kl": (tokens.mask * (ratio - apart - 1)).sum() / tokens.step_tokens,
        "ratio": (tokens.mask * ratio).sum(),
        "ratio_square": (tokens.mask * ratio.square()).sum(),
        "not_finite": (~tokens.logprobs.isfinite()).sum(),
    }


@torch.no_grad()
def _entropy(tokens: Tokens) -> Tensor:
    """The policy's entropy in nats, estimated from the sampled tokens: E_mu[-ratio pi].

    Exact in the mean when nothing is cut off in sampling; a loss that computes it says it itself.
    """
    apart = (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return -(tokens.mask * apart.exp() * tokens.logprobs).sum() / tokens.step_tokens


@torch.no_grad()
def _by_sender(tokens: Tokens, senders: Sequence[str]) -> dict[str, Tensor]:
    """k3 and tokens that count of each sender, to be added up by the two names of both."""
    apart = (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sums: dict[str, Tensor] = {}
    for name, each in (("kl", apart.exp() - apart - 1), ("tokens", torch.ones_like(apart))):
        of_rollouts = apart.new_zeros(tokens.num_sequences)
        of_rollouts.index_add_(0, tokens.sequence, tokens.mask * each)
        for sender, of_rollout in zip(senders, of_rollouts.cpu(), strict=False):
            key = f"{BY_SENDER}{name}/{sender}"
            sums[key] = sums.get(key, 0.0) + of_rollout
    return sums


def _pop_mismatch(metrics: dict[str, float]) -> dict[str, Mismatch]:
    """Take what `_by_sender` told out of the metrics; senders without a token are left out."""
    told = {name: metrics.pop(name) for name in list(metrics) if name.startswith(BY_SENDER)}
    tokens = {
        name.removeprefix(f"{BY_SENDER}tokens/"): count
        for name, count in told.items()
        if name.startswith(f"{BY_SENDER}tokens/") and count
    }
    return {
        sender: Mismatch(told[f"{BY_SENDER}kl/{sender}"], count) for sender, count in tokens.items()
    }


def _clip_and_step(optimizer: torch.optim.Optimizer, max_grad_norm: float, ranks: Ranks) -> float:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    ranks.add_up_gradients(parameters)
    grad_norm = float(ranks.whole(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)))
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def _problem(loss: TokenLoss, value: float, unlikely: float) -> str:
    if unlikely:
        return f"the policy gives {unlikely:.0f} tokens a logprob that is not finite"
    if not math.isfinite(value):
        return f"the loss is {value} although every logprob of the policy is finite"
    return f"the gradient of loss '{_name(loss)}' is not finite although its value is {value:.6g}"


def _name(loss: TokenLoss) -> str:
    return getattr(getattr(loss, "func", loss), "__name__", "loss")
