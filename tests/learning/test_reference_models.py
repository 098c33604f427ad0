"""Logprobs under a copy of the policy and under a teacher; the copy's updates and checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from learners import groups_of, identical, learner_with_reference, tokens_of_step, weights
from sample_data import tiny_learner, tiny_model

from peralta_zmq.learning.losses import preset
from peralta_zmq.learning.reference_models import PolicyCopy, reference_logprobs
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.trainer.checkpoint import Checkpoint, newest, write_checkpoint


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


def test_policy_copy_restores_policy_weights_after_scoring() -> None:
    model, plain = tiny_model(), tiny_model()
    learner, base = learner_with_reference(model), weights(model)
    zero = preset("grpo_kl", beta=0.0)
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
