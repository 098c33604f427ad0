from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_data import group_of, siblings, tiny_learner, tiny_model

from peralta_zmq.errors import TrainingError
from peralta_zmq.learning.losses import Tokens, grpo_kl, reinforce
from peralta_zmq.learning.reference_models import PolicyCopy, reference_logprobs
from peralta_zmq.models.scoring import Scorer
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer.checkpoint import Checkpoint, newest, write_checkpoint


def groups_of(step: int) -> list[RolloutGroup]:
    return [group_of([1, 0, 0, 1], seed=step, lengths=[4, 2, 6, 3])]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def identical(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


def test_learn_raises_probability_of_better_rollouts() -> None:
    model = tiny_model()
    learner = tiny_learner(model, weight_decay=0.0)
    losses = [learner.learn(groups_of(1)).metrics["loss"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_metrics_report_learning_rate_of_the_step() -> None:
    learner = tiny_learner(tiny_model(), learning_rate=lambda step: step / 1000)
    rows = [learner.learn(groups_of(1)).metrics for _ in range(2)]
    assert [row["learning_rate"] for row in rows] == [0.001, 0.002]


def test_learning_rate_zero_changes_nothing() -> None:
    model = tiny_model()
    before = weights(model)
    tiny_learner(model, learning_rate=lambda step: 0.0).learn(groups_of(1))
    assert identical(weights(model), before)


def test_step_without_signal_changes_no_weights() -> None:
    model = tiny_model()
    before, learner = weights(model), tiny_learner(model)
    row = learner.learn([group_of([1, 1])]).metrics
    assert identical(weights(model), before)
    assert (learner.step, row["reward"], row["frac_reward_zero_std"]) == (1, 1, 1)


def nan_loss(tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss that is NaN."""
    return tokens.logprobs.sum() * math.nan, {}


def test_repeated_steps_may_all_be_skipped() -> None:
    learner = tiny_learner(tiny_model(), loss=nan_loss)
    for step in range(1, 5):
        assert learner.learn(groups_of(step), learning_rate=0.1).skip_reason
    with pytest.raises(TrainingError, match=r"^steps 3 to 5 had no"):
        learner.learn(groups_of(5))


def test_good_step_resets_the_skip_count() -> None:
    learner = tiny_learner(
        tiny_model(), loss=lambda tokens: (nan_loss if learner.step % 3 else reinforce)(tokens)
    )
    problems = []
    for step in range(6):
        problems.append(bool(learner.learn(groups_of(step)).skip_reason))
    assert problems == [True, True, False] * 2


# Mini-batches

FOUR = [siblings([1, 0], seed=seed) for seed in range(4)]


def tokens_of_step(learner_of: Any, **options: Any) -> list[Tokens]:
    """Tokens that the loss gets in one step on four groups."""
    seen = list[Tokens]()

    def loss(tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(tokens)
        return reinforce(tokens)

    learner_of(loss=loss, **options).learn(FOUR)
    return seen


def test_mini_batches_update_on_their_groups() -> None:
    model = tiny_model()
    seen = tokens_of_step(functools.partial(tiny_learner, model), num_iterations=2)
    assert [each.num_sequences for each in seen] == [4, 4]
    assert [each.step_tokens for each in seen] == [16, 16]
    updates = tiny_learner(updates_model := tiny_model())
    for number in range(2):
        updates.learn(FOUR[number::2])
    assert identical(weights(model), weights(updates_model))


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 9}, {"share_prompts": False},
     {"max_tokens": 9, "share_prompts": False}],
)  # fmt: skip
def test_siblings_share_an_update_for_any_packing(options: dict[str, Any]) -> None:
    # a prompt of 3 and 4 completions of 4: siblings in one sample, or each in its own
    groups = [siblings([1, 0, 0, 1], seed=seed) for seed in range(4)]
    known = {
        float(logprob): number
        for number, group in enumerate(groups)
        for rollout in group.rollouts
        for logprob in rollout.logprobs[rollout.loss_mask]
    }
    models, updates = [tiny_model(), tiny_model()], list[set[int]]()

    def loss(tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        updates.append({known[each] for each in tokens.old_logprobs.tolist()})
        return reinforce(tokens)

    tiny_learner(models[0], num_iterations=2).learn(groups)
    tiny_learner(models[1], num_iterations=2, loss=loss, **options).learn(groups)
    half = len(updates) // 2
    assert [set().union(*updates[:half]), set().union(*updates[half:])] == [{0, 2}, {1, 3}]
    whole, packed = map(weights, models)
    for name, each in whole.items():
        # measured 4e-7 for updates of 2e-2; 4e-2 when siblings are in different updates
        assert torch.allclose(packed[name], each, rtol=0, atol=1e-5), name


def test_prox_logprobs_precede_first_mini_batch() -> None:
    model = tiny_model()
    (whole,) = tokens_of_step(functools.partial(tiny_learner, tiny_model()))
    first, second = tokens_of_step(functools.partial(tiny_learner, model), num_iterations=2)
    known = dict(zip(whole.old_logprobs.tolist(), whole.logprobs.tolist(), strict=True))
    assert torch.equal(first.prox_logprobs, first.logprobs.detach())
    assert not torch.equal(second.prox_logprobs, second.logprobs.detach())
    for tokens in (first, second):
        expected = [known[each] for each in tokens.old_logprobs.tolist()]
        assert tokens.prox_logprobs.tolist() == pytest.approx(expected, abs=1e-5)


def test_prox_logprobs_equal_policy_with_one_iteration() -> None:
    (tokens,) = tokens_of_step(functools.partial(tiny_learner, tiny_model()))
    assert torch.equal(tokens.prox_logprobs, tokens.logprobs)
    assert not tokens.prox_logprobs.requires_grad


def test_reference_models_score_the_same_tokens() -> None:
    policy, other = tiny_model(), tiny_model(seed=1)
    parameters = dict(policy.named_parameters())
    (tokens,) = tokens_of_step(
        functools.partial(tiny_learner, policy),
        reference=PolicyCopy(parameters, Scorer(policy)),
        teacher=functools.partial(reference_logprobs, Scorer(other)),
    )
    for model, given in ((tiny_model(), tokens.ref_logprobs), (other, tokens.teacher_logprobs)):
        (own,) = tokens_of_step(functools.partial(tiny_learner, model))
        assert torch.equal(given, own.logprobs)
        assert not given.requires_grad


def learner_with_reference(model: Any, **options: Any) -> Any:
    reference = PolicyCopy(dict(model.named_parameters()), Scorer(model), **options)
    return tiny_learner(model, reference=reference, loss=functools.partial(grpo_kl, beta=0.5))


def test_policy_copy_restores_policy_weights_after_scoring() -> None:
    model, plain = tiny_model(), tiny_model()
    learner, base = learner_with_reference(model), weights(model)
    zero = functools.partial(grpo_kl, beta=0.0)
    without_reference = tiny_learner(plain, loss=zero)
    with_reference = tiny_learner(
        model, loss=zero, reference=PolicyCopy(dict(model.named_parameters()), Scorer(model))
    )
    for step in range(3):
        with_reference.learn(groups_of(step))
        without_reference.learn(groups_of(step))
    assert identical(weights(model), weights(plain))
    assert not identical(weights(model), base)
    kl = [learner.learn(groups_of(4)).metrics["kl"] for _ in range(2)]
    assert 0 < kl[0] != kl[1]


def test_policy_copy_mixes_by_mixup_alpha() -> None:
    model = tiny_model()
    base = weights(model)
    learner = learner_with_reference(model, sync_steps=1, mixup_alpha=0.25)
    learner.learn(groups_of(1))
    policy, state = weights(model), learner.state()
    for name, first in base.items():
        mixed = 0.25 * policy[name] + 0.75 * first
        assert torch.allclose(state[f"reference/{name}"], mixed, atol=1e-7)


@pytest.mark.parametrize("sync_steps", [None, 2])
def test_restored_learner_has_its_reference(tmp_path: Path, sync_steps: int | None) -> None:
    learner = learner_with_reference(tiny_model(), sync_steps=sync_steps)
    for step in range(3):
        learner.learn(groups_of(step))
    state = learner.state()
    assert any(path.startswith("reference/") for path in state) == (sync_steps is not None)
    write_checkpoint(tmp_path, Checkpoint(3, state, {}), run_id="run-1")
    expected = [learner.learn(groups_of(step)).metrics["kl"] for step in range(3, 6)]
    saved = newest(tmp_path, run_id="run-1")
    assert saved is not None
    other = learner_with_reference(tiny_model(), sync_steps=sync_steps)
    other.restore(saved.step, saved.tensors)
    assert [other.learn(groups_of(step)).metrics["kl"] for step in range(3, 6)] == expected


def test_restored_learner_has_the_same_random_state() -> None:
    learner = tiny_learner(tiny_model())
    torch.manual_seed(11)
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    expected = torch.rand(3)
    learner.restore(0, state)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [({"num_hidden_layers": 3}, {}, r"only the model has the parameter .*layers\.2"),
     ({"vocab_size": 65}, {}, r"embed_tokens.* has shape \[64, 16\], not \[65, 16\]"),
     ({}, {"sync_steps": 2}, r"no reference/\S+, because train.ref_sync_steps was not set")],
)  # fmt: skip
def test_restore_rejects_state_of_another_model_or_without_its_reference(
    settings: dict[str, int], options: dict[str, int], reason: str
) -> None:
    state = learner_with_reference(tiny_model()).state()
    other = learner_with_reference(tiny_model(**settings, seed=1), **options)
    before = {name: tensor.clone() for name, tensor in other.state().items()}
    with pytest.raises(ValueError, match=reason):
        other.restore(0, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state().items())
