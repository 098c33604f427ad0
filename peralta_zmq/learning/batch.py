"""From groups to micro-batches: what is packed together, and what each token is worth.

Knows groups and tensors; knows nothing of models or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.rollout import Rollout, RolloutGroup

Temperature = float | Callable[[int], float]  # a constant, or that of a policy step
AdvantageFunction = Callable[[Sequence[float], Sequence[int]], list[float]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts of one micro-batch; index t of every array speaks about token t. All [B, T]."""

    token_ids: Tensor  # int64, padded on the right
    attention_mask: Tensor  # int64, 1 on real tokens
    loss_mask: Tensor  # float32, 1 on generated tokens
    old_logprobs: Tensor  # float32
    advantages: Tensor  # float32, the rollout's on each of its tokens
    temperatures: Tensor | float = 1.0  # float32, that sampled each token; a number for all


def make_batches(
    groups: Sequence[RolloutGroup],
    advantage: AdvantageFunction,
    *,
    max_tokens: int,
    temperature: Temperature = 1.0,
    device: torch.device | str = "cpu",
) -> list[Batch]:
    """Micro-batches of at most `max_tokens` padded tokens (one rollout at least in each).

    Groups without signal are left out: every advantage in them is zero.
    """
    scored = sorted(_scored(groups, advantage), key=lambda pair: len(pair[0].token_ids))
    return [_pack(rows, temperature, device) for rows in _within_budget(scored, max_tokens)]


def _scored(
    groups: Sequence[RolloutGroup], advantage: AdvantageFunction
) -> Iterator[tuple[Rollout, float]]:
    for group in groups:
        if group.has_signal:
            lengths = [rollout.num_generated for rollout in group.rollouts]
            yield from zip(group.rollouts, advantage(group.rewards, lengths), strict=True)


def _within_budget(
    scored: Sequence[tuple[Rollout, float]], max_tokens: int
) -> Iterator[list[tuple[Rollout, float]]]:
    rows: list[tuple[Rollout, float]] = []
    for pair in scored:  # ascending length, so the newest is the widest
        if rows and (len(rows) + 1) * len(pair[0].token_ids) > max_tokens:
            yield rows
            rows = []
        rows.append(pair)
    if rows:
        yield rows


def _pack(
    rows: Sequence[tuple[Rollout, float]], temperature: Temperature, device: torch.device | str
) -> Batch:
    longest = max(len(rollout.token_ids) for rollout, _ in rows)
    shape = (len(rows), longest)
    tokens, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask, old, advantages = (np.zeros(shape, np.float32) for _ in range(3))
    for row, (rollout, advantage) in enumerate(rows):
        length = len(rollout.token_ids)
        tokens[row, :length] = rollout.token_ids
        attention[row, :length] = 1
        mask[row, :length] = rollout.loss_mask
        old[row, :length] = rollout.logprobs
        advantages[row, :length] = advantage
    arrays = (tokens, attention, mask, old, advantages)
    return Batch(
        *(torch.from_numpy(array).to(device) for array in arrays),
        temperatures=_temperatures(rows, shape, temperature, device)
        if callable(temperature)
        else temperature,
    )


def _temperatures(
    rows: Sequence[tuple[Rollout, float]],
    shape: tuple[int, int],
    temperature: Callable[[int], float],
    device: torch.device | str,
) -> Tensor:
    found = np.ones(shape, np.float32)
    for row, (rollout, _) in enumerate(rows):
        length = len(rollout.token_ids)
        found[row, :length] = [temperature(step) for step in rollout.policy_steps.tolist()]
    return torch.from_numpy(found).to(device)
