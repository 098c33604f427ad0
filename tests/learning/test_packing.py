from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sample_data import group_of, packed, siblings

from peralta_zmq.learning.advantages import group_mean
from peralta_zmq.learning.packing import (
    MicroBatch,
    Packing,
    assign_to_bins,
    make_micro_batches,
    pack_groups,
)
from peralta_zmq.rollout import RolloutGroup


def batches_of(
    groups: list[RolloutGroup],
    *,
    advantage: Any = group_mean,
    max_tokens: int = 1000,
    **options: Any,
) -> list[MicroBatch]:
    samples, _ = packed(groups, advantage, max_tokens=max_tokens, **options)
    return make_micro_batches(samples, Packing(max_tokens=max_tokens, **options))


def layouts(batches: list[MicroBatch]) -> list[list[list[tuple[int, int]]]]:
    return [[[*map(tuple, each.spans)] for each in batch.trees] for batch in batches]


def with_tokens(group: RolloutGroup, *rows: list[int]) -> RolloutGroup:
    """The group with these token ids in its rollouts."""
    rollouts = [
        replace(each, token_ids=np.array(row, np.int32))
        for each, row in zip(group.rollouts, rows, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


# Samples


def test_every_token_keeps_its_id_and_logprob() -> None:
    group = siblings([1, 0], lengths=[2, 4])
    (batch,) = batches_of([group])
    first, second = group.rollouts
    assert batch.token_ids.tolist() == [*first.token_ids, *second.token_ids[3:]]
    assert batch.scored.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.old_logprobs.tolist() == [*first.logprobs[3:], *second.logprobs[3:]]


def test_shared_prefix_is_stored_once() -> None:
    group = with_tokens(
        group_of([1, 0, 0, 1], lengths=[3, 3, 3, 2]),
        [7, 8, 9, 20, 21, 22], [7, 8, 9, 20, 21, 23], [7, 8, 9, 20, 21, 22], [7, 8, 9, 20, 21],
    )  # fmt: skip
    (batch,) = batches_of([group])
    assert layouts([batch]) == [[[(-1, 6), (4, 1)]]]
    assert batch.token_ids.tolist() == [7, 8, 9, 20, 21, 22, 23]
    assert batch.scored.tolist() == [3, 4, 5, 3, 4, 6, 3, 4, 5, 3, 4]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]


def test_rollouts_with_other_prompts_share_nothing() -> None:
    group = with_tokens(group_of([1, 0], lengths=[1, 2]), [5, 6, 7, 9], [6, 6, 7, 9, 9])
    assert layouts(batches_of([group])) == [[[(-1, 4), (-1, 5)]]]


def test_rollouts_are_separate_without_share_prompts() -> None:
    group = siblings([1, 0], lengths=[2, 4])
    assert layouts(batches_of([group], share_prompts=False)) == [[[(-1, 7)], [(-1, 5)]]]


def test_text_between_turns_is_not_scored() -> None:
    group = siblings([1, 0], lengths=[5, 2])
    turns = np.array([0, 0, 0, 1, 0, 0, 1, 1], np.bool_)
    first = replace(group.rollouts[0], loss_mask=turns)
    (batch,) = batches_of([replace(group, rollouts=(first, group.rollouts[1]))])
    assert layouts([batch]) == [[[(-1, 8), (2, 2)]]]
    assert batch.scored.tolist() == [3, 6, 7, 8, 9]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 1]


def test_generated_first_token_is_not_scored() -> None:
    group = with_tokens(siblings([1, 0], lengths=[2, 2], num_prompt=0), [5, 6], [7, 8])
    (batch,) = batches_of([group])
    assert batch.scored.tolist() == [1, 3]


def test_groups_without_signal_are_left_out() -> None:
    groups = [siblings([1, 1]), siblings([1, 0]), siblings([0, 0])]
    (batch,) = batches_of(groups)
    assert (len(batch.trees), batch.num_sequences) == (1, 2)


# Micro-batches


@pytest.mark.parametrize(
    ("sizes", "capacity", "options", "rounds"),
    [
        # first fit decreasing: 9 and 1; 7 and 3; 4, 4 and 2
        ([4, 9, 1, 7, 3, 4, 2], 10, {}, [[[1, 2]], [[3, 4]], [[0, 5, 6]]]),
        # padded samples count as the longest of their bin
        ([5, 3, 3], 12, {}, [[[0, 1, 2]]]),
        ([5, 3, 3], 12, {"padded": True}, [[[0, 1]], [[2]]]),
        # the least loaded rank: 7 | 5; 4 to the 5; 3 to the 7; 2 to the 9
        ([2, 7, 3, 5, 4], 100, {"num_ranks": 2}, [[[1, 2], [3, 4, 0]]]),
        # no rank has room: 9 | 8, then 7 | 3; 1 fits into the first round, with the 8
        ([9, 8, 7, 3, 1], 10, {"num_ranks": 2}, [[[0], [1, 4]], [[2], [3]]]),
        # rank 0 has a sample in every round
        ([4], 10, {"num_ranks": 3}, [[[0], [], []]]),
        ([10, 10, 10], 10, {"num_ranks": 2}, [[[0], [1]], [[2], []]]),
        ([], 10, {"num_ranks": 2}, []),
    ],
)
def test_assignment_to_bins_by_hand(
    sizes: list[int], capacity: int, options: dict[str, Any], rounds: list[Any]
) -> None:
    assert assign_to_bins(sizes, capacity, **options) == rounds


