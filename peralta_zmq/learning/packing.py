"""Packing of rollout groups into micro-batches; shared prefixes are stored once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.learning.advantages import Advantage, token_advantages
from peralta_zmq.learning.distributed import SINGLE, Ranks
from peralta_zmq.rollout import Int32Array, Int64Array, PrefixTree, Rollout, RolloutGroup, TreeSpan

MIN_SHARED = 16  # tokens at the beginning of all samples that are worth a tree of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    max_tokens: int  # tokens of a micro-batch; of a longer rollout, the beginning is packed
    share_prompts: bool = True
    """False for a model that cannot compute a shared prefix once: each rollout is then a sample of
    its own, and the model pads the samples of a micro-batch to the longest."""
    temperature: float = 1.0  # sampling temperature of the generators
    temperatures: Mapping[str, float] = field(default_factory=dict[str, float])
    """By label of the environment (RolloutGroup.task), instead of `temperature`."""


@dataclass(frozen=True, slots=True)
class PackedSample:
    """Rollouts of one group, merged into a prefix tree."""

    token_ids: Int32Array  # [T], each shared prefix once
    tree: PrefixTree  # for each span of tokens, which token it continues
    positions: tuple[Int64Array, ...]  # per rollout, indices of its tokens in token_ids
    rollouts: tuple[Rollout, ...]
    advantages: tuple[Advantage, ...]  # per rollout
    name: str  # name of the group
    task: str  # label of the group's environment
    group: int  # index of the group among the groups of the step that have samples


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch: prefix trees in a row of M tokens; N tokens are in the loss."""

    token_ids: Tensor  # int64 [M]
    trees: tuple[PrefixTree, ...]  # in the order of the row
    scored: Tensor  # int64 [N], indices in the row of the generated tokens; repeated if shared
    old_logprobs: Tensor  # float32 [N]
    advantages: Tensor  # float32 [N], advantage of the token's rollout or turn
    mask: Tensor  # float32 [N], 1; 0 in a filler (see make_micro_batches)
    sequence: Tensor  # int64 [N], index of the token's rollout in this micro-batch
    num_sequences: int  # rollouts in this micro-batch
    groups: tuple[str, ...]  # per rollout, name of its group
    temperatures: Tensor | float = 1.0  # float32 [N], or one number for all tokens
    prox_logprobs: Tensor | None = None  # float32 [N], of the policy before the step's first update
    ref_logprobs: Tensor | None = None  # float32 [N], of the reference model
    teacher_logprobs: Tensor | None = None  # float32 [N], of the teacher model
    selected: Tensor | None = None  # bool [N], False for tokens that selection.py leaves out


