"""fp32 master weights of parameters that hold the weights as they are published.

The policy computes with the published weights, which are rounded to bfloat16 or float16, so the
weights that are trained are those that sample. The optimizer updates the masters.

A master is stored as a remainder: the difference of its bits, as an integer, to those of the
published weight in fp32. The remainder of a weight rounded to bfloat16 fits into 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from peralta_zmq.learning.distributed import Ranks, full_tensor, local_tensor, shard_tensor

# Masters of published weights, by the name of their tensor.
MakeMasters: TypeAlias = Callable[[str, Tensor], Tensor]
# Dtype of the remainders. Numbers of float16 near 0 are so coarse that 16 bits are not enough.
REMAINDERS = {torch.bfloat16: torch.int16, torch.float16: torch.int32}
NUM_SAMPLED = 512  # elements per parameter that estimate the `movement` in each step


class MasterWeights:
    """The masters of `parameters`, which are rounded in place to `dtype`, that of publication.

    `make_masters` returns the first masters of the weights of a parameter, which round to these
    weights. Without it, or if `dtype` has 32 bits, the parameters themselves are the masters.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        dtype: torch.dtype,
        *,
        make_masters: MakeMasters | None,
    ) -> None:
        self._parameters = parameters
        self._dtype = dtype
        self.remainders: dict[str, Tensor] = {}
        """Per parameter, by name; of its shape and sharding."""
        if make_masters is not None and dtype in REMAINDERS:
            for name, parameter in parameters.items():
                full = full_tensor(parameter.detach())
                masters = make_masters(name, full)
                rounded, remainders = split_masters(masters, dtype)
                is_kept = (rounded == full.to(dtype).float()) | full.isnan()
                assert is_kept.all(), f"masters of {name} round to other weights"
                self.remainders[name] = shard_tensor(remainders, parameter.detach())
                parameter.detach().copy_(shard_tensor(rounded, parameter.detach()))
        random = torch.Generator().manual_seed(0)
        # Indices of elements in this rank's part, which estimate the `movement`.
        self._sampled: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if size := local_tensor(parameter).numel():
                indices = torch.randint(size, (NUM_SAMPLED,), generator=random)
                self._sampled[name] = indices.to(parameter.device)
        self._start = self._sample()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let each step of `optimizer` update the masters; the parameters are rounded after it."""

        def before(*_: object) -> None:
            self.join()

        def after(*_: object) -> None:
            self.split()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    @torch.no_grad()
    def join(self) -> None:
        """Set the parameters to the masters, for an update by an optimizer."""
        for weights, remainders in self._parts():
            weights.view(torch.int32).add_(remainders)

    @torch.no_grad()
    def split(self) -> None:
        """Set the parameters to the rounded masters again."""
        for weights, remainders in self._parts():
            rounded, new_remainders = split_masters(weights, self._dtype)
            remainders.copy_(new_remainders)
            weights.copy_(rounded)

    def movement(self, ranks: Ranks) -> dict[str, float]:
        """How far the published weights have followed the masters since the base model.

        With the moves p of published weights and m of masters: weights/moved is p.m / m.m, the
        share of the masters' move that is published; weights/moved_cosine and weights/moved_length
        are p.m / |p||m| and |p| / |m|. Empty before the masters move. Every rank must call it.
        """
        moves, published_moves = (self._sample() - self._start).double()
        products = (moves * moves, moves * published_moves, published_moves * published_moves)
        sizes = [local_tensor(self._parameters[name]).numel() for name in self._sampled]
        sums = torch.stack(products).sum(-1).cpu() @ torch.tensor(sizes, dtype=torch.float64)
        ranks.all_reduce(sums)
        square, product, published_square = sums.tolist()
        if not square:
            return {}
        length = (published_square / square) ** 0.5
        share = product / square
        return {
            "weights/moved": share,
            "weights/moved_cosine": share / length if length else 0.0,
            "weights/moved_length": length,
        }

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the parameters and their remainders, in parts that fit into a cache."""
        part = 1 << 16  # elements
        for name, remainders in self.remainders.items():
            weights = torch.atleast_1d(local_tensor(self._parameters[name].detach()))
            num_rows = max(1, part * len(weights) // max(1, weights.numel()))
            parts = torch.atleast_1d(local_tensor(remainders)).split(num_rows)
            yield from zip(weights.split(num_rows), parts, strict=True)

    @torch.no_grad()
    def _sample(self) -> Tensor:
        """Masters and published weights of the sampled elements: 2 x parameters x elements."""
        device = next(iter(self._parameters.values())).device
        masters = torch.empty(len(self._sampled), NUM_SAMPLED, device=device)
        remainders = torch.zeros(masters.shape, dtype=torch.int32, device=device)
        for row, (name, indices) in enumerate(self._sampled.items()):
            masters[row] = local_tensor(self._parameters[name].detach()).take(indices)
            if name in self.remainders:
                remainders[row] = local_tensor(self.remainders[name]).take(indices)
        masters.view(torch.int32).add_(remainders)
        return torch.stack((masters, masters.to(self._dtype).float()))


def split_masters(masters: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weights that fp32 masters round to in `dtype`, as fp32, and the remainders."""
    rounded = masters.to(dtype).float()
    remainders = masters.view(torch.int32) - rounded.view(torch.int32)
    kind = REMAINDERS[dtype]
    if kind == torch.int16:  # a master in the middle of its interval has 2**15: take the one below
        remainders.clamp_(max=(1 << 15) - 1)
    return rounded, remainders.to(kind)


def join_masters(weights: Tensor, remainders: Tensor) -> Tensor:
    """The fp32 masters: the inverse of `split_masters`."""
    return (weights.view(torch.int32) + remainders).view(torch.float32)
