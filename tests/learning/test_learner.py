"""Training steps of the learner, and one update of the parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from exactness import Float64
from learners import FOUR, groups_of, identical, learner_with_reference, tokens_of_step, weights
from sample_data import (
    VOCAB_SIZE,
    constant,
    packed,
    siblings,
    step_gradient,
    tiny_learner,
    tiny_model,
)
from torch import Tensor

from peralta_zmq.errors import TrainingError
from peralta_zmq.learning.advantages import group_mean
from peralta_zmq.learning.losses import TokenLoss, Tokens, preset
from peralta_zmq.learning.packing import MicroBatch, Packing, make_micro_batches
from peralta_zmq.learning.update import UpdateResult, update_parameters
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.rollout import PrefixTree, TreeSpan

reinforce = preset("reinforce")


def nan_loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that is NaN."""
    return tokens.logprobs.sum() * math.nan, {}


def test_repeated_steps_may_all_be_skipped() -> None:
    learner = tiny_learner(tiny_model(), loss=nan_loss)
    for step in range(1, 5):
        assert learner.learn(groups_of(step), repeated=learner.next_update).skip_reason
    with pytest.raises(TrainingError, match=r"^steps 3 to 5 had no"):
        learner.learn(groups_of(5))


@pytest.mark.parametrize(
    "option", [{"learning_rate": constant(0.02)}, {"weight_decay": 0.5}, {"max_grad_norm": 0.01}]
)
def test_repeated_step_has_the_numbers_of_its_first_time(option: dict[str, Any]) -> None:
    models = [tiny_model(), tiny_model()]
    first, second = tiny_learner(models[0], **option), tiny_learner(models[1])
    for step in range(3):
        numbers = first.next_update
        first.learn(groups_of(step))
        second.learn(groups_of(step), repeated=numbers)
    assert identical(weights(models[0]), weights(models[1]))
    for learner in (first, second):  # with the numbers of its own settings
        learner.learn(groups_of(3))
    assert not identical(weights(models[0]), weights(models[1]))


def test_good_step_resets_the_skip_count() -> None:
    learner = tiny_learner(
        tiny_model(), loss=lambda tokens: (nan_loss if learner.step % 3 else reinforce)(tokens)
    )
    problems = []
    for step in range(6):
        problems.append(bool(learner.learn(groups_of(step)).skip_reason))
    assert problems == [True, True, False] * 2


# Mini-batches


def test_mini_batches_update_on_their_groups() -> None:
    model = tiny_model()
    seen = tokens_of_step(functools.partial(tiny_learner, model), num_minibatches=2)
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
    models, updates = [tiny_model().double(), tiny_model().double()], list[set[int]]()

    def loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        updates.append({known[each] for each in tokens.old_logprobs.tolist()})
        return reinforce(tokens)

    with Float64():
        tiny_learner(models[0], num_minibatches=2).learn(groups)
        tiny_learner(models[1], num_minibatches=2, loss=loss, **options).learn(groups)
    half = len(updates) // 2
    assert [set().union(*updates[:half]), set().union(*updates[half:])] == [{0, 2}, {1, 3}]
    whole, split = map(weights, models)
    for name, each in whole.items():
        # updates of 2e-2 in float64; they differ by 4e-2 when siblings are in different ones
        assert torch.allclose(split[name], each, rtol=0, atol=1e-9), name


def test_prox_logprobs_precede_first_mini_batch() -> None:
    with Float64():
        (whole,) = tokens_of_step(functools.partial(tiny_learner, tiny_model().double()))
        learner_of = functools.partial(tiny_learner, tiny_model().double())
        first, second = tokens_of_step(learner_of, num_minibatches=2)
    known = dict(zip(whole.old_logprobs.tolist(), whole.logprobs.tolist(), strict=True))
    assert torch.equal(first.prox_logprobs, first.logprobs.detach())
    assert not torch.equal(second.prox_logprobs, second.logprobs.detach())
    for tokens in (first, second):
        expected = [known[each] for each in tokens.old_logprobs.tolist()]
        assert tokens.prox_logprobs.tolist() == pytest.approx(expected, abs=1e-9)


def test_iterations_repeat_the_mini_batches_in_order() -> None:
    model = tiny_model()
    seen = tokens_of_step(
        functools.partial(tiny_learner, model), num_minibatches=2, num_iterations=3
    )
    assert len(seen) == 6
    for number, tokens in enumerate(seen):
        assert torch.equal(tokens.old_logprobs, seen[number % 2].old_logprobs)
        assert torch.equal(tokens.prox_logprobs, seen[number % 2].prox_logprobs)
        assert torch.equal(tokens.prox_logprobs, tokens.logprobs) is (number == 0)
    # without prox_logprobs in the loss, it is as if the step were taken three times
    updates = tiny_learner(updates_model := tiny_model(), num_minibatches=2)
    for _ in range(3):
        updates.learn(FOUR)
    assert identical(weights(model), weights(updates_model))


def test_prox_logprobs_equal_policy_with_one_update() -> None:
    (tokens,) = tokens_of_step(functools.partial(tiny_learner, tiny_model()))
    assert torch.equal(tokens.prox_logprobs, tokens.logprobs)
    assert not tokens.prox_logprobs.requires_grad


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


