from __future__ import annotations

import pytest
import torch
from fakes import group_of

from peralta_zmq.learning.advantages import group_mean, length_weighted
from peralta_zmq.learning.batch import make_batches


def shapes(batches: list) -> list[tuple[int, ...]]:  # type: ignore[type-arg]
    return [tuple(batch.token_ids.shape) for batch in batches]


def test_groups_without_signal_are_left_out() -> None:
    groups = [group_of([1, 1]), group_of([1, 0]), group_of([0, 0])]
    assert shapes(make_batches(groups, group_mean, max_tokens=1000)) == [(2, 7)]


def test_step_without_any_signal_has_no_batches() -> None:
    assert make_batches([group_of([1, 1])], group_mean, max_tokens=1000) == []


def test_padding_is_on_the_right_and_masked_everywhere() -> None:
    (batch,) = make_batches([group_of([1, 0], lengths=[2, 4])], group_mean, max_tokens=1000)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    padding = batch.attention_mask == 0
    for field in (batch.token_ids, batch.loss_mask, batch.old_logprobs, batch.advantages):
        assert not field[padding].any()


def test_loss_mask_covers_the_generated_tokens() -> None:
    (batch,) = make_batches([group_of([1, 0], lengths=[2, 4])], group_mean, max_tokens=1000)
    assert batch.loss_mask.tolist() == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1]]


def test_every_token_keeps_its_id_and_logprob() -> None:
    group = group_of([1, 0], lengths=[2, 4])
    (batch,) = make_batches([group], group_mean, max_tokens=1000)
    for row, rollout in enumerate(group.rollouts):
        length = len(rollout.token_ids)
        assert batch.token_ids[row, :length].tolist() == rollout.token_ids.tolist()
        assert batch.old_logprobs[row, :length].tolist() == rollout.logprobs.tolist()


def test_advantage_is_repeated_on_each_token_of_its_rollout() -> None:
    (batch,) = make_batches([group_of([1, 0], lengths=[2, 2])], group_mean, max_tokens=1000)
    assert batch.advantages.tolist() == [[0.5] * 5, [-0.5] * 5]


def test_advantage_is_told_the_generated_lengths() -> None:
    # baseline (1 * 1 + 0 * 3) / 4 = .25
    group = group_of([1, 0], lengths=[1, 3])
    (batch,) = make_batches([group], length_weighted, max_tokens=1000)
    assert batch.advantages[:, 0].tolist() == [0.75, -0.25]


def test_groups_are_compared_within_themselves() -> None:
    groups = [group_of([1, 0], lengths=[1, 2]), group_of([5, 3], lengths=[3, 4])]
    (batch,) = make_batches(groups, group_mean, max_tokens=1000)
    assert batch.advantages[:, 0].tolist() == [0.5, -0.5, 1, -1]


def test_micro_batch_holds_no_more_padded_tokens_than_its_budget() -> None:
    group = group_of([1, 0, 1, 0, 1], lengths=[1, 2, 3, 9, 9])  # 4, 5, 6, 12, 12 tokens
    assert shapes(make_batches([group], group_mean, max_tokens=18)) == [(3, 6), (1, 12), (1, 12)]


def test_budget_may_be_filled_exactly() -> None:
    group = group_of([1, 0, 1, 0], lengths=[3, 3, 3, 3])  # 6 tokens each
    assert shapes(make_batches([group], group_mean, max_tokens=12)) == [(2, 6), (2, 6)]


def test_rollout_longer_than_the_budget_has_a_batch_of_its_own() -> None:
    group = group_of([1, 0], lengths=[1, 50])
    assert shapes(make_batches([group], group_mean, max_tokens=10)) == [(1, 4), (1, 53)]


def test_masks_and_ids_have_the_types_that_models_want() -> None:
    (batch,) = make_batches([group_of([1, 0])], group_mean, max_tokens=1000)
    kinds = [batch.token_ids.dtype, batch.attention_mask.dtype, batch.loss_mask.dtype]
    assert kinds == [torch.int64, torch.int64, torch.float32]


def test_each_token_has_the_temperature_of_the_weights_that_sampled_it() -> None:
    groups = [group_of([1, 0], lengths=[1, 2], policy_step=step) for step in (2, 5)]
    batches = make_batches(
        groups, group_mean, max_tokens=1000, temperature=lambda step: 1 + max(step, 0) / 10
    )
    (batch,) = batches  # rows by length: 1 and 1, 2 and 2 generated tokens
    assert torch.is_tensor(batch.temperatures)
    there = batch.loss_mask.bool()
    rows = [row[mask].tolist() for row, mask in zip(batch.temperatures, there, strict=True)]
    expected = [[1.2], [1.5], [1.2, 1.2], [1.5, 1.5]]
    assert rows == [pytest.approx(each) for each in expected]


def test_a_constant_temperature_stays_a_number() -> None:
    (batch,) = make_batches([group_of([1, 0])], group_mean, max_tokens=1000, temperature=0.7)
    assert batch.temperatures == 0.7
