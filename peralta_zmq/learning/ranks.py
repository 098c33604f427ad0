"""The processes that take one step together, and what they ask of each other.

Knows what a step adds up; knows nothing of how processes speak (`learning.distributed` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Module = TypeVar("Module", bound=torch.nn.Module)


class Ranks(Protocol):
    """The ranks of a trainer, as one of them sees them; every rank makes the same calls.

    `number` counts from 0 to `count` - 1. With `lined_up` every rank needs as many forward and
    backward passes as the others, because they compute with each other's parameters.
    """

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def lined_up(self) -> bool: ...

    def prepared(self, model: Module) -> Module:
        """What to train in the place of `model`, with rank 0's weights."""
        ...

    def add_up(self, tensor: Tensor) -> None:
        """Put the sum over all ranks into `tensor`."""
        ...

    def merged(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The sum over all ranks of each named number; ranks may know different names."""
        ...

    def add_up_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Make the gradient of each parameter the sum over all ranks."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor of which each rank may hold a part."""
        ...

    def collected(self, tensor: Tensor) -> Tensor:
        """The whole of it for rank 0; the others give their part and get an empty one."""
        ...

    def own_part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Of a whole tensor what this rank holds, laid out like `like`."""
        ...


class OneRank:
    """A trainer that is one process."""

    number, count, lined_up = 0, 1, False

    def prepared(self, model: Module) -> Module:
        """The model itself."""
        return model

    def add_up(self, tensor: Tensor) -> None:
        """It is the sum already."""

    def merged(self, sums: Mapping[str, float]) -> dict[str, float]:
        """They are the sums already."""
        return dict(sums)

    def add_up_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """They are the sums already."""

    def whole(self, tensor: Tensor) -> Tensor:
        """It is whole already."""
        return tensor

    def collected(self, tensor: Tensor) -> Tensor:
        """It is whole already."""
        return tensor

    def own_part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """All of it."""
        return tensor.to(like.device)


ALONE = OneRank()
