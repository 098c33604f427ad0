from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learners import FOUR, demonstrations_of, identical, weights
from sample_data import group_of, packed, step_gradient, tiny_learner, tiny_model

from peralta_zmq.learning.demonstrations import Demonstrations
from peralta_zmq.learning.losses import preset
from peralta_zmq.learning.packing import Packing, make_micro_batches
from peralta_zmq.models.scorer import Scorer


def numbers_of(demonstrations: Demonstrations, step: int) -> list[int]:
    ids = [id(each) for each in demonstrations.rollouts]
    return [ids.index(id(each)) for each in demonstrations.of_step(step)]


def test_each_epoch_has_all_demonstrations_in_an_order_of_its_own() -> None:
    demonstrations = demonstrations_of(tiny_model())
    drawn = [number for step in range(1, 6) for number in numbers_of(demonstrations, step)]
    epochs = [drawn[:5], drawn[5:10], drawn[10:]]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert numbers_of(demonstrations_of(tiny_model()), 4) == drawn[9:12]  # as after a restart
    assert numbers_of(demonstrations_of(tiny_model(), batch_size=7), 1) == drawn[:7]


def plain_sft(model: Any, demonstrations: Demonstrations) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of -logprob over the completions of step 1, and its gradient, one by one."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for rollout in demonstrations.of_step(1):
        ids = torch.from_numpy(rollout.token_ids).long()
        table = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for t in rollout.loss_mask.nonzero()[0].tolist():
            total, count = total - table[t - 1, ids[t]], count + 1
    value = total / count
    gradients = torch.autograd.grad(value, [*model.parameters()])
    return value, torch.cat([each.flatten() for each in gradients])


@pytest.mark.parametrize("max_tokens", [1000, 9])
def test_term_adds_value_and_gradient_of_the_mean_negative_logprob(max_tokens: int) -> None:
    model = tiny_model().double()
    samples, _ = packed(FOUR, max_tokens=1000)
    batches = make_micro_batches(samples, Packing(max_tokens=1000))
    demonstrations = demonstrations_of(model, max_tokens=max_tokens)
    value, expected = plain_sft(model, demonstrations)
    without, plain = step_gradient(model, batches, preset("dapo"))
    found, result = step_gradient(model, batches, preset("dapo"), sft=demonstrations.term(1))
    # 1e-6: the mask and the old logprobs are float32
    assert (found - without - 0.3 * expected).norm() <= 1e-6 * expected.norm()
    assert result.metrics["sft_loss"] == pytest.approx(value.item(), rel=1e-6)
    assert result.metrics["loss"] == plain.metrics["loss"]


def test_demonstrations_are_trained_in_steps_without_signal() -> None:
    model = tiny_model()
    before = weights(model)
    learner = tiny_learner(model, demonstrations=demonstrations_of(model))
    rows = [learner.learn([group_of([1, 1])]).metrics for _ in range(10)]
    assert not identical(weights(model), before)
    losses = [row["sft_loss"] for row in rows]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_restore_rejects_other_demonstrations() -> None:
    model = tiny_model()
    demonstrations = demonstrations_of(model)
    learner = tiny_learner(model, demonstrations=demonstrations)
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    learner.restore(0, state)
    first, *others = demonstrations.rollouts
    shifted = replace(first, loss_mask=np.roll(first.loss_mask, 1))
    for rollouts in (others, [shifted, *others], [*others, first]):
        changed = replace(demonstrations, rollouts=rollouts)
        with pytest.raises(ValueError, match=r"loss\.sft_file had other demonstrations"):
            tiny_learner(model, demonstrations=changed).restore(0, state)
    tiny_learner(model).restore(0, state)  # as in a replay without them


def test_demonstrations_do_not_hide_a_loss_that_is_not_finite() -> None:
    model = tiny_model()
    before = weights(model)
    learner = tiny_learner(
        model, loss=lambda tokens: (tokens.logprobs.sum() * torch.nan, {}),
        demonstrations=demonstrations_of(model),
    )  # fmt: skip
    assert learner.learn(FOUR).skip_reason
    assert identical(weights(model), before)


def test_demonstrations_without_a_finite_loss_are_named() -> None:
    model = tiny_model()
    before = weights(model)
    demonstrations = demonstrations_of(
        model, compute_logprobs=lambda *row, **options: Scorer(model)(*row, **options) * torch.nan
    )
    result = tiny_learner(model, demonstrations=demonstrations).learn(FOUR)
    assert "loss.sft_file is not finite" in result.skip_reason
    assert identical(weights(model), before)
