"""One update of the policy's parameters from the micro-batches of a mini-batch.

For each micro-batch, `update_parameters` computes the policy's logprobs (models/scoring.py), the
loss (losses.py) and the gradients; then the optimizer changes the parameters. `add_gradient`
computes a micro-batch earlier, before the totals that the loss divides by are known.

A group is all rollouts of one problem. The sender of a group is one process of a generator. A rank
is one process of a data-parallel trainer. An update excludes unusable groups (exclusion.py). If the
gradient of the other groups is not finite, the update is skipped: it changes no parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from peralta_zmq.learning import exclusion, step_metrics
from peralta_zmq.learning import optimizer as adamw
from peralta_zmq.learning.distributed import SINGLE, Ranks
from peralta_zmq.learning.losses import LossResult, TokenLoss, Tokens, evaluate
from peralta_zmq.learning.packing import MicroBatch
from peralta_zmq.learning.reference_models import ComputeLogprobs, ComputeLogprobsAndEntropy
from peralta_zmq.learning.step_metrics import Mismatch

# The total over the update by which the loss divides: of its unmasked tokens, or of its rollouts.
Divisor: TypeAlias = Literal["tokens", "rollouts"]


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """A micro-batch whose gradient `add_gradient` has added."""

    tokens: Tokens  # logprobs and entropy are leaves; step_tokens and step_sequences are 1
    groups: Sequence[str]  # per rollout, name of its group


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of an update."""

    metrics: dict[str, float]
    skip_reason: str = ""  # empty if the update was not skipped
    mismatch: dict[str, Mismatch] = field(default_factory=dict[str, Mismatch])  # by sender
    excluded: dict[str, str] = field(default_factory=dict[str, str])
    """Name of each excluded group -> the reason."""


def update_parameters(
    optimizer: torch.optim.Optimizer,
    batches: Sequence[MicroBatch],
    *,
    loss: TokenLoss,
    compute_logprobs: ComputeLogprobs,
    compute_with_entropy: ComputeLogprobsAndEntropy | None = None,
    computed: Sequence[ComputedBatch] = (),
    divisor: Divisor = "tokens",
    sft: Callable[[], dict[str, float]] | None = None,
    max_grad_norm: float,
    ranks: Ranks = SINGLE,
) -> UpdateResult:
    """Make one update: sum the gradients of all micro-batches, clip, step.

    The loss divides by the totals of all micro-batches on all ranks, so their split does not change
    the gradient. Unusable groups are excluded (exclusion.py). All ranks skip the update if the
    gradient norm is not finite, or if no group is left because losses are not finite.
    Metrics: loss, grad_norm, entropy, mismatch_kl, ess, skipped, and the metrics of the loss.
    `compute_with_entropy`, if set, replaces `compute_logprobs` and fills `Tokens.entropy`. `sft`
    adds other gradients and returns metrics (demonstrations.py). `computed` are further
    micro-batches of the update, whose gradients `add_gradient` has added; only their gradients are
    divided by the total that `divisor` names here.
    """
    totals = _totals([*(each.tokens for each in computed), *batches], ranks)
    internal = ("_ratio", "_ratio_square", "_not_finite", "_usable")  # sums that are not metrics
    sums: dict[str, float] = {name: 0.0 for name in ("loss", "mismatch_kl", *internal)}
    if computed:
        _divide_gradients(optimizer, totals[0] if divisor == "tokens" else totals[1])
    for each in computed:
        tokens = replace(each.tokens, step_tokens=totals[0], step_sequences=totals[1])
        _add(_evaluate(loss, tokens, each.groups)[1], sums)
    for batch in batches:
        tokens = _forward(batch, totals, compute_logprobs, compute_with_entropy)
        _add(_backward(loss, tokens, batch.groups), sums)
    metrics = ranks.sum_metrics(sums | (sft() if sft else {}))
    mismatch, excluded = step_metrics.pop_mismatch(metrics), exclusion.pop_excluded(metrics)
    ratio, square, num_not_finite, num_usable = (metrics.pop(name) for name in internal)
    has_no_loss = not num_usable and exclusion.NOT_FINITE in excluded.values()
    has_gradient = num_usable or (sft is not None and not has_no_loss)
    grad_norm = adamw.clip_and_step(optimizer, max_grad_norm, ranks) if has_gradient else 0.0
    optimizer.zero_grad()
    skip_reason = ""
    if has_no_loss or not math.isfinite(grad_norm):
        skip_reason = _skip_reason(loss, num_not_finite, metrics.get("sft_loss", 0.0))
    ess = ratio**2 / (totals[0] * square) if square else 1.0
    metrics |= {"grad_norm": grad_norm, "ess": ess, "skipped": float(bool(skip_reason))}
    return UpdateResult(metrics, skip_reason, {} if num_not_finite else mismatch, excluded)


