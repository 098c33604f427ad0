"""From groups to micro-batches: what is packed together, and what each token is worth.

Knows groups and tensors; knows nothing of models or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.learning.advantages import AdvantageFunction, advantages_of
from peralta_zmq.learning.prefix_tree import Int64Array, PrefixTree
from peralta_zmq.learning.ranks import ALONE, Ranks
from peralta_zmq.rollout import Int32Array, PackedSequence, Rollout, RolloutGroup

Temperature = float | Callable[[int], float]  # a constant, or that of a policy step
Oversize = Literal["truncate", "drop"]


@dataclass(frozen=True, slots=True)
class PackedSample:
    """Siblings, or a single rollout: the smallest unit that is packed."""

    token_ids: Int32Array  # [T], each token that siblings have in common once
    segment: PackedSequence
    places: tuple[Int64Array, ...]  # of each rollout, where its tokens are
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...]  # of each rollout
    sender: str = ""  # of their group
    group: int = 0  # its number among those of the step that have a piece

    @property
    def num_tokens(self) -> int:
        """Tokens of a row that it takes."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: segments in a row of M tokens, N of which were generated."""

    token_ids: Tensor  # int64 [M]
    segments: tuple[PackedSequence, ...]  # in the order of the row
    scored: Tensor  # int64 [N], where in the row the generated tokens are; siblings share some
    old_logprobs: Tensor  # float32 [N]
    advantages: Tensor  # float32 [N], the rollout's on each of its tokens
    mask: Tensor  # float32 [N], 1 where a token counts
    sequence: Tensor  # int64 [N], which rollout of this micro-batch
    num_sequences: int
    senders: tuple[str, ...] = ()  # of the rollouts of this micro-batch
    temperatures: Tensor | float = 1.0  # float32 [N], that sampled each token; a number for all
    prox_logprobs: Tensor | None = None  # float32 [N], see tokens
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Pieces of at most so many tokens, and what did not fit into one."""

    pieces: tuple[PackedSample, ...]
    num_truncated: int  # rollouts that lost their end
    num_dropped: int  # rollouts that are not trained
    advantages: tuple[tuple[float, ...], ...]  # of each group's rollouts; none without signal


def cut(
    groups: Sequence[RolloutGroup],
    advantage: AdvantageFunction,
    *,
    max_tokens: int,
    oversize: Oversize = "truncate",
    share_prompts: bool = True,
    keep_zero_std: bool = False,
    stays: Sequence[Sequence[bool]] | None = None,
) -> PackedGroups:
    """Groups with signal as pieces of at most `max_tokens` tokens.

    `keep_zero_std` takes those without signal too. Siblings share what they begin with unless
    `share_prompts` is off. A rollout that is too long loses its end, or is dropped, as `oversize`
    says. `stays` tells of each rollout of each group whether the filters leave it in; it counts in
    the baseline anyhow.
    """
    pieces, counts = list[PackedSample](), {"truncated": 0, "dropped": 0}
    signal = [number for number, group in enumerate(groups) if keep_zero_std or group.has_signal]
    worths = advantages_of([groups[number] for number in signal], advantage)
    for number, worth_of in zip(signal, worths, strict=True):
        kept = list[tuple[Rollout, float]]()
        rollouts = groups[number].rollouts
        stay_of = stays[number] if stays is not None else [True] * len(rollouts)
        for rollout, worth, stay in zip(rollouts, worth_of, stay_of, strict=True):
            if not stay:
                continue  # its tokens would be masked out
            shorter = rollout
            if len(rollout.token_ids) > max_tokens:
                counts["truncated" if oversize == "truncate" else "dropped"] += 1
                shorter = _shortened(rollout, max_tokens if oversize == "truncate" else 0)
            if shorter.loss_mask[1:].any():
                kept.append((shorter, worth))
            elif oversize == "truncate" and shorter is not rollout:  # nothing but prompt is left
                counts["truncated"] -= 1
                counts["dropped"] += 1
        place = pieces[-1].group + 1 if pieces else 0
        cut_up = _pieces(kept, max_tokens if share_prompts else 0)
        pieces += [replace(each, sender=groups[number].sender, group=place) for each in cut_up]
    told = dict(zip(signal, map(tuple, worths), strict=True))
    advantages = tuple(told.get(number, ()) for number in range(len(groups)))
    return PackedGroups(tuple(pieces), counts["truncated"], counts["dropped"], advantages)


def make_batches(
    pieces: Sequence[PackedSample],
    *,
    max_tokens: int,
    temperature: Temperature = 1.0,
    device: torch.device | str = "cpu",
    padded: bool = False,
    ranks: Ranks = ALONE,
) -> list[Batch]:
    """This rank's micro-batches of at most `max_tokens` tokens, as `deal` deals them.

    With `padded` every piece counts as much as the longest of its micro-batch. Ranks that are
    lined up get one of each round; for one that is left over it has no token that counts.
    """

    def packed(chosen: Sequence[int]) -> Batch:
        return _packed([pieces[each] for each in chosen], temperature, device)

    sizes, batches = [piece.num_tokens for piece in pieces], list[Batch]()
    for bins in deal(sizes, max_tokens, num_ranks=ranks.count, padded=padded):
        if chosen := bins[ranks.number]:
            batches.append(packed(chosen))
        elif ranks.lined_up:
            batches.append(masked_out(packed(bins[0][-1:])))
    return batches


def deal(
    sizes: Sequence[int], capacity: int, *, num_ranks: int = 1, padded: bool = False
) -> list[list[list[int]]]:
    """Indices of `sizes` in rounds of one bin of `capacity` for each rank.

    The largest first, each to the least loaded rank of the first round that has room there; with
    one rank that is first-fit-decreasing. With `padded` each takes as much as the first of its
    bin. A rank's bin is empty when a round has fewer pieces than ranks; rank 0's never is.
    """
    rounds, loads = list[list[list[int]]](), list[list[int]]()
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
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


def masked_out(batch: Batch) -> Batch:
    """The same tokens, none of which counts: work for a rank that has none."""
    return replace(batch, mask=torch.zeros_like(batch.mask))


def _shortened(rollout: Rollout, length: int) -> Rollout:
    return replace(
        rollout,
        token_ids=rollout.token_ids[:length],
        loss_mask=rollout.loss_mask[:length],
        logprobs=rollout.logprobs[:length],
        policy_steps=rollout.policy_steps[:length],
    )


def _pieces(kept: Sequence[tuple[Rollout, float]], max_tokens: int) -> Iterator[PackedSample]:
    """Rollouts together as long as they fit into `max_tokens`, each alone when none does."""
    tree, members = PrefixTree(), list[tuple[Rollout, float]]()
    for rollout, worth in kept:
        tokens = rollout.token_ids.tolist()
        if members and tree.num_tokens + tree.num_new(tokens) > max_tokens:
            yield _piece(tree, members)
            tree, members = PrefixTree(), []
        tree.add(tokens)
        members.append((rollout, worth))
    if members:
        yield _piece(tree, members)


def _piece(tree: PrefixTree, members: Sequence[tuple[Rollout, float]]) -> PackedSample:
    rollouts, advantages = zip(*members, strict=True)
    return PackedSample(tree.token_ids, tree.segment, tuple(tree.places), rollouts, advantages)


def _packed(
    pieces: Sequence[PackedSample], temperature: Temperature, device: torch.device | str
) -> Batch:
    rollouts = list(chain.from_iterable(piece.rollouts for piece in pieces))
    worth = list(chain.from_iterable(piece.advantages for piece in pieces))
    scored = [_scored(rollout) for rollout in rollouts]
    counts = [len(each) for each in scored]
    starts = np.cumsum([0, *(piece.num_tokens for piece in pieces[:-1])])
    places = [
        start + each for start, piece in zip(starts, pieces, strict=True) for each in piece.places
    ]

    def tensor(arrays: Iterable[np.ndarray], kind: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(arrays)).astype(kind)).to(device)

    old = tensor((r.logprobs[at] for r, at in zip(rollouts, scored, strict=True)), np.float32)
    steps = np.concatenate([r.policy_steps[at] for r, at in zip(rollouts, scored, strict=True)])
    return Batch(
        token_ids=tensor((piece.token_ids for piece in pieces), np.int64),
        segments=tuple(piece.segment for piece in pieces),
        scored=tensor((p[at] for p, at in zip(places, scored, strict=True)), np.int64),
        old_logprobs=old,
        advantages=tensor([np.repeat(worth, counts)], np.float32),
        mask=torch.ones_like(old),
        sequence=tensor([np.repeat(np.arange(len(rollouts)), counts)], np.int64),
        num_sequences=len(rollouts),
        senders=tuple(piece.sender for piece in pieces for _ in piece.rollouts),
        temperatures=tensor([np.array([temperature(step) for step in steps.tolist()])], np.float32)
        if callable(temperature)
        else temperature,
    )


def _scored(rollout: Rollout) -> np.ndarray:
    """Where the generated tokens are, but for a first token, which nothing predicts."""
    return 1 + np.flatnonzero(rollout.loss_mask[1:])
