"""Groups that an update leaves out, so that one broken generator does not stop the training of all.

A group is all rollouts of one problem; generators report the logprobs of its tokens. Left out is

- a group with a very large logprob mismatch, whatever the loss. It is checked before the loss;
- a group whose loss, or the gradient of its loss, is not finite although the policy's logprobs are.

The decision depends on the group, its micro-batch and the policy only: a replay from the journal
leaves out the same groups. Of a group that is split over several micro-batches, the part in another
micro-batch may stay. The tokens left out still count in the means of the update, whose divisor must
be known before its first backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peralta_zmq.learning.losses import Metrics, TokenLoss, Tokens, of_rollouts
from peralta_zmq.learning.step_metrics import Mismatch, mismatch_by

# Mean k3 per token; older weights or another dtype cause less than 1. A token that the policy finds
# less probable than its sampler adds at most 9. For the others, the mean of the ratio is at most 1
# in expectation for any two policies, so that 100 is reached in less than 2 % of cases by chance.
MAX_GROUP_KL = 100.0
MISMATCH, NOT_FINITE = "logprob mismatch", "loss not finite"  # the reasons
EXCLUDED = "excluded/"  # sums that do not become metrics: EXCLUDED, reason, "/", name of the group


@dataclass(frozen=True, slots=True)
class LossResult:
    """A loss of some tokens, with its gradients with respect to their logprobs and entropy."""

    tokens: Tokens
    value: Tensor
    metrics: Metrics  # detached, like the value
    inputs: list[Tensor]  # logprobs, and entropy if there is one
    gradients: tuple[Tensor, ...]

    @property
    def is_finite(self) -> bool:
        """True if the value and all gradients are finite."""
        return bool(torch.stack([t.isfinite().all() for t in (self.value, *self.gradients)]).all())

    def backward(self) -> None:
        """Accumulate the gradients of the parameters."""
        torch.autograd.backward(self.inputs, self.gradients)


def compute_loss(
    loss: TokenLoss, tokens: Tokens, groups: Sequence[str], mismatch: Sequence[Mismatch]
) -> tuple[LossResult | None, dict[str, str]]:
    """The loss of the usable groups of a micro-batch, and the reason of each group left out.

    `groups` and `mismatch` have one entry per rollout. The result is None if no group is usable. It
    may be not finite if the policy's logprobs are not.
    """
    totals = mismatch_by(groups, mismatch)
    excluded = {name: MISMATCH for name, total in totals.items() if total.mean > MAX_GROUP_KL}
    result = _without(excluded, loss, tokens, groups)
    if result is None or result.is_finite or not tokens.logprobs.isfinite().all():
        return result, excluded
    for name in [name for name in totals if name not in excluded]:
        alone = _without(totals.keys() - {name}, loss, tokens, groups)
        if alone is not None and not alone.is_finite:
            excluded[name] = NOT_FINITE
    return _without(excluded, loss, tokens, groups), excluded


def summands(excluded: Mapping[str, str]) -> dict[str, float]:
    """The groups left out as sums, to unite those of all micro-batches and ranks."""
    return {f"{EXCLUDED}{reason}/{name}": 1.0 for name, reason in excluded.items()}


def pop_excluded(sums: dict[str, float]) -> dict[str, str]:
    """Remove the sums of groups left out; returns the reason by name of the group."""
    excluded: dict[str, str] = {}
    for key in [key for key in sums if key.startswith(EXCLUDED)]:
        reason, _, name = key.removeprefix(EXCLUDED).partition("/")
        excluded[name] = reason
        del sums[key]
    return excluded


def _without(
    excluded: Collection[str], loss: TokenLoss, tokens: Tokens, groups: Sequence[str]
) -> LossResult | None:
    """The loss without the tokens of these groups; None if no token is left."""
    if excluded:
        keep = [name not in excluded for name in groups]
        if not any(keep):
            return None
        tokens = of_rollouts(tokens, torch.tensor(keep, device=tokens.logprobs.device))
    value, metrics = loss(tokens)
    inputs = [tensor for tensor in (tokens.logprobs, tokens.entropy) if tensor is not None]
    gradients = torch.autograd.grad(value, inputs, materialize_grads=True)
    detached = {name: metric.detach() for name, metric in metrics.items()}
    return LossResult(tokens, value.detach(), detached, inputs, gradients)
