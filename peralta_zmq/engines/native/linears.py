"""Weights packed for the machine, and replaced in place. Knows modules and tensors.

oneDNN multiplies a weight that lies in its own order 1.5-2 times as fast as a plain one. The two
operators are private to torch, so we try them before we use them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from peralta_zmq import policy

ROWS = 32  # the order is chosen for about so many rows at once


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's order only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self._dtype = linear.weight.dtype
        self.load(linear.weight)

    def load(self, weight: Tensor) -> None:
        """Pack `weight` [out, in] in the place of the old one."""
        self._packed = _pack(weight.detach().to(self._dtype))

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return _multiply(rows, self._packed, self.bias)


class Weights:
    """The weights of a model by name, wherever they lie."""

    def __init__(self, model: policy.Model, *, pack: bool) -> None:
        live = policy.weights_of(model)
        self._shapes = {name: tensor.shape for name, tensor in live.items()}
        self._plain = dict(live)
        self._packed: dict[str, list[PackedLinear]] = {}
        if pack and model.device.type == "cpu" and can_pack(model.dtype):
            self._pack(model)

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Copy all of them or none: ValueError says why. One tensor more memory, no second
        model."""
        policy.check_weights(self._shapes, weights)
        with torch.no_grad():
            for name in self._shapes:
                weight = weights[name]
                if name in self._plain:
                    self._plain[name].copy_(weight)
                for linear in self._packed.get(name, []):
                    linear.load(weight)

    def _pack(self, model: policy.Model) -> None:
        names = {tensor.data_ptr(): name for name, tensor in self._plain.items()}
        used_elsewhere = {
            each.weight.data_ptr() for each in model.modules() if isinstance(each, nn.Embedding)
        }
        for parent in list(model.modules()):
            for leaf, child in list(parent.named_children()):
                if type(child) is not nn.Linear:
                    continue
                address = child.weight.data_ptr()
                packed = PackedLinear(child)
                self._packed.setdefault(names[address], []).append(packed)
                setattr(parent, leaf, packed)
                if address not in used_elsewhere:  # a tied head keeps the embedding's plain form
                    self._plain.pop(names[address], None)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build packs weights of `dtype` and then multiplies like a plain linear."""
    weight = torch.linspace(-1, 1, 64 * 48).reshape(64, 48).to(dtype)
    rows = torch.linspace(-1, 1, 4 * 48).reshape(4, 48).to(dtype)
    bias = torch.ones(64, dtype=dtype)
    try:
        ours = _multiply(rows, _pack(weight), bias)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    plain = torch.nn.functional.linear(rows, weight, bias)
    return torch.allclose(ours, plain, rtol=0.02 if dtype != torch.float32 else 1e-5, atol=1e-4)


def _pack(weight: Tensor) -> Tensor:
    operators = cast(Any, torch.ops.mkldnn)
    return operators._reorder_linear_weight(weight, ROWS)


def _multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    operators = cast(Any, torch.ops.mkldnn)
    return operators._linear_pointwise(rows, packed, bias, "none", [], "")
