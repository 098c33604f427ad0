"""Packing of rollout groups into micro-batches; a prefix shared by rollouts is stored once.

The rollouts of a group have the same prompt. `pack_groups` merges as many of them as fit into one
`PackedSample`: a prefix tree with the advantages and rewards of its rollouts. `make_batches` lays
the trees of several samples one after the other in a row of tokens: the micro-batch (`Batch`),
which a model computes in one forward pass. A trainer of several ranks (processes) divides the
micro-batches among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peralta_zmq.learning.advantages import AdvantageFunction, advantages_of
from peralta_zmq.learning.distributed import SINGLE, Ranks
from peralta_zmq.rollout import Int32Array, PrefixTree, Rollout, RolloutGroup, TreeSpan

Int64Array: TypeAlias = NDArray[np.int64]
Temperature: TypeAlias = float | Callable[[int], float]  # constant, or a function of policy_step
Oversize: TypeAlias = Literal["truncate", "drop"]


@dataclass(frozen=True, slots=True)
class PackedSample:
    """Rollouts of one group, merged into a prefix tree."""

    token_ids: Int32Array  # [T], each shared prefix once
    tree: PrefixTree  # how the tokens continue each other
    positions: tuple[Int64Array, ...]  # per rollout, indices of its tokens in token_ids
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]  # per rollout
    sender: str  # start of a generator that sent the group
    group: int  # number of the group, counting only groups of the step that are trained on


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: prefix trees in a row of M tokens, with N generated tokens in the loss."""

    token_ids: Tensor  # int64 [M]
    trees: tuple[PrefixTree, ...]  # in the order of the row
    scored: Tensor  # int64 [N], indices in the row of the generated tokens; rollouts share some
    old_logprobs: Tensor  # float32 [N]
    advantages: Tensor  # float32 [N], advantage of the token's rollout
    mask: Tensor  # float32 [N], 1; 0 in a micro-batch that only keeps its rank in lockstep
    sequence: Tensor  # int64 [N], index of the token's rollout in this micro-batch
    num_sequences: int  # rollouts in this micro-batch
    senders: tuple[str, ...] = ()  # per rollout
    temperatures: Tensor | float = 1.0  # float32 [N], sampling temperatures; a number: all the same
    prox_logprobs: Tensor | None = None  # float32 [N], of the policy before the step's first update
    ref_logprobs: Tensor | None = None  # float32 [N], of the reference model
    teacher_logprobs: Tensor | None = None  # float32 [N], of the teacher model


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """The samples of a step, the advantages, and the number of rollouts that did not fit."""

    samples: tuple[PackedSample, ...]
    num_truncated: int  # rollouts that lost their end
    num_dropped: int  # rollouts left out because of their length
    advantages: tuple[tuple[float, ...], ...]  # per group and rollout; empty for unpacked groups