class TreeBuilder:
    """Builds a prefix tree from sequences; shared prefixes are stored once."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of the tree
        self.spans: list[TreeSpan] = []
        self.positions: list[Int64Array] = []  # per sequence, indices of its tokens in `tokens`
        self._next: dict[tuple[int, int], int] = {}  # (index, next token id) -> next index

    def add(self, sequence: Sequence[int], *, max_tokens: int) -> bool:
        """Append the part of the sequence after its longest prefix in the tree.

        Returns False, with nothing changed, if the tree would grow beyond `max_tokens` tokens. The
        first sequence is added at any length.
        """
        prefix = list[int]()
        last = -1
        start = len(self.tokens)
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
    advantages: Sequence[Sequence[Advantage]],
    packing: Packing,
    *,
    included: Sequence[Sequence[bool]] | None = None,
    first_group: int = 0,
) -> tuple[list[PackedSample], dict[str, int]]:
    """Pack the rollouts of each group into samples of at most max_tokens tokens.

    `advantages` and `included` (None: all) have one value per rollout for each group; a group with
    an empty list is left out. `PackedSample.group` counts from `first_group`. Also returns metrics:
    rollouts longer than max_tokens whose end was cut off (num_truncated) or whose prompt was too
    long (num_dropped); tokens in the loss, and generated in groups without any advantage.
    """
    samples = list[PackedSample]()
    num_truncated = 0
    num_dropped = 0
    max_shared = packing.max_tokens if packing.share_prompts else 0
    for index, (group, values) in enumerate(zip(groups, advantages, strict=True)):
        packable = deque[tuple[Rollout, Advantage]]()
        flags = included[index] if included is not None else [True] * len(values)
        for rollout, value, include in zip(group.rollouts, values, flags, strict=False):
            if not include:
                continue
            too_long = len(rollout.token_ids) > packing.max_tokens
            fitting = _truncated(rollout, packing.max_tokens) if too_long else rollout
            has_target = bool(fitting.loss_mask[1:].any())  # False if only the prompt is left
            num_truncated += too_long and has_target
            num_dropped += too_long and not has_target
            if has_target:
                packable.append((fitting, value))
        number = samples[-1].group + 1 if samples else first_group
        while packable:
            samples.append(
                _next_sample(packable, max_shared, name=group.name, task=group.task, group=number)
            )
    packed = [rollout for sample in samples for rollout in sample.rollouts]
    return samples, {
        "num_truncated": num_truncated,
        "num_dropped": num_dropped,
        "num_loss_tokens": sum(int(rollout.loss_mask[1:].sum()) for rollout in packed),
        "num_no_signal_tokens": sum(
            rollout.num_generated
            for group, values in zip(groups, advantages, strict=True)
            if not any(map(np.any, values))
            for rollout in group.rollouts
        ),
    }


def make_micro_batches(
    samples: Sequence[PackedSample],
    packing: Packing,
    *,
    device: torch.device | str = "cpu",
    ranks: Ranks = SINGLE,
) -> list[MicroBatch]:
    """Pack samples into this rank's micro-batches of at most max_tokens tokens.

    Without share_prompts each sample counts as long as the longest of its micro-batch (padding).
    Ranks in lockstep must all run the same number of forward passes, so a rank without a sample in
    a round gets a filler: a copy of another rank's sample with mask 0.
    """
    sizes = [len(sample.token_ids) for sample in samples]
    batches = list[MicroBatch]()
    rounds = assign_to_bins(
        sizes, packing.max_tokens, num_ranks=ranks.world_size, padded=not packing.share_prompts
    )
    for bins in rounds:
        indices = bins[ranks.rank]
        if indices or ranks.lockstep:
            chosen = [samples[index] for index in indices or bins[0][-1:]]
            batch = to_micro_batch(chosen, packing, device)
            batches.append(batch if indices else replace(batch, mask=torch.zeros_like(batch.mask)))
    return batches


def full_micro_batch(samples: Sequence[PackedSample], packing: Packing) -> list[int]:
    """Samples of the fullest micro-batch of one rank, by index; empty if one holds all samples."""
    sizes = [len(sample.token_ids) for sample in samples]
    padded = not packing.share_prompts
    rounds = assign_to_bins(sizes, packing.max_tokens, padded=padded)
    if len(rounds) < 2:
        return []

    def load(indices: Sequence[int]) -> int:
        members = [sizes[index] for index in indices]
        return max(members) * len(members) if padded else sum(members)

    return max((bins[0] for bins in rounds), key=load)


def assign_to_bins(
    sizes: Sequence[int], capacity: int, *, num_ranks: int = 1, padded: bool = False
) -> list[list[list[int]]]:
    """Distribute items to rounds; a round has one bin of `capacity` per rank.

    Returns item indices as result[round][rank]. Greedy by decreasing size: an item goes to the
    least loaded rank of the first round in which this rank has room. With `padded` it takes as much
    room as the first, largest item of its bin. Only bins of ranks other than 0 may be empty.
    """
    rounds = list[list[list[int]]]()
    loads = list[list[int]]()
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
    packable: deque[tuple[Rollout, Advantage]], max_tokens: int, *, name: str, task: str, group: int
) -> PackedSample:
    """Pack as many rollouts as fit, at least one; removes them from the front of `packable`."""
    builder = TreeBuilder()
    members = list[tuple[Rollout, Advantage]]()
    while packable and builder.add(packable[0][0].token_ids.tolist(), max_tokens=max_tokens):
        members.append(packable.popleft())
    rollouts, advantages = zip(*members, strict=True)
    return PackedSample(
        token_ids=np.array(builder.tokens, np.int32),
        tree=PrefixTree(tuple(builder.spans)),
        positions=tuple(builder.positions),
        rollouts=rollouts,
        advantages=advantages,
        name=name,
        task=task,
        group=group,
    )


def to_micro_batch(
    samples: Sequence[PackedSample], packing: Packing, device: torch.device | str
) -> MicroBatch:
    """Lay the trees of the samples one after the other in a row of tokens, on the device.

    A beginning that all of them share, such as a system prompt, is a tree of its own before them.
    """
    shared = _num_shared(samples) if packing.share_prompts else 0
    rollouts = list(chain.from_iterable(sample.rollouts for sample in samples))
    advantages = list(chain.from_iterable(sample.advantages for sample in samples))
    # Indices of the scored tokens in each rollout. No logits predict a rollout's first token.
    targets = [1 + np.flatnonzero(rollout.loss_mask[1:]) for rollout in rollouts]
    counts = [len(indices) for indices in targets]
    # The row without the shared tokens of the samples but the first.
    starts = np.cumsum([0, *(len(sample.token_ids) - shared for sample in samples[:-1])])
    positions = [
        np.where(indices < shared, indices, start + indices)
        for start, sample in zip(starts, samples, strict=True)
        for indices in sample.positions
    ]
    trees = [_without_beginning(sample.tree, shared) for sample in samples]

    def tensor(arrays: Iterable[np.ndarray], dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(arrays)).astype(dtype)).to(device)

    old_logprobs = tensor(
        (r.logprobs[at] for r, at in zip(rollouts, targets, strict=True)), np.float32
    )
    temperatures = [
        packing.temperatures.get(sample.task, packing.temperature)
        for sample in samples
        for _ in sample.rollouts
    ]
    return MicroBatch(
        token_ids=tensor(
            [samples[0].token_ids[:shared], *(each.token_ids[shared:] for each in samples)],
            np.int64,
        ),
        trees=(PrefixTree((TreeSpan(-1, shared),)), *trees) if shared else tuple(trees),
        scored=tensor((p[at] for p, at in zip(positions, targets, strict=True)), np.int64),
        old_logprobs=old_logprobs,
        advantages=tensor(
            (
                token_advantages(rollout, value)[at]
                for rollout, value, at in zip(rollouts, advantages, targets, strict=True)
            ),
            np.float32,
        ),
        mask=torch.ones_like(old_logprobs),
        sequence=tensor([np.repeat(np.arange(len(rollouts)), counts)], np.int64),
        num_sequences=len(rollouts),
        groups=tuple(sample.name for sample in samples for _ in sample.rollouts),
        temperatures=temperatures[0]
        if len({*temperatures}) == 1
        else tensor([np.repeat(temperatures, counts)], np.float32),
    )


def _num_shared(samples: Sequence[PackedSample]) -> int:
    """Number of tokens with which all sequences of all samples begin; 0 if they are few."""
    if len(samples) < 2:
        return 0
    limits = [
        min([sample.tree.spans[0].length - 1, *(parent + 1 for parent, _ in sample.tree.spans[1:])])
        for sample in samples
    ]
    beginnings = [sample.token_ids[: min(limits)] for sample in samples]
    is_same = np.all([each == beginnings[0] for each in beginnings], axis=0)
    num_shared = int(np.argmin([*is_same, False]))
    return num_shared if num_shared >= MIN_SHARED else 0


def _without_beginning(tree: PrefixTree, num_tokens: int) -> PrefixTree:
    """The tree after its first tokens, which its sequences share."""
    (_, length), *others = tree.spans
    moved = [TreeSpan(parent - num_tokens, size) for parent, size in others]
    return PrefixTree((TreeSpan(-1, length - num_tokens), *moved), after=num_tokens)
