from __future__ import annotations

import pytest
import torch
from fakes import group_of

from peralta_zmq.learning.advantages import group_mean, length_weighted
from peralta_zmq.learning.batch import Admission, make_batches, staleness


def shapes(batches: list) -> list[tuple[int, ...]]:  # type: ignore[type-arg]
    return [tuple(batch.token_ids.shape) for batch in batches]


# Admission.


def test_group_sampled_from_the_newest_weights_is_not_stale() -> None:
    assert staleness(group_of([1, 0], policy_step=6), step=7) == 0


def test_staleness_counts_the_steps_taken_since() -> None:
    assert staleness(group_of([1, 0], policy_step=2), step=7) == 4


def test_group_from_weights_of_the_future_is_not_stale() -> None:
    assert staleness(group_of([1, 0], policy_step=9), step=7) == 0


@pytest.mark.parametrize(("step", "admitted"), [(1, True), (8, True), (9, True), (10, False)])
def test_group_is_admitted_up_to_the_bound_and_not_beyond(step: int, admitted: bool) -> None:
    # policy step 0: staleness 0, 7, 8 and 9
    assert Admission(8).admit(group_of([1, 0]), step=step) is admitted


def test_bound_of_zero_admits_the_newest_weights_only() -> None:
    admission = Admission(0)
    fresh, old = group_of([1, 0], policy_step=4), group_of([1, 0], policy_step=3, sequence=1)
    assert (admission.admit(fresh, step=5), admission.admit(old, step=5)) == (True, False)


def test_stale_group_is_counted() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0]), step=10)
    assert admission.dropped == {"stale": 1}


def test_group_that_comes_twice_is_dropped_and_counted() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0], sequence=3), step=1)
    assert not admission.admit(group_of([1, 0], sequence=3), step=1)
    assert admission.dropped == {"duplicate": 1}


def test_group_of_an_earlier_sequence_is_a_duplicate() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0], sequence=3), step=1)
    assert not admission.admit(group_of([1, 0], sequence=2), step=1)


def test_stale_group_that_comes_again_is_a_duplicate() -> None:
    admission = Admission(8)
    for _ in range(2):
        admission.admit(group_of([1, 0]), step=10)
    assert admission.dropped == {"stale": 1, "duplicate": 1}


def test_restarted_generator_may_count_from_zero_again() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0], sequence=9), step=1)
    assert admission.admit(group_of([1, 0], sequence=0, boot=b"second!!"), step=1)


def test_generators_count_apart() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0], sequence=9), step=1)
    assert admission.admit(group_of([1, 0], sequence=0, generator_id="bob"), step=1)


def test_ledger_of_an_earlier_start_is_honoured() -> None:
    before = Admission(8)
    before.admit(group_of([1, 0], sequence=3), step=1)
    after = Admission(8, ledger=dict(before.ledger))
    assert not after.admit(group_of([1, 0], sequence=3), step=1)


# Batches.


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
