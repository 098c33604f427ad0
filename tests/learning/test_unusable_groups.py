"""Groups that an update leaves out: very large logprob mismatch, loss that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from failing_losses import POISON, steep
from sample_data import packed, siblings, step_gradient, tiny_model
from torch import Tensor

from peralta_zmq.learning import losses
from peralta_zmq.learning.losses import TokenLoss, Tokens
from peralta_zmq.learning.packing import Packing, make_micro_batches
from peralta_zmq.learning.update import MISMATCH, NOT_FINITE, UpdateResult, mismatched_groups
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.wire.messages import MAX_TOKENS

LENGTHS = ([4, 1, 7, 2], [3, 9, 5, 1], [2, 2, 3, 6])  # generated tokens of the rollouts
ABSURD = -9000.0  # logprob beyond any policy
BAD = 1  # the group with such a logprob
KEPT = 1 - sum(LENGTHS[BAD]) / sum(map(sum, LENGTHS))  # share of the tokens in the other groups


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield tiny_model().double()


def groups_of(logprob: float | None = None) -> list[RolloutGroup]:
    """Three groups; one rollout of the group BAD has this logprob at every token."""
    groups = [
        siblings([1, 0, 0, 1], lengths=lengths, seed=seed, group_number=seed)
        for seed, lengths in enumerate(LENGTHS)
    ]
    if logprob is not None:
        first, *others = groups[BAD].rollouts
        poisoned = replace(first, logprobs=(first.loss_mask * logprob).astype("float32"))
        groups[BAD] = replace(groups[BAD], rollouts=(poisoned, *others))
    return groups


def update(
    model: Any, groups: list[RolloutGroup], loss: TokenLoss, *, max_tokens: int = 1000
) -> tuple[Tensor | None, UpdateResult]:
    """The gradient of an update, flat, and its result; None without an optimizer step."""
    samples, _ = packed(groups, max_tokens=max_tokens)
    batches = make_micro_batches(samples, Packing(max_tokens=max_tokens))
    return step_gradient(model, batches, loss)


def infinite(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE, infinite for poisoned tokens."""
    value, metrics = losses.preset("reinforce")(tokens)
    return value + math.inf if (tokens.old_logprobs == POISON).any() else value, metrics


def update_without_bad_group(
    model: Any, logprob: float, loss: TokenLoss, *, max_tokens: int, reason: str, kept: float
) -> UpdateResult:
    """Compare the gradient with that of the other groups, of which `kept` is their share."""
    gradient, result = update(model, groups_of(logprob), loss, max_tokens=max_tokens)
    assert result.excluded == {groups_of()[BAD].name: reason} and not result.skip_reason
    others = [group for number, group in enumerate(groups_of()) if number != BAD]
    expected, _ = update(model, others, loss)
    assert gradient is not None and expected is not None
    expected *= kept
    assert (gradient - expected).norm() <= 1e-6 * expected.norm()  # logprobs are float32
    return result


@pytest.mark.parametrize("max_tokens", [1000, 25])
@pytest.mark.parametrize(
    ("loss", "kept"),
    [
        (losses.preset("reinforce"), KEPT), (losses.preset("dapo"), KEPT),
        (losses.preset("decoupled_ppo"), KEPT),
        (losses.preset("importance"), KEPT), (losses.preset("dppo"), KEPT),
        (losses.preset("gspo"), 8 / 12), (losses.preset("grpo_kl", beta=0.0), 8 / 12),  # rollouts
    ],
)  # fmt: skip
def test_absurd_logprobs_are_left_out_of_every_loss(
    model: Any, loss: TokenLoss, kept: float, max_tokens: int
) -> None:
    result = update_without_bad_group(
        model, ABSURD, loss, max_tokens=max_tokens, reason=MISMATCH, kept=kept
    )
    assert result.mismatch[groups_of()[BAD].sender].mean > 100  # the sender can still be flagged


@pytest.mark.parametrize("max_tokens", [1000, 25])
@pytest.mark.parametrize("loss", [infinite, steep])
def test_group_without_finite_loss_is_left_out_and_named(
    model: Any, loss: TokenLoss, max_tokens: int
) -> None:
    update_without_bad_group(
        model, POISON, loss, max_tokens=max_tokens, reason=NOT_FINITE, kept=KEPT
    )


@pytest.mark.parametrize(("poison", "is_excluded"), [(ABSURD, True), (-24.9, True), (-5.0, False)])
def test_one_absurd_logprob_excludes_a_group_of_any_size(poison: float, is_excluded: bool) -> None:
    """Of 2^20 tokens with -5, which the policy gives them too, one is reported with `poison`."""
    policy = torch.full((MAX_TOKENS,), -5.0)
    tokens = Tokens(
        logprobs=policy, old_logprobs=policy.clone(), advantages=policy, mask=policy.isfinite(),
        sequence=torch.arange(MAX_TOKENS) // (MAX_TOKENS // 2), num_sequences=2,
        step_tokens=MAX_TOKENS, step_sequences=2,
    )  # fmt: skip
    tokens.old_logprobs[7] = poison
    expected = {"a/0/1": MISMATCH} if is_excluded else {}
    assert mismatched_groups(tokens, ["a/0/1"] * 2) == expected


def test_update_without_usable_group_changes_nothing_and_is_not_skipped(model: Any) -> None:
    gradient, result = update(model, groups_of(ABSURD)[BAD : BAD + 1], losses.preset("dppo"))
    assert gradient is None and (result.skip_reason, result.metrics["loss"]) == ("", 0.0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_policy_without_finite_logprobs_excludes_no_group() -> None:
    broken = tiny_model().double()
    with torch.no_grad():
        broken.model.norm.weight[0] = math.nan
    gradient, result = update(broken, groups_of(), losses.preset("reinforce"))
    assert gradient is None and not result.excluded and not result.mismatch
    assert "logprobs of the policy are not finite" in result.skip_reason