# One update of the parameters

GROUPS = [
    siblings([1, 0, 0, 1], lengths=[4, 1, 7, 2], seed=1),
    siblings([0, 0.5, 1], lengths=[3, 9, 5], seed=2, num_prompt=6),
    siblings([1, 0], lengths=[2, 2], seed=3, num_prompt=2),
]
NUM_TOKENS = 35


def per_sequence(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss over sequences: each is its mean, divided by the step's sequences."""
    size = torch.zeros(tokens.num_sequences, dtype=tokens.logprobs.dtype)
    size = size.index_add(0, tokens.sequence, tokens.mask.to(size.dtype))
    each = tokens.mask * tokens.advantages * tokens.logprobs / size.clamp(min=1)[tokens.sequence]
    value = -each.sum() / tokens.step_sequences
    return value, {"kept": (size > 0).sum() / tokens.step_sequences}


LOSSES = [preset("reinforce"), preset("dapo"), per_sequence]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield tiny_model().double()


def batches_of(max_tokens: int = 1000, temperature: float = 1.0) -> list[MicroBatch]:
    samples, _ = packed(GROUPS, max_tokens=max_tokens)
    return make_micro_batches(samples, Packing(max_tokens=max_tokens, temperature=temperature))


def gradient(
    model: Any, batches: Sequence[MicroBatch], loss: TokenLoss, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """The whole gradient of a step, flat, and the step's metrics."""
    found, result = step_gradient(model, batches, loss, **options)
    return found, result.metrics


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())


# Micro-batches and their order; test_distributed.py covers ranks


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("max_tokens", [15, 20, 40])
def test_gradient_and_metrics_are_equal_for_any_micro_batches(
    model: Any, loss: TokenLoss, max_tokens: int
) -> None:
    whole, expected = gradient(model, batches_of(), loss)
    split = batches_of(max_tokens)
    assert len(split) > 1
    found, metrics = gradient(model, split, loss)
    assert close(found, whole, 1e-6)
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_common_beginning_of_groups_is_computed_once(model: Any) -> None:
    beginning = np.arange(20, dtype=np.int32) % VOCAB_SIZE
    groups = [
        siblings([1, 0, 0, 1], lengths=[4, 1, 7, 2], seed=1, num_prompt=25),
        siblings([0, 0.5, 1], lengths=[3, 9, 5], seed=2, num_prompt=24),
    ]
    for group in groups:
        for rollout in group.rollouts:
            rollout.token_ids[:20] = beginning
    samples, _ = packed(groups, max_tokens=1000)
    (whole,) = make_micro_batches(samples, Packing(max_tokens=1000))
    alone = [make_micro_batches([each], Packing(max_tokens=1000))[0] for each in samples]
    assert len(whole.token_ids) == sum(len(batch.token_ids) for batch in alone) - 20
    assert [tree.after for tree in whole.trees] == [0, 20, 20]
    found, metrics = gradient(model, [whole], preset("reinforce"))
    expected, expected_metrics = gradient(model, alone, preset("reinforce"))
    assert close(found, expected, 1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)


# Packed and padded rows


@pytest.mark.parametrize("loss", LOSSES)
def test_packed_and_padded_gradients_are_equal(model: Any, loss: TokenLoss) -> None:
    shared, expected = gradient(model, batches_of(), loss)
    scorer = Scorer(model)
    scorer.padding_reason = "padded rows: forced by the test"
    alone, _ = packed(GROUPS, max_tokens=1000, share_prompts=False)
    padded = make_micro_batches(alone, Packing(max_tokens=1000, share_prompts=False))
    padded_gradient, metrics = gradient(model, padded, loss, compute_logprobs=scorer)
    assert close(padded_gradient, shared, 1e-6)
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_loss_is_the_mean_over_generated_tokens(model: Any) -> None:
    total, count = 0.0, 0
    for group in GROUPS:
        for rollout, a in zip(group.rollouts, group_mean(group.rewards, []), strict=True):
            ids = torch.from_numpy(rollout.token_ids).long()
            table = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            for t in np.flatnonzero(rollout.loss_mask):
                total -= a * table[t - 1, ids[t]].item()
                count += 1
    assert count == NUM_TOKENS
    _, metrics = gradient(model, batches_of(20), reinforce)
    assert metrics["loss"] == pytest.approx(total / NUM_TOKENS, rel=1e-6)


# One token by hand


def by_hand(old: float) -> tuple[torch.nn.Parameter, MicroBatch]:
    """One generated token whose logprob is the only parameter, -1; its advantage is .5."""
    parameter = torch.nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))
    one = torch.ones(1, dtype=torch.float64)
    batch = MicroBatch(
        token_ids=torch.tensor([3, 4]),
        trees=(PrefixTree((TreeSpan(-1, 2),)),), scored=torch.tensor([1]),
        old_logprobs=one * old, advantages=one / 2, mask=one,
        sequence=torch.tensor([0]), num_sequences=1, groups=("ann/0/7",),
    )  # fmt: skip
    return parameter, batch