def sizes(batches: list[MicroBatch]) -> list[list[int]]:
    return [[each.num_tokens for each in batch.trees] for batch in batches]


def test_groups_share_a_micro_batch_up_to_max_tokens() -> None:
    groups = [siblings([1, 0], lengths=[n, n], seed=n) for n in (1, 2, 3, 9)]
    assert sizes(batches_of(groups, max_tokens=21)) == [[21], [9, 7, 5]]


def test_group_above_max_tokens_is_split_with_its_prompt() -> None:
    group = siblings([1, 0, 1, 0], lengths=[4, 4, 4, 4], seed=3)
    assert layouts(batches_of([group], max_tokens=11)) == [[[(-1, 7), (2, 4)]]] * 2


def test_oversize_rollout_is_truncated() -> None:
    groups = [siblings([1, 0], lengths=[1, 50])]
    samples, metrics = packed(groups, max_tokens=10)
    assert [len(p) for sample in samples for p in sample.positions] == [4, 10]
    assert (metrics["num_truncated"], metrics["num_dropped"]) == (1, 0)


def test_oversize_prompt_drops_the_rollout() -> None:
    samples, metrics = packed([siblings([1, 0], num_prompt=12)], max_tokens=10)
    assert (samples, metrics["num_truncated"], metrics["num_dropped"]) == ([], 0, 2)


def test_metrics_count_tokens_in_the_loss_and_of_groups_without_signal() -> None:
    groups = [siblings([1, 0], lengths=[n, 2 * n], seed=n) for n in (3, 5, 7)]  # prompts of 3
    advantages = [[0.5, -0.5], [], [0.0, 0.0]]  # the last one is trained: keep_zero_std
    _, metrics = pack_groups(groups, advantages, Packing(max_tokens=100))
    assert (metrics["num_loss_tokens"], metrics["num_no_signal_tokens"]) == (9 + 21, 15 + 21)
    included = [[True, False], [True, True], [True, True]]
    _, metrics = pack_groups(groups, advantages, Packing(max_tokens=5), included=included)
    assert (metrics["num_loss_tokens"], metrics["num_no_signal_tokens"]) == (2 + 2 + 2, 15 + 21)


def test_dropped_rollout_counts_in_the_baseline() -> None:
    group = siblings([1, 0, 0, 0])
    included = [[True, True, True, False]]
    advantages = [[0.75, -0.25, -0.25, -0.25]]
    (sample,), _ = pack_groups([group], advantages, Packing(max_tokens=100), included=included)
    assert sample.advantages == (0.75, -0.25, -0.25)


# Advantages and temperatures


def test_each_token_has_the_advantage_of_its_rollout() -> None:
    (batch,) = batches_of([siblings([1, 0], lengths=[2, 3])])
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1]
    assert batch.num_sequences == 2


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [(100, [2, 2, -1, -1, -1, 0.5, 0.5]), (5, [2, 2, 0.5, 0.5])],  # truncated in the first turn
)
def test_each_token_has_the_advantage_of_its_turn(max_tokens: int, expected: list[float]) -> None:
    group = siblings([1, 0], lengths=[7, 2])
    turns = np.array([0, 0, 0, 1, 1, 0, 1, 1, 1, 0], np.bool_)
    first = replace(group.rollouts[0], loss_mask=turns)
    packing = Packing(max_tokens=max_tokens)
    group = replace(group, rollouts=(first, group.rollouts[1]))
    samples, _ = pack_groups([group], [[(2.0, -1.0), 0.5]], packing)
    batches = make_micro_batches(samples, packing)
    assert [x for each in batches for x in each.advantages.tolist()] == expected


def test_tokens_have_the_temperature_of_their_environment() -> None:
    groups = [siblings([1, 0], task="warm"), siblings([0, 1], task="hot")]
    temperatures = {"warm": 0.5, "hot": 4.0}
    (batch,) = batches_of(groups, temperatures=temperatures)
    assert isinstance(batch.temperatures, torch.Tensor)
    by_rollout = [set(batch.temperatures[batch.sequence == each].tolist()) for each in range(4)]
    assert by_rollout == [{0.5}, {0.5}, {4.0}, {4.0}]
    (batch,) = batches_of(groups[:1], temperatures=temperatures)
    assert batch.temperatures == 0.5
