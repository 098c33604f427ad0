"""Excludes unusable groups from an update, so one broken generator does no harm.

A group is all rollouts of one problem; its generator reports the logprobs of the tokens. An update
excludes

- a group with a very large logprob mismatch: the trainer's logprobs differ from the reported ones.
  This is checked before the loss is computed;
- a group whose loss, or the loss's gradient, is not finite although the policy's logprobs are.

The decision depends only on the group, its micro-batch and the policy, so a replay from the journal
excludes the same groups. A group can be split over several micro-batches and be excluded in only
one of them. Excluded tokens still count in the means of the update: the divisor of the means must
be known before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from peralta_zmq.learning.losses import LossResult, Tokens, of_rollouts
from peralta_zmq.learning.step_metrics import Mismatch, mismatch_by

# Mean of k3 = e^x - x - 1 per token, where x is the policy's logprob minus the generator's, clamped
# to +-10. Older weights or another dtype cause less than 1. A token with x < 0 adds at most 9, and
# a token with x > 0 less than e^x. For any two policies the expected mean of e^x is at most 1, so
# the mean exceeds 91 (= 100 - 9) with a probability of at most 1 / 91 (Markov's inequality).
MAX_GROUP_KL = 100.0
MISMATCH, NOT_FINITE = "logprob mismatch", "loss not finite"  # reasons for an exclusion
EXCLUDED = "excluded/"  # a sum is named excluded/REASON/GROUP; `pop_excluded` removes it


def exclude_unusable(
    evaluate: Callable[[Tokens], LossResult],
    tokens: Tokens,
    groups: Sequence[str],
    mismatch: Sequence[Mismatch],
) -> tuple[LossResult | None, dict[str, str]]:
    """The loss of a micro-batch's usable groups, and the excluded groups' reasons.

    The reasons are by group name. `evaluate` computes the loss of tokens, `groups` has the name of
    each rollout's group, `mismatch` the mismatch of each rollout. The loss is None if no group is
    usable. It can be not finite only if a logprob of the policy is not finite.
    """
    totals = mismatch_by(groups, mismatch)
    excluded = {name: MISMATCH for name, total in totals.items() if total.mean > MAX_GROUP_KL}
    result = _without(excluded, evaluate, tokens, groups)
    if result is None or result.is_finite or not tokens.logprobs.isfinite().all():
        return result, excluded
    for name in [name for name in totals if name not in excluded]:
        group_loss = _without(totals.keys() - {name}, evaluate, tokens, groups)
        if group_loss is not None and not group_loss.is_finite:
            excluded[name] = NOT_FINITE
    return _without(excluded, evaluate, tokens, groups), excluded


def summands(excluded: Mapping[str, str]) -> dict[str, float]:
    """One sum per excluded group.

    Adding the sums of all micro-batches and ranks unites the groups.
    """
    return {f"{EXCLUDED}{reason}/{name}": 1.0 for name, reason in excluded.items()}


def pop_excluded(sums: dict[str, float]) -> dict[str, str]:
    """Remove the results of `summands` from `sums`; returns the reason by group name."""
    excluded: dict[str, str] = {}
    for key in [key for key in sums if key.startswith(EXCLUDED)]:
        reason, _, name = key.removeprefix(EXCLUDED).partition("/")
        excluded[name] = reason
        del sums[key]
    return excluded


def _without(
    excluded: Collection[str],
    evaluate: Callable[[Tokens], LossResult],
    tokens: Tokens,
    groups: Sequence[str],
) -> LossResult | None:
    """The loss without the tokens of the excluded groups; None if no token is left."""
    if excluded:
        keep = [name not in excluded for name in groups]
        if not any(keep):
            return None
        tokens = of_rollouts(tokens, torch.tensor(keep, device=tokens.logprobs.device))
    return evaluate(tokens)