def masked_out(batch: MicroBatch) -> MicroBatch:
    return replace(batch, mask=torch.zeros_like(batch.mask))


def step_by_hand(
    parameter: torch.nn.Parameter, batches: list[MicroBatch], *, factor: float = 1.0, **options: Any
) -> UpdateResult:
    chosen: dict[str, Any] = {
        "compute_logprobs": lambda ids, trees, scored, temperature: parameter.expand(1) * factor,
        "loss": reinforce,
        "max_grad_norm": 10.0,
    }
    optimizer = options.pop("optimizer", None) or torch.optim.SGD([parameter], lr=0.1)
    return update_parameters(optimizer, batches, **{**chosen, **options})


def test_effective_sample_size_and_entropy_estimate_by_hand() -> None:
    parameter, batch = by_hand(old=-1.0)
    other = replace(batch, old_logprobs=batch.old_logprobs - math.log(2))
    metrics = step_by_hand(parameter, [batch, other]).metrics
    # ratios 1 and 2: (1 + 2)^2 / (2 * (1 + 4)) = .9, over two micro-batches
    assert metrics["ess"] == pytest.approx(0.9)
    # -logprob 1, ratios 1 and 2: (1 * 1 + 2 * 1) / 2 tokens
    assert metrics["entropy"] == pytest.approx(1.5)


def test_entropy_of_the_loss_replaces_the_estimate() -> None:
    def loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return tokens.logprobs.sum(), {"entropy": torch.tensor(0.25)}

    parameter, batch = by_hand(old=-1.0)
    assert step_by_hand(parameter, [batch], loss=loss).metrics["entropy"] == 0.25


def test_mismatch_by_sender_by_hand() -> None:
    # ann: twice the k3 of .5; bob: k3 of 1, e - 2 = .718282; masked tokens have no sender
    parameter, batch = by_hand(old=-1.5)
    of_ann = replace(batch, groups=("ann/0/7",))
    of_bob = replace(batch, groups=("bob/0/7",), old_logprobs=batch.old_logprobs - 0.5)
    of_eve = masked_out(replace(batch, groups=("eve/0/7",)))
    result = step_by_hand(parameter, [of_ann, of_bob, of_ann, of_eve])
    assert result.mismatch.keys() == {"ann/0", "bob/0"}
    assert result.mismatch["ann/0"].kl == pytest.approx(2 * 0.148721, abs=1e-6)
    assert result.mismatch["ann/0"].num_tokens == 2
    assert result.mismatch["bob/0"].mean == pytest.approx(0.718282, abs=1e-6)
    assert not [name for name in result.metrics if "ann" in name or "bob" in name]


def test_masked_tokens_are_in_no_metric() -> None:
    parameter, batch = by_hand(old=-1.0)
    other = masked_out(replace(batch, old_logprobs=batch.old_logprobs - 3))
    result = step_by_hand(parameter, [batch, other])
    assert (result.metrics["mismatch_kl"], result.metrics["ess"]) == (0, 1)
    assert result.metrics["loss"] == 0.5  # not halved


@pytest.mark.parametrize(("limit", "after"), [(10.0, -0.95), (0.25, -0.975)])
def test_step_clips_gradient_at_max_grad_norm(limit: float, after: float) -> None:
    # d(-.5 p)/dp = -.5, so p moves up by .1 * min(.5, limit)
    parameter, batch = by_hand(old=-1.0)
    result = step_by_hand(parameter, [batch], max_grad_norm=limit)
    assert parameter.item() == pytest.approx(after, abs=1e-6)
    assert result.metrics["grad_norm"] == pytest.approx(0.5)


def test_step_without_batches_changes_nothing() -> None:
    parameter, _ = by_hand(old=-1.0)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
    metrics = step_by_hand(parameter, [], optimizer=optimizer).metrics
    assert (parameter.item(), metrics["loss"], metrics["skipped"]) == (-1.0, 0.0, 0.0)


def test_tokens_are_scored_at_batch_temperatures() -> None:
    parameter, batch = by_hand(old=-1.0)
    seen: list[object] = []

    def score(ids: Tensor, trees: object, scored: Tensor, *, temperature: Tensor | float) -> Tensor:
        seen.append(temperature)
        return parameter.expand(1)

    for each in (0.7, torch.tensor([0.5])):
        step_by_hand(parameter, [replace(batch, temperatures=each)], compute_logprobs=score)
        assert seen[-1] is each


# Skipped steps and invalid losses


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_not_finite_gradient_skips_the_step(poison: float) -> None:
    parameter, batch = by_hand(old=-1.0)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    result = step_by_hand(parameter, [batch], optimizer=optimizer, factor=poison)
    assert (parameter.item(), result.metrics["skipped"]) == (-1.0, 1.0)
    assert result.skip_reason == "1 logprobs of the policy are not finite"


def test_skipped_gradient_is_discarded() -> None:
    parameter, batch = by_hand(old=-1.0)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for factor in (math.nan, 1.0):
        result = step_by_hand(parameter, [batch], optimizer=optimizer, factor=factor)
    assert (result.skip_reason, parameter.item()) == ("", pytest.approx(-0.95))
