"""Groups that an update leaves out: very large logprob mismatch, loss that is not finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sample_data import packed, siblings, tiny_model
from torch import Tensor

from peralta_zmq.learning import losses
from peralta_zmq.learning.exclusion import MISMATCH, NOT_FINITE
from peralta_zmq.learning.learner import StepResult, update_parameters
from peralta_zmq.learning.losses import TokenLoss, Tokens
from peralta_zmq.learning.packing import Packing, make_batches
from peralta_zmq.models.scoring import Scorer
from peralta_zmq.rollout import RolloutGroup

LENGTHS = ([4, 1, 7, 2], [3, 9, 5, 1], [2, 2, 3, 6])  # generated tokens of the rollouts
ABSURD, MARK = (
    -9000.0,
    -2.5,
)  # logprobs: beyond any policy; a plausible one that a test loss detects
BAD = 1  # the group with such a logprob


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield tiny_model().double()


def groups_of(logprob: float | None = None) -> list[RolloutGroup]:
    """Three groups; one rollout of the group BAD has this logprob at every token."""
    groups = [
        siblings([1, 0, 0, 1], lengths=lengths, seed=seed, sequence=seed)
        for seed, lengths in enumerate(LENGTHS)
    ]
    if logprob is not None:
        first, *others = groups[BAD].rollouts
        poisoned = replace(first, logprobs=(first.loss_mask * logprob).astype("float32"))
        groups[BAD] = replace(groups[BAD], rollouts=(poisoned, *others))
    return groups


class GradientRecorder(torch.optim.SGD):
    """An optimizer that records the gradients and changes nothing."""

    gradients: list[Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        self.gradients = [each.grad.clone() for each in self.param_groups[0]["params"]]


def update(
    model: Any, groups: list[RolloutGroup], loss: TokenLoss, *, max_tokens: int = 1000
) -> tuple[Tensor | None, StepResult]:
    """The gradient of an update, flat, and its result; None without an optimizer step."""
    samples, _ = packed(groups, max_tokens=max_tokens)
    batches = make_batches(samples, Packing(max_tokens=max_tokens))
    optimizer, scorer = GradientRecorder(model.parameters(), lr=1.0), Scorer(model)
    result = update_parameters(
        optimizer, batches, loss=loss, compute_logprobs=scorer, max_grad_norm=math.inf
    )
    if optimizer.gradients is None:
        return None, result
    return torch.cat([each.flatten() for each in optimizer.gradients]), result


def infinite(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE, infinite for marked tokens."""
    value, metrics = losses.reinforce(tokens)
    return value + math.inf if (tokens.old_logprobs == MARK).any() else value, metrics


def steep(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a finite value and an infinite gradient for marked tokens."""
    value, metrics = losses.reinforce(tokens)
    if (tokens.old_logprobs == MARK).any():
        value = value + (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt().sum()
    return value, metrics


def assert_without_bad_group(
    model: Any, gradient: Tensor | None, result: StepResult, loss: TokenLoss, *, reason: str
) -> None:
    """The gradient is that of the other groups, divided by the tokens of all."""
    assert result.excluded == {groups_of()[BAD].name: reason} and not result.skip_reason
    others = [group for number, group in enumerate(groups_of()) if number != BAD]
    expected, _ = update(model, others, loss)
    assert gradient is not None and expected is not None
    num_all = sum(map(sum, LENGTHS))
    expected *= (num_all - sum(LENGTHS[BAD])) / num_all
    assert (gradient - expected).norm() <= 1e-6 * expected.norm()  # logprobs are float32


@pytest.mark.parametrize("max_tokens", [1000, 25])
@pytest.mark.parametrize(
    "loss", [losses.reinforce, losses.grpo, losses.decoupled_ppo, losses.importance, losses.dppo]
)
def test_absurd_logprobs_are_left_out_of_every_loss(
    model: Any, loss: TokenLoss, max_tokens: int
) -> None:
    gradient, result = update(model, groups_of(ABSURD), loss, max_tokens=max_tokens)
    assert_without_bad_group(model, gradient, result, loss, reason=MISMATCH)
    assert result.mismatch[groups_of()[BAD].sender].mean > 100  # the sender can still be flagged


@pytest.mark.parametrize("loss", [losses.gspo, functools.partial(losses.grpo_kl, beta=0.0)])
def test_absurd_logprobs_are_left_out_of_sequence_losses(model: Any, loss: TokenLoss) -> None:
    gradient, result = update(model, groups_of(ABSURD), loss)
    assert result.excluded == {groups_of()[BAD].name: MISMATCH}
    expected, _ = update(model, groups_of()[:BAD] + groups_of()[BAD + 1 :], loss)
    assert gradient is not None and expected is not None
    expected *= 8 / 12  # rollouts
    assert (gradient - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("max_tokens", [1000, 25])
@pytest.mark.parametrize("loss", [infinite, steep])
def test_group_without_finite_loss_is_left_out_and_named(
    model: Any, loss: TokenLoss, max_tokens: int
) -> None:
    gradient, result = update(model, groups_of(MARK), loss, max_tokens=max_tokens)
    assert_without_bad_group(model, gradient, result, loss, reason=NOT_FINITE)


def test_loss_that_is_never_finite_skips_the_step(model: Any) -> None:
    def never(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return tokens.logprobs.sum() * math.inf, {}

    gradient, result = update(model, groups_of(), never)
    assert gradient is None and result.metrics["skipped"] == 1
    assert result.skip_reason == "loss 'never' or its gradient is not finite for any group"


def test_update_without_usable_group_changes_nothing_and_is_not_skipped(model: Any) -> None:
    gradient, result = update(model, groups_of(ABSURD)[BAD : BAD + 1], losses.dppo)
    assert gradient is None and (result.skip_reason, result.metrics["loss"]) == ("", 0.0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_policy_without_finite_logprobs_excludes_no_group() -> None:
    broken = tiny_model().double()
    with torch.no_grad():
        broken.model.norm.weight[0] = math.nan
    gradient, result = update(broken, groups_of(), losses.reinforce)
    assert gradient is None and not result.excluded and not result.mismatch
    assert "logprobs of the policy are not finite" in result.skip_reason


@pytest.mark.parametrize("select", [lambda keep: keep, lambda keep: ~keep])
def test_selected_rollouts_keep_their_tokens(select: Callable[[Tensor], Tensor]) -> None:
    numbers = torch.arange(6.0)
    tokens = Tokens(
        logprobs=numbers, old_logprobs=-numbers, advantages=numbers, mask=torch.ones(6),
        sequence=torch.tensor([0, 0, 1, 2, 2, 2]), num_sequences=3,
        step_tokens=6, step_sequences=3, entropy=numbers,
    )  # fmt: skip
    keep = select(torch.tensor([True, False, True]))
    kept = losses.of_rollouts(tokens, keep)
    expected = [0, 1, 3, 4, 5] if keep[0] else [2]
    assert kept.logprobs.tolist() == expected and kept.entropy is not None
    assert (-kept.old_logprobs).tolist() == kept.entropy.tolist() == expected
    assert kept.sequence.tolist() == ([0, 0, 1, 1, 1] if keep[0] else [0])
    assert (kept.num_sequences, kept.step_tokens) == (int(keep.sum()), 6)