class TreeBuilder:
    """Builds a prefix tree from token sequences; an added sequence shares the longest prefix."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of the tree
        self.spans: list[TreeSpan] = []
        self.positions: list[Int64Array] = []  # per sequence, indices of its tokens in `tokens`
        self._next: dict[tuple[int, int], int] = {}  # (index, token id that follows) -> its index

    def add(self, sequence: Sequence[int], *, max_tokens: int) -> bool:
        """Add a sequence: append the part after the longest prefix that the tree already has.

        Returns False, with nothing changed, if the tree has a sequence and would grow to more than
        `max_tokens` tokens.
        """
        prefix, last, start = list[int](), -1, len(self.tokens)
        while len(prefix) < len(sequence) and (last, sequence[len(prefix)]) in self._next:
            prefix.append(last := self._next[last, sequence[len(prefix)]])
        suffix = sequence[len(prefix) :]
        if self.positions and start + len(suffix) > max_tokens:
            return False
        if suffix:
            self.spans.append(TreeSpan(last, len(suffix)))
        for index, token in enumerate(suffix, start=start):
            self._next[last, token] = index
            last = index
        self.tokens += suffix
        self.positions.append(np.array([*prefix, *range(start, len(self.tokens))], np.int64))
        return True


def pack_groups(
    groups: Sequence[RolloutGroup],
    advantage: AdvantageFunction,
    *,
    max_tokens: int,
    oversize: Oversize = "truncate",
    share_prompts: bool = True,
    keep_zero_std: bool = False,
    included: Sequence[Sequence[bool]] | None = None,
) -> PackedGroups:
    """Pack the groups that have signal, two different rewards, into samples of <= max_tokens.

    With `keep_zero_std` groups without signal are packed too. Rollouts of a group share their
    prefix unless `share_prompts` is False. A rollout longer than `max_tokens` is truncated or
    dropped, as `oversize` says. `included` has a flag per group and rollout, False for a rollout
    that a filter removed from the loss; its reward still counts in the advantages of its group.
    None includes all.
    """
    samples, num_truncated, num_dropped = list[PackedSample](), 0, 0
    signal = [index for index, group in enumerate(groups) if keep_zero_std or group.has_signal]
    advantages = advantages_of([groups[index] for index in signal], advantage)
    for index, group_advantages in zip(signal, advantages, strict=True):
        packable = deque[tuple[Rollout, float]]()
        rollouts = groups[index].rollouts
        flags = included[index] if included is not None else [True] * len(rollouts)
        for rollout, value, include in zip(rollouts, group_advantages, flags, strict=True):
            if not include:
                continue
            fitting = rollout
            if too_long := len(rollout.token_ids) > max_tokens:
                fitting = _truncated(rollout, max_tokens if oversize == "truncate" else 0)
            has_target = bool(fitting.loss_mask[1:].any())  # not only the prompt is left
            num_truncated += too_long and has_target
            num_dropped += too_long and not has_target
            if has_target:
                packable.append((fitting, value))
        group = samples[-1].group + 1 if samples else 0
        while packable:
            sender, row_tokens = groups[index].sender, max_tokens if share_prompts else 0
            samples.append(_next_sample(packable, row_tokens, sender=sender, group=group))
    by_group = dict(zip(signal, map(tuple, advantages), strict=True))
    all_advantages = tuple(by_group.get(index, ()) for index in range(len(groups)))
    return PackedGroups(tuple(samples), num_truncated, num_dropped, all_advantages)


def make_batches(
    samples: Sequence[PackedSample],
    *,
    max_tokens: int,
    temperature: Temperature = 1.0,
    device: torch.device | str = "cpu",
    padded: bool = False,
    ranks: Ranks = SINGLE,
) -> list[Batch]:
    """This rank's micro-batches of at most `max_tokens` tokens, by `assign_to_bins`.

    With `padded` each sample is counted with the length of the longest in its micro-batch. Ranks in
    lockstep all need the same number of forward passes, so a rank without a sample in a round gets
    a copy of another rank's sample with mask 0. `device` is that of the tensors.
    """

    def batch_of(indices: Sequence[int]) -> Batch:
        return _to_batch([samples[index] for index in indices], temperature, device)

    sizes, batches = [len(sample.token_ids) for sample in samples], list[Batch]()
    for bins in assign_to_bins(sizes, max_tokens, num_ranks=ranks.world_size, padded=padded):
        if indices := bins[ranks.rank]:
            batches.append(batch_of(indices))
        elif ranks.lockstep:
            filler = batch_of(bins[0][-1:])
            batches.append(replace(filler, mask=torch.zeros_like(filler.mask)))
    return batches


def assign_to_bins(
    sizes: Sequence[int], capacity: int, *, num_ranks: int = 1, padded: bool = False
) -> list[list[list[int]]]:
    """Distribute items of these sizes to rounds; a round has one bin of `capacity` per rank.

    Returns the indices of the items by round and rank. Greedy by decreasing size: an item goes to
    the least loaded rank of the first round in which that rank has room (first-fit-decreasing with
    one rank). With `padded` an item takes as much room as the first item of its bin. Bins of ranks
    other than 0 may be empty.
    """
    rounds, loads = list[list[list[int]]](), list[list[int]]()
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for bins, load in zip(rounds, loads, strict=True):
            rank = load.index(min(load))
            needed = sizes[bins[rank][0]] if padded and bins[rank] else sizes[index]
            if load[rank] + needed <= capacity:
                bins[rank].append(index)
                load[rank] += needed
                break
        else:
            rounds.append([[index], *([] for _ in range(num_ranks - 1))])
            loads.append([sizes[index], *[0] * (num_ranks - 1)])
    return rounds


def _truncated(rollout: Rollout, length: int) -> Rollout:
    names = ("token_ids", "loss_mask", "logprobs", "policy_steps")
    return replace(rollout, **{name: getattr(rollout, name)[:length] for name in names})


def _next_sample(
    packable: deque[tuple[Rollout, float]], max_tokens: int, *, sender: str, group: int
) -> PackedSample:
    """Remove rollouts, with advantages, from the front of `packable` while they fit; pack them.

    A sample has at least one rollout, so `max_tokens` 0 packs each rollout on its own.
    """
    builder, members = TreeBuilder(), list[tuple[Rollout, float]]()
    while packable and builder.add(packable[0][0].token_ids.tolist(), max_tokens=max_tokens):
        members.append(packable.popleft())
    rollouts, advantages = zip(*members, strict=True)
    return PackedSample(
        token_ids=np.array(builder.tokens, np.int32),
        tree=PrefixTree(tuple(builder.spans)),
        positions=tuple(builder.positions),
        rollouts=rollouts,
        advantages=advantages,
        sender=sender,
        group=group,
    )


def _to_batch(
    samples: Sequence[PackedSample], temperature: Temperature, device: torch.device | str
) -> Batch:
    rollouts = list(chain.from_iterable(sample.rollouts for sample in samples))
    advantages = list(chain.from_iterable(sample.advantages for sample in samples))
    # No logits predict a sequence's first token, so it is never scored.
    scored = [1 + np.flatnonzero(rollout.loss_mask[1:]) for rollout in rollouts]
    counts = [len(indices) for indices in scored]
    starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples[:-1])])
    positions = [
        start + indices
        for start, sample in zip(starts, samples, strict=True)
        for indices in sample.positions
    ]

    def tensor(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(arrays)).astype(dtype)).to(device)

    old = tensor((r.logprobs[at] for r, at in zip(rollouts, scored, strict=True)), np.float32)
    steps = np.concatenate([r.policy_steps[at] for r, at in zip(rollouts, scored, strict=True)])
    return Batch(
        token_ids=tensor((sample.token_ids for sample in samples), np.int64),
        trees=tuple(sample.tree for sample in samples),
        scored=tensor((p[at] for p, at in zip(positions, scored, strict=True)), np.int64),
        old_logprobs=old,
        advantages=tensor([np.repeat(advantages, counts)], np.float32),
        mask=torch.ones_like(old),
        sequence=tensor([np.repeat(np.arange(len(rollouts)), counts)], np.int64),
        num_sequences=len(rollouts),
        senders=tuple(sample.sender for sample in samples for _ in sample.rollouts),
        temperatures=tensor([np.array([temperature(step) for step in steps.tolist()])], np.float32)
        if callable(temperature)
        else temperature,
    )
