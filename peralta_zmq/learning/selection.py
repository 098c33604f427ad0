"""Selection of the tokens that a step trains, by bounds that depend on all of its tokens.

They are computed after a forward pass over the whole step on all ranks, before its first update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.learning.distributed import SINGLE, Ranks
from peralta_zmq.learning.packing import MicroBatch
from peralta_zmq.learning.reference_models import ComputeLogprobsAndEntropy


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSelection:
    """Selects tokens by the policy's entropies and logprobs before the step."""

    compute: ComputeLogprobsAndEntropy  # the policy's forward pass
    top_entropy_quantile: float = 1.0  # 1 = off
    m2_threshold: float | None = None  # None = off

    @torch.no_grad()
    def __call__(
        self, batches: Sequence[MicroBatch], ranks: Ranks = SINGLE
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """Set `selected` and `prox_logprobs` of each batch; metrics: shares left out."""
        prox = list[Tensor]()
        entropies = list[Tensor]()
        squares = list[Tensor]()
        for batch in batches:
            logprobs, entropy = self.compute(
                batch.token_ids, batch.trees, batch.scored, temperature=batch.temperatures
            )
            prox.append(logprobs)
            entropies.append(entropy.cpu().double())  # some devices have no float64
            squares.append((logprobs - batch.old_logprobs).cpu().double().square())
        is_token = [batch.mask.cpu() > 0 for batch in batches]
        kept = is_token
        metrics = dict[str, float]()
        if self.top_entropy_quantile < 1.0:
            every = _of_step(entropies, is_token, ranks)
            bound = entropy_bound(every, self.top_entropy_quantile)
            metrics["masked/entropy"] = _share(every < bound)
            kept = [flags & (each >= bound) for flags, each in zip(kept, entropies, strict=True)]
        if self.m2_threshold is not None:
            every = _of_step(squares, is_token, ranks)
            bound = second_moment_bound(every, self.m2_threshold)
            metrics["masked/m2"] = _share(every >= bound)
            kept = [flags & (each < bound) for flags, each in zip(kept, squares, strict=True)]
        selected = [
            replace(batch, selected=flags.to(batch.mask.device), prox_logprobs=logprobs)
            for batch, flags, logprobs in zip(batches, kept, prox, strict=True)
        ]
        return selected, metrics


def entropy_bound(entropies: Tensor, top_quantile: float) -> float:
    """The lowest entropy to keep: quantile 1 - top_quantile, as in TRL (arXiv 2506.01939)."""
    return float(np.quantile(entropies.numpy(), 1 - top_quantile)) if len(entropies) else 0.0


def second_moment_bound(squares: Tensor, threshold: float) -> float:
    """The lowest square to leave out, so that the mean of the lower ones is below `threshold`.

    `squares` [N] are those of the log ratios of all tokens. Leaves out as few tokens as possible
    (M2PO, arXiv 2510.01161, as in AReaL).
    """
    ascending = squares.sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
    num_kept = int((means < threshold).sum())  # the means ascend, too
    return float(ascending[num_kept]) if num_kept < len(ascending) else math.inf


def _of_step(values: Sequence[Tensor], is_token: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """The values [N] of all unmasked tokens of the step, on all ranks."""
    own = [each[flags] for each, flags in zip(values, is_token, strict=True)]
    return ranks.all_gather(torch.cat([torch.empty(0, dtype=torch.float64), *own]))


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else 0.0
