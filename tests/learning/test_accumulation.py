"""Micro-batches computed before all groups of a step are there: gradients, skips, random state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learners import demonstrations_of, identical, weights
from sample_data import siblings, tiny_learner, tiny_model
from torch import Tensor

from peralta_zmq.config.objective_sections import LossSection
from peralta_zmq.learning.advantages import Filter, overlong
from peralta_zmq.learning.learner import Learner, StepResult
from peralta_zmq.learning.losses import TokenLoss, Tokens, make_loss, preset, with_entropy_bonus
from peralta_zmq.learning.packing import Packing, full_micro_batch
from peralta_zmq.learning.reference_models import PolicyCopy
from peralta_zmq.learning.update import MISMATCH
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.rollout import Rollout, RolloutGroup

# Of one step. The third has no signal, and the fifth is too long for one sample.
GROUPS = [
    siblings([1, 0, 0, 1], lengths=[4, 1, 7, 2], seed=1, group_number=0),
    siblings([0, 0.5, 1], lengths=[3, 9, 5], seed=2, num_prompt=6, group_number=1),
    siblings([1, 1], lengths=[8, 8], seed=3, group_number=2),
    siblings([1, 0], lengths=[2, 2], seed=4, num_prompt=2, group_number=3),
    siblings([1, 0, 1, 0], lengths=[9, 8, 7, 6], seed=5, group_number=4),
    siblings([0, 1], lengths=[12, 5], seed=6, group_number=5),
]
MAX_TOKENS = 28


def learner_of(model: Any, **options: Any) -> Learner:
    defaults = {"max_tokens": MAX_TOKENS, "divisor": "tokens", "max_grad_norm": math.inf}
    return tiny_learner(model, **{**defaults, **options})


class Counting:
    """A loss that counts its calls."""

    def __init__(self, loss: TokenLoss) -> None:
        self._loss, self.num_calls = loss, 0

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        self.num_calls += 1
        return self._loss(tokens)


def add(learner: Learner, groups: Sequence[RolloutGroup]) -> None:
    """Add groups, and compute the micro-batches that they fill."""
    learner.add(groups)
    while learner.compute():
        pass


def add_one_by_one(learner: Learner, groups: Sequence[RolloutGroup]) -> None:
    for group in groups:
        add(learner, [group])


def has_gradient(model: Any) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


def gradient_of(learner: Learner) -> Tensor:
    """The gradient of the first step: proportional to AdamW's first moment."""
    moments = {name: each for name, each in learner.state().items() if "/exp_avg/" in name}
    return torch.cat([each.flatten() for each in moments.values()])


def metrics_of(result: StepResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if not name.startswith("time/")}