def add_gradient(
    batch: MicroBatch,
    *,
    loss: TokenLoss,
    compute_logprobs: ComputeLogprobs,
    compute_with_entropy: ComputeLogprobsAndEntropy | None = None,
) -> ComputedBatch:
    """Add the gradient of a micro-batch of the next update, not yet divided by any total."""
    tokens = _forward(batch, (1.0, 1.0), compute_logprobs, compute_with_entropy)
    _backward(loss, tokens, batch.groups)
    entropy = None if tokens.entropy is None else tokens.entropy.detach().requires_grad_()
    tokens = replace(tokens, logprobs=tokens.logprobs.detach().requires_grad_(), entropy=entropy)
    return ComputedBatch(tokens, batch.groups)


def _divide_gradients(optimizer: torch.optim.Optimizer, total: float) -> None:
    """Divide the gradients of all parameters by a total."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(total)


def _add(summands: Mapping[str, Tensor | float], sums: dict[str, float]) -> None:
    """Add the summands of a micro-batch to the sums of its update."""
    for name, summand in summands.items():
        sums[name] = sums.get(name, 0.0) + float(summand)


def _totals(batches: Sequence[MicroBatch | Tokens], ranks: Ranks) -> tuple[float, float]:
    """Number of unmasked tokens, and of rollouts with such a token, on all ranks.

    Each number is at least 1, because losses divide by it.
    """
    tokens = sum(float(batch.mask.sum()) for batch in batches)
    rollouts = sum(len(batch.sequence[batch.mask > 0].unique()) for batch in batches)
    totals = torch.tensor([tokens, rollouts], dtype=torch.float64)
    ranks.all_reduce(totals)
    return max(1.0, float(totals[0])), max(1.0, float(totals[1]))


def _forward(
    batch: MicroBatch,
    totals: tuple[float, float],
    compute_logprobs: ComputeLogprobs,
    compute_with_entropy: ComputeLogprobsAndEntropy | None,
) -> Tokens:
    """Compute the input of the loss; `totals` is the result of `_totals`."""
    row, temperature = (batch.token_ids, batch.trees, batch.scored), batch.temperatures
    if compute_with_entropy is None:
        logprobs, entropy = compute_logprobs(*row, temperature=temperature), None
    else:
        logprobs, entropy = compute_with_entropy(*row, temperature=temperature)
    return Tokens(
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        sequence=batch.sequence,
        num_sequences=batch.num_sequences,
        step_tokens=totals[0],
        step_sequences=totals[1],
        prox_logprobs=logprobs.detach() if batch.prox_logprobs is None else batch.prox_logprobs,
        ref_logprobs=batch.ref_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
        entropy=entropy,
        selected=batch.selected,
    )


def _backward(loss: TokenLoss, tokens: Tokens, groups: Sequence[str]) -> dict[str, Tensor | float]:
    """Compute a micro-batch's loss and gradients; returns its terms of the update's sums."""
    result, summands = _evaluate(loss, tokens, groups)
    if result is None:  # ranks in lockstep must all run a backward pass
        (tokens.logprobs.sum() * 0.0).backward()
    else:
        result.backward()
    return summands


def _evaluate(
    loss: TokenLoss, tokens: Tokens, groups: Sequence[str]
) -> tuple[LossResult | None, dict[str, Tensor | float]]:
    """A micro-batch's loss, None without usable groups, and its terms of the update's sums."""
    result, summands = None, dict[str, Tensor | float]()
    if tokens.mask.any():  # not a filler (packing.make_micro_batches)
        excluded = exclusion.mismatched_groups(tokens, groups)
        usable = exclusion.without_groups(excluded, tokens, groups)
        result = evaluate(loss, usable) if usable else None
        if result and not result.is_finite and tokens.logprobs.isfinite().all():
            excluded |= exclusion.groups_without_finite_loss(loss, tokens, groups, excluded)
            usable = exclusion.without_groups(excluded, tokens, groups)
            result = evaluate(loss, usable) if usable else None
        summands |= step_metrics.mismatch_summands(tokens, groups)
        summands |= exclusion.exclusion_keys(excluded)
    if result is None:
        return None, summands
    entropy = step_metrics.estimate_entropy(result.tokens)  # a metric of the loss replaces it
    summands |= {"loss": result.value, "_usable": 1.0}
    return result, {"entropy": entropy, **result.metrics, **summands}


def _skip_reason(loss: TokenLoss, num_not_finite: float, sft_loss: float) -> str:
    if num_not_finite:
        return f"{num_not_finite:.0f} logprobs of the policy are not finite"
    if not math.isfinite(sft_loss):
        return "the loss of the demonstrations in loss.sft_file is not finite"
    name = getattr(getattr(loss, "func", loss), "__name__", "loss")
    return f"loss '{name}' or its gradient is not finite"
