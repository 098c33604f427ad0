"""One update of the policy's parameters from the micro-batches of a mini-batch.

An update excludes

- a group with policy logprobs far above those that its generator sent;
- a group whose loss, or the loss's gradient, is not finite, while the policy's logprobs are: if
  they are not, the policy is the cause, not the group.

The decision depends only on the group, its micro-batch and the policy, so that a restarted trainer
excludes the same groups. Excluded tokens count in the means of the update, because its divisor must
not depend on results of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch

from peralta_zmq.learning import step_metrics
from peralta_zmq.learning.distributed import SINGLE, Ranks
from peralta_zmq.learning.losses import (
    LossResult,
    TokenLoss,
    Tokens,
    evaluate,
    of_rollouts,
    ratio_of,
    sequence_sum,
)
from peralta_zmq.learning.optimizer import clip_and_step
from peralta_zmq.learning.packing import MicroBatch
from peralta_zmq.learning.reference_models import ComputeLogprobs, ComputeLogprobsAndEntropy
from peralta_zmq.learning.step_metrics import Mismatch, UpdateSums

# Bound on the mean importance ratio (losses.ratio_of) over the tokens of a group. For the logprobs
# that sampled the tokens, the expected ratio is at most 1, and by Markov's inequality fewer than 1
# of 100 groups exceed the bound. A single token with the largest ratio, e^20, exceeds it.
MAX_MEAN_RATIO = 100.0
MISMATCH = "logprob mismatch"  # reason for an exclusion
NOT_FINITE = "loss not finite"
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
    excluded: dict[str, str] = field(default_factory=dict[str, str])  # group -> the reason


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

    All ranks skip the update if the gradient norm is not finite, or if no group is left because
    losses are not finite. `computed` are further micro-batches, whose gradients `add_gradient` has
    added; they are divided by the total that `divisor` names. `sft` adds other gradients and
    returns metrics (demonstrations.py).
    """
    totals = _totals([*(each.tokens for each in computed), *batches], ranks)
    sums = UpdateSums()
    if computed:
        _divide_gradients(optimizer, totals[0] if divisor == "tokens" else totals[1])
    for each in computed:
        tokens = replace(each.tokens, step_tokens=totals[0], step_sequences=totals[1])
        _, added = _evaluate(loss, tokens, each.groups)
        sums.add(added)
    for batch in batches:
        tokens = _forward(batch, totals, compute_logprobs, compute_with_entropy)
        sums.add(_backward(loss, tokens, batch.groups))
    if sft is not None:
        sums.metrics |= sft()
    sums = sums.over_ranks(ranks)
    has_no_loss = not sums.num_usable and NOT_FINITE in sums.excluded.values()
    has_gradient = sums.num_usable or (sft is not None and not has_no_loss)
    grad_norm = clip_and_step(optimizer, max_grad_norm, ranks) if has_gradient else 0.0
    optimizer.zero_grad()
    skip_reason = ""
    if has_no_loss or not math.isfinite(grad_norm):
        skip_reason = _skip_reason(loss, sums)
    ess = sums.ratio**2 / (totals[0] * sums.ratio_square) if sums.ratio_square else 1.0
    metrics = sums.metrics | {
        "grad_norm": grad_norm,
        "ess": ess,
        "skipped": float(bool(skip_reason)),
    }
    mismatch = {} if sums.num_not_finite else sums.mismatch
    return UpdateResult(metrics, skip_reason, mismatch, sums.excluded)


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
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(total)


def _totals(batches: Sequence[MicroBatch | Tokens], ranks: Ranks) -> tuple[float, float]:
    """Unmasked tokens, and rollouts with such a token, on all ranks; each at least 1."""
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
    """Compute the input of the loss."""
    row = (batch.token_ids, batch.trees, batch.scored)
    temperature = batch.temperatures
    if compute_with_entropy is None:
        logprobs = compute_logprobs(*row, temperature=temperature)
        entropy = None
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


def _backward(loss: TokenLoss, tokens: Tokens, groups: Sequence[str]) -> UpdateSums:
    """Compute a micro-batch's loss and gradients; returns its part of the update's sums."""
    result, sums = _evaluate(loss, tokens, groups)
    if result is None:  # ranks in lockstep must all run a backward pass
        (tokens.logprobs.sum() * 0.0).backward()
    else:
        result.backward()
    return sums


def _evaluate(
    loss: TokenLoss, tokens: Tokens, groups: Sequence[str]
) -> tuple[LossResult | None, UpdateSums]:
    """A micro-batch's loss, None without usable groups, and its part of the update's sums."""
    if not tokens.mask.any():  # a filler (packing.make_micro_batches)
        return None, UpdateSums()
    sums = step_metrics.mismatch_sums(tokens, groups)
    excluded = mismatched_groups(tokens, groups)
    usable = without_groups(excluded, tokens, groups)
    result = evaluate(loss, usable) if usable else None
    if result and not result.is_finite and tokens.logprobs.isfinite().all():
        excluded |= groups_without_finite_loss(loss, tokens, groups, excluded)
        usable = without_groups(excluded, tokens, groups)
        result = evaluate(loss, usable) if usable else None
    sums.excluded = excluded
    if result is not None:
        sums.num_usable = 1.0
        # A metric "entropy" of the loss replaces the estimate.
        metrics = {"entropy": step_metrics.estimate_entropy(result.tokens), **result.metrics}
        sums.metrics |= {name: float(value) for name, value in metrics.items()}
        sums.metrics["loss"] = float(result.value)
    return result, sums


def _skip_reason(loss: TokenLoss, sums: UpdateSums) -> str:
    if sums.num_not_finite:
        return f"{sums.num_not_finite:.0f} logprobs of the policy are not finite"
    if not math.isfinite(sums.metrics.get("sft_loss", 0.0)):
        return "the loss of the demonstrations in loss.sft_file is not finite"
    name = getattr(getattr(loss, "func", loss), "__name__", "loss")
    return f"loss '{name}' or its gradient is not finite"


# Unusable groups


@torch.no_grad()
def mismatched_groups(tokens: Tokens, groups: Sequence[str]) -> dict[str, str]:
    """The groups with a very large mismatch; `groups` has the name of each rollout's group."""
    ratio = ratio_of(tokens.logprobs - tokens.old_logprobs)
    # A mean is above the bound if the sum of (ratio - bound) is positive.
    excess = sequence_sum(tokens, ratio - MAX_MEAN_RATIO).tolist()  # by rollout
    totals = dict.fromkeys(groups, 0.0)
    for name, summand in zip(groups, excess, strict=True):
        totals[name] += summand
    return {name: MISMATCH for name, total in totals.items() if total > 0.0}


def groups_without_finite_loss(
    loss: TokenLoss, tokens: Tokens, groups: Sequence[str], excluded: Collection[str]
) -> dict[str, str]:
    """The groups, except the excluded ones, whose own loss or gradient is not finite."""
    names = dict.fromkeys(groups)
    by_group = {name: without_groups(names.keys() - {name}, tokens, groups) for name in names}
    return {
        name: NOT_FINITE
        for name, own_tokens in by_group.items()
        if name not in excluded and own_tokens and not evaluate(loss, own_tokens).is_finite
    }


def without_groups(
    excluded: Collection[str], tokens: Tokens, groups: Sequence[str]
) -> Tokens | None:
    """The tokens of all groups but the excluded ones; None if no group is left."""
    if not excluded:
        return tokens
    keep = torch.tensor([name not in excluded for name in groups], device=tokens.logprobs.device)
    return of_rollouts(tokens, keep) if keep.any() else None