LOSSES: dict[str, tuple[str, TokenLoss]] = {
    "token": ("tokens", preset("dapo")),
    "rollout": ("rollouts", preset("grpo")),
    "constant": ("rollouts", make_loss(LossSection(name="dr_grpo"), max_completion_length=12)),
    "sum": ("rollouts", preset("luspo")),
    "masks": ("tokens", preset("importance")),
    "rollout_level": ("rollouts", preset("gspo")),
    "vespo": ("tokens", preset("vespo")),
    "proximal": ("tokens", preset("decoupled_ppo")),
    "reference": ("rollouts", preset("grpo_kl", beta=0.5)),
    "entropy": ("tokens", with_entropy_bonus(preset("dapo"), 0.1)),
    "demonstrations": ("tokens", preset("dapo")),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_and_metrics_equal_those_of_the_whole_step(name: str) -> None:
    divisor, loss = LOSSES[name]
    results, gradients = list[StepResult](), list[Tensor]()
    for is_early in (False, True):
        model, counting = tiny_model().double(), Counting(loss)
        scorer = Scorer(model)
        options: dict[str, Any] = {"compute_logprobs": scorer}
        if name == "entropy":
            options["compute_with_entropy"] = scorer.with_entropy
        if name == "reference":
            options["reference"] = PolicyCopy(dict(model.named_parameters()), scorer)
        if name == "demonstrations":
            options["demonstrations"] = demonstrations_of(model, compute_logprobs=scorer)
        options["divisor"] = divisor if is_early else None
        learner = learner_of(model, loss=counting, **options)
        add(learner, GROUPS)
        assert counting.num_calls >= 3 if is_early else counting.num_calls == 0
        results.append(learner.finish_step())
        gradients.append(gradient_of(learner))
    whole, early = results
    assert (gradients[1] - gradients[0]).norm() <= 1e-6 * gradients[0].norm()  # measured 1e-15
    assert metrics_of(early) == pytest.approx(metrics_of(whole), rel=1e-6, abs=1e-9)
    assert early.advantages == whole.advantages


@pytest.mark.parametrize("sizes", [(6,), (1, 1, 1, 1, 1, 1), (3, 0, 2, 1), (0, 5, 1)])
def test_bits_do_not_depend_on_the_times_at_which_groups_arrive(sizes: Sequence[int]) -> None:
    ours, theirs = tiny_model(), tiny_model()
    learner, remaining = learner_of(ours), iter(GROUPS)
    for size in sizes:
        learner.add([*islice(remaining, size)])
        learner.compute()  # at most one micro-batch; the others wait
        assert learner.step == 0
    result = learner.finish_step()
    expected = learner_of(theirs).learn(GROUPS)
    assert identical(weights(ours), weights(theirs))
    assert metrics_of(result) == metrics_of(expected) and result.groups == GROUPS


def test_overlapped_time_ends_when_the_last_group_is_there() -> None:
    for sizes, is_overlapped in ([6], False), ([5, 1], True):
        learner, remaining = learner_of(tiny_model()), iter(GROUPS)
        for size in sizes:
            add(learner, [*islice(remaining, size)])
        metrics = learner.finish_step().metrics
        assert (metrics["time/overlapped"] > 0) == is_overlapped
        assert metrics["time/overlapped"] < metrics["time/forward_backward"]
        assert learner.seconds == 0  # of the next step


@pytest.mark.parametrize("name", ["token", "rollout"])
def test_group_excluded_early_is_excluded_as_in_the_whole_step(name: str) -> None:
    bad = GROUPS[0]  # in the first micro-batch
    poisoned = replace(
        bad.rollouts[0], logprobs=(bad.rollouts[0].loss_mask * -9000.0).astype("float32")
    )
    groups = [replace(bad, rollouts=(poisoned, *bad.rollouts[1:])), *GROUPS[1:]]
    divisor, loss = LOSSES[name]
    results, gradients = list[StepResult](), list[Tensor]()
    for is_early in (False, True):
        model = tiny_model().double()
        learner = learner_of(model, loss=loss, divisor=divisor if is_early else None)
        add(learner, groups[:3])
        assert has_gradient(model) == is_early
        learner.add(groups[3:])
        results.append(learner.finish_step())
        gradients.append(gradient_of(learner))
    whole, early = results
    assert early.excluded == whole.excluded == {bad.name: MISMATCH}
    assert (gradients[1] - gradients[0]).norm() <= 1e-6 * gradients[0].norm()
    assert metrics_of(early) == pytest.approx(metrics_of(whole), rel=1e-6, abs=1e-9)
    assert early.metrics["num_excluded"] == 1 and not early.skip_reason


def test_metrics_of_filters_count_all_groups_of_the_step() -> None:
    cut_off = [replace(each, finish_reason="length") for each in GROUPS[0].rollouts[:2]]
    groups = [replace(GROUPS[0], rollouts=(*cut_off, *GROUPS[0].rollouts[2:])), *GROUPS[1:]]
    rows = list[dict[str, float]]()
    for is_early in (False, True):
        calls = list[Rollout]()

        def detects(rollout: Rollout, calls: list[Rollout] = calls) -> bool:
            calls.append(rollout)
            return overlong(rollout)

        filters = [Filter("overlong", detects, enforce=True)]
        model = tiny_model().double()
        learner = learner_of(model, filters=filters, divisor="tokens" if is_early else None)
        add_one_by_one(learner, groups)
        assert has_gradient(model) == is_early
        rows.append(metrics_of(learner.finish_step()))
        assert len(calls) == 17  # each rollout once
    assert rows[0]["filter/taken_out"] == pytest.approx(2 / 17)
    assert rows[1] == pytest.approx(rows[0], rel=1e-6, abs=1e-9)


def nan_loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that is NaN."""
    return tokens.logprobs.sum() * math.nan, {}


def test_step_without_finite_loss_is_skipped_and_leaves_no_gradient() -> None:
    model = tiny_model()
    before = weights(model)
    learner = learner_of(model, loss=nan_loss)
    add_one_by_one(learner, GROUPS)
    assert has_gradient(model)
    result = learner.finish_step()
    assert "is not finite" in result.skip_reason and identical(weights(model), before)
    signals = [group.name for group in GROUPS if group.has_signal]
    assert sorted(result.excluded) == sorted(signals)
    assert not has_gradient(model)


def test_checkpoint_within_a_step_has_the_random_state_of_its_start() -> None:
    model = tiny_model()
    scorer = Scorer(model)

    def random_forward(*arguments: Any, **options: Any) -> Tensor:
        """Like a model with dropout."""
        return scorer(*arguments, **options) * (1 + 0.1 * torch.rand(()))

    torch.manual_seed(5)
    learner = learner_of(model, compute_logprobs=random_forward)
    expected = learner.state()["rng/torch"].clone()
    add_one_by_one(learner, GROUPS)
    assert not torch.equal(torch.get_rng_state(), expected)
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    assert torch.equal(state["rng/torch"], expected)
    learner.restore(0, state)  # discards the groups and their gradients
    learner.learn(GROUPS)
    other = learner_of(other_model := tiny_model(), compute_logprobs=random_forward)
    scorer = Scorer(other_model)
    torch.set_rng_state(expected)
    other.learn(GROUPS)
    assert identical(weights(model), weights(other_model))


@pytest.mark.parametrize(
    ("sizes", "share_prompts", "expected"),
    [([9], True, []), ([4, 5, 1], True, []), ([6, 5, 4], True, [0, 2]), ([4, 4, 9], True, [2]),
     ([3, 3, 3], False, []), ([3, 3, 3, 1], False, [0, 1, 2]),
     ([6, 2, 2, 2, 2, 2], False, [1, 2, 3, 4, 5])],
)  # fmt: skip
def test_fullest_micro_batch_is_full_if_the_samples_need_another(
    sizes: list[int], share_prompts: bool, expected: list[int]
) -> None:
    samples: Any = [SimpleNamespace(token_ids=range(size)) for size in sizes]
    packing = Packing(max_tokens=10, share_prompts=share_prompts)
    assert full_micro_batch(samples, packing) == expected
