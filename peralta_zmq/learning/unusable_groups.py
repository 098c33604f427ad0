"""Excludes unusable groups from an update, so one broken generator does no harm.

The generator that sampled a group sends the logprobs of its tokens, and the trainer computes their
logprobs under the policy. An update excludes

- a group with a very large logprob mismatch: the policy's logprobs are far above those of the
  generator. This is checked before the loss is computed;
- a group whose loss, or the loss's gradient, is not finite. The learner checks this only if the
  policy's logprobs are finite: if they are not, the policy is the cause, not the group.

The decision depends only on the group, its micro-batch and the policy, so that a restarted trainer,
which repeats steps, excludes the same groups. A group can be split over several micro-batches and
be excluded in only one of them. Excluded tokens still count in the means of the update, because the
divisor of the means must be known before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from peralta_zmq.learning.losses import (
    TokenLoss,
    Tokens,
    evaluate,
    of_rollouts,
    ratio_of,
    sequence_sum,
)

# Bound on the mean of the importance ratio e^x over the tokens of a group, where x is the policy's
# logprob minus the generator's, at most 20 (losses.ratio_of). If the generator sampled the tokens
# with the logprobs that it sends, the expected ratio is at most 1, and by Markov's inequality fewer
# than 1 of 100 groups exceed the bound. A group of up to 4.8 million tokens exceeds it if a single
# token has x = 20.
MAX_MEAN_RATIO = 100.0
MISMATCH, NOT_FINITE = "logprob mismatch", "loss not finite"  # reasons for an exclusion


@torch.no_grad()
def mismatched_groups(tokens: Tokens, groups: Sequence[str]) -> dict[str, str]:
    """The groups with a very large mismatch, each with MISMATCH as the reason.

    `groups` has the name of each rollout's group.
    """
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
    """The groups, except the excluded ones, whose own loss or gradient is not finite.

    Each has NOT_FINITE as the reason. `groups` has the name of each rollout's group.
    """
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
