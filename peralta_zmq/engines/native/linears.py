"""Weights packed for the machine, and replaced in place. Knows modules and tensors.

What multiplies them is chosen in gemm.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from peralta_zmq import models
from peralta_zmq.engines.native.kernels.gemm import can_pack, pack

SAME_ROWS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # in all families served


class Product:
    """Linear layers over the same rows, as one weight that lies in its packed order only.

    A wide product reads its weight faster than three narrow ones, and is one call.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], names: Sequence[str], biases: Sequence[str] = ()
    ) -> None:
        self.names, self.biases = names, biases  # of the weights; one for each layer, or none
        self._sizes = [each.out_features for each in linears]
        self._dtype = linears[0].weight.dtype
        self._rows: Tensor | None = None  # multiplied last
        self._parts: tuple[Tensor, ...] = ()
        self.load([each.weight for each in linears], _biases_of(linears))

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Pack `weights`, each [out, in], and take `biases`, each [out], for the old ones."""
        self._packed = pack(self._together(weights))
        self._bias = self._together(biases).clone() if biases else None  # not the caller's memory
        self._rows = None

    def own(self, weights: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What `load` takes, of all weights by name."""
        return [weights[name] for name in self.names], [weights[name] for name in self.biases]

    def part(self, number: int, rows: Tensor) -> Tensor:
        """What layer `number` makes of `rows`. The parts are kept until the last is asked for, as
        callers ask in order."""
        if len(self._sizes) == 1:
            return self._packed.multiply(rows, self._bias)
        if rows is not self._rows:
            self._rows = rows
            self._parts = self._packed.multiply(rows, self._bias).split(self._sizes, -1)
        part = self._parts[number]
        if number == len(self._sizes) - 1:
            self._rows, self._parts = None, ()
        return part

    def _together(self, tensors: Sequence[Tensor]) -> Tensor:
        plain = [each.detach().to(self._dtype) for each in tensors]
        return torch.cat(plain) if len(plain) > 1 else plain[0]


class PackedLinear(nn.Module):
    """One layer of a Product."""

    def __init__(self, product: Product, number: int) -> None:
        super().__init__()
        self._product, self._number = product, number

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self._product.part(self._number, rows)


class Weights:
    """The weights of a model by name, wherever they lie."""

    def __init__(self, model: models.Model, *, pack: bool) -> None:
        live = models.weights_of(model)
        self._shapes = {name: tensor.shape for name, tensor in live.items()}
        self._plain = dict(live)
        self._products: list[Product] = []
        if pack and model.device.type == "cpu" and can_pack(model.dtype):
            self._pack(model)

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Copy all of them or none: ValueError says why. One product more memory, no second
        model."""
        models.check_weights(self._shapes, weights)
        with torch.no_grad():
            for name, plain in self._plain.items():
                plain.copy_(weights[name])
            for product in self._products:
                product.load(*product.own(weights))

    def _pack(self, model: models.Model) -> None:
        names = {tensor.data_ptr(): name for name, tensor in self._plain.items()}
        used_elsewhere = {
            each.weight.data_ptr() for each in model.modules() if isinstance(each, nn.Embedding)
        }
        for parent in list(model.modules()):
            for leaves in _together(parent):
                linears = [cast(nn.Linear, getattr(parent, leaf)) for leaf in leaves]
                addresses = [each.weight.data_ptr() for each in linears]
                biases = [names[each.data_ptr()] for each in _biases_of(linears)]
                product = Product(linears, [names[each] for each in addresses], biases)
                for name in biases:
                    del self._plain[name]
                self._products.append(product)
                for number, (leaf, address) in enumerate(zip(leaves, addresses, strict=True)):
                    setattr(parent, leaf, PackedLinear(product, number))
                    if address not in used_elsewhere:  # a tied head keeps its plain form
                        self._plain.pop(names[address], None)


def _together(parent: nn.Module) -> Iterator[tuple[str, ...]]:
    """The names of the linear layers of `parent`, those together that multiply the same rows."""
    linears = {leaf: each for leaf, each in parent.named_children() if type(each) is nn.Linear}
    for leaves in SAME_ROWS:
        found = [linears[leaf] for leaf in leaves if leaf in linears]
        if len(found) == len(leaves) and len(_biases_of(found)) in (0, len(found)):
            yield leaves
            linears = {leaf: each for leaf, each in linears.items() if leaf not in leaves}
    yield from ((leaf,) for leaf in linears)


def _biases_of(linears: Sequence[nn.Linear]) -> list[Tensor]:
    biases = cast("list[Tensor | None]", [each.bias for each in linears])
    return [each for each in biases if each is not None]
