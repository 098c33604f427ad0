"""Data types: joining completions to rollouts, groups."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sample_data import group_of, rollout_with

from peralta_zmq.rollout import Completion, rollout_of

COMPLETION = Completion(
    index=0,
    prompt_ids=np.array([7, 8, 9], np.int32),
    token_ids=np.array([4, 2], np.int32),
    logprobs=np.array([-0.5, -0.25], np.float32),
    policy_steps=np.array([6, 6], np.int32),
    finish_reason="stop",
    text="four",
)


def test_rollout_of_joins_prompt_and_completion() -> None:
    rollout = rollout_of(COMPLETION, 0.5)
    assert rollout.token_ids.tolist() == [7, 8, 9, 4, 2]
    assert rollout.loss_mask.tolist() == [False, False, False, True, True]
    assert rollout.logprobs.tolist() == [0, 0, 0, -0.5, -0.25]
    assert rollout.policy_steps.tolist() == [-1, -1, -1, 6, 6]
    arrays = (rollout.token_ids, rollout.loss_mask, rollout.logprobs, rollout.policy_steps)
    assert [array.dtype for array in arrays] == [np.int32, np.bool_, np.float32, np.int32]
    assert rollout.num_generated == 2  # with the end token
    assert (rollout.reward, rollout.rewards) == (0.5, {})


@pytest.mark.parametrize(
    ("rewards", "turn_rewards", "signal"),
    [
        ([1, 1], [(0, 0), (0, 0)], False),
        ([1, 1], [(0, 1), (1, 0)], True),  # returns 2, 2 and 2, 1
        ([1, 2], [(0, 1), (0, 0)], False),  # returns 2, 2 and 2, 2
        ([1, 1], [(0.1, 0.2), (0.3, 0)], True),
        ([1, 1], [(0.1 + 0.2,), (0.3,)], False),
        ([1, 1], [(0,), (0, 5)], True),
        ([1, 1], [(5,), (0, 5)], False),  # one rollout has a second turn
    ],
)
def test_group_has_signal_when_returns_of_a_turn_differ(
    rewards: list[float], turn_rewards: list[tuple[float, ...]], signal: bool
) -> None:
    rollouts = [
        dataclasses.replace(rollout_with(reward), turn_rewards=values)
        for reward, values in zip(rewards, turn_rewards, strict=True)
    ]
    assert dataclasses.replace(group_of([0]), rollouts=tuple(rollouts)).has_signal is signal


def test_turn_index_counts_spans_of_generated_tokens() -> None:
    mask = np.array([0, 1, 1, 0, 0, 1, 0], bool)
    rollout = dataclasses.replace(rollout_with(0.0), loss_mask=mask)
    assert rollout.turn_indices[mask].tolist() == [0, 0, 1]
    assert rollout.num_turns == 2


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [([1, 0, 0, 1], True), ([0, 0, 0, 0], False), ([0.5, 0.5], False), ([1.0], False),
     ([0.1 + 0.2, 0.3], False), ([1e6, 1e6 + 0.01], True), ([1e-9, 0.0], True)],
)  # fmt: skip
def test_group_has_signal_when_rewards_differ(rewards: list[float], signal: bool) -> None:
    assert group_of(rewards).has_signal is signal
