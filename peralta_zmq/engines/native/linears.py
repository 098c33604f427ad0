"""Linear layers with weights packed for this machine, replaced in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from peralta_zmq import models
from peralta_zmq.engines.native.kernels.gemm import can_pack, pack

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers with the same input


class FusedLinear:
    """Linear layers with the same input as one weight, stored in packed order only.

    One wide matmul reads its weight faster than three narrow ones.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], names: Sequence[str], biases: Sequence[str] = ()
    ) -> None:
        self.names, self.biases = names, biases  # of the weights; one bias per layer, or none
        self._sizes = [linear.out_features for linear in linears]
        self._dtype = linears[0].weight.dtype
        self._input: Tensor | None = None  # of the latest matmul
        self._outputs: tuple[Tensor, ...] = ()
        self._pack([linear.weight for linear in linears], _biases_of(linears))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replace weights [out, in] and biases [out] by those of the same names."""
        self._pack([weights[name] for name in self.names], [weights[name] for name in self.biases])

    def output(self, index: int, rows: Tensor) -> Tensor:
        """The output of layer `index`. All outputs are computed together and kept until the last
        one is read: callers read them in order.
        """
        if len(self._sizes) == 1:
            return self._packed.multiply(rows, self._bias)
        if rows is not self._input:
            self._input = rows
            self._outputs = self._packed.multiply(rows, self._bias).split(self._sizes, -1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output

    def _pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self._packed = pack(self._concatenated(weights))
        self._bias = self._concatenated(biases).clone() if biases else None  # owned memory
        self._input = None

    def _concatenated(self, tensors: Sequence[Tensor]) -> Tensor:
        plain = [tensor.detach().to(self._dtype) for tensor in tensors]
        return torch.cat(plain) if len(plain) > 1 else plain[0]


class PackedLinear(nn.Module):
    """One layer of a FusedLinear."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self._fused, self._index = fused, index

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self._fused.output(self._index, rows)


class ModelWeights:
    """The weights of a model by name, packed or plain."""

    def __init__(self, model: models.Model, *, pack: bool) -> None:
        weights = models.weights_of(model)
        self._shapes = {name: tensor.shape for name, tensor in weights.items()}
        self._plain = dict(weights)
        self._fused: list[FusedLinear] = []
        if pack and model.device.type == "cpu" and can_pack(model.dtype):
            self._pack(model)

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Copy all weights or none: raises ValueError. Needs memory for one more fused weight."""
        models.check_weights(self._shapes, weights)
        with torch.no_grad():
            for name, plain in self._plain.items():
                plain.copy_(weights[name])
            for fused in self._fused:
                fused.load(weights)

    def _pack(self, model: models.Model) -> None:
        names = {tensor.data_ptr(): name for name, tensor in self._plain.items()}
        embeddings = {
            module.weight.data_ptr()
            for module in model.modules() if isinstance(module, nn.Embedding)
        }  # fmt: skip
        for parent in list(model.modules()):
            for leaves in _fused_names(parent):
                linears = [cast(nn.Linear, getattr(parent, leaf)) for leaf in leaves]
                addresses = [linear.weight.data_ptr() for linear in linears]
                biases = [names[bias.data_ptr()] for bias in _biases_of(linears)]
                fused = FusedLinear(linears, [names[address] for address in addresses], biases)
                for name in biases:
                    del self._plain[name]
                self._fused.append(fused)
                for index, (leaf, address) in enumerate(zip(leaves, addresses, strict=True)):
                    setattr(parent, leaf, PackedLinear(fused, index))
                    if address not in embeddings:  # a tied head keeps its plain weight
                        self._plain.pop(names[address], None)


def _fused_names(parent: nn.Module) -> Iterator[tuple[str, ...]]:
    """Names of the linear layers of `parent`, grouped by common input."""
    linears = {leaf: child for leaf, child in parent.named_children() if type(child) is nn.Linear}
    for leaves in FUSED:
        group = [linears[leaf] for leaf in leaves if leaf in linears]
        if len(group) == len(leaves) and len(_biases_of(group)) in (0, len(group)):
            yield leaves
            linears = {leaf: linear for leaf, linear in linears.items() if leaf not in leaves}
    yield from ((leaf,) for leaf in linears)


def _biases_of(linears: Sequence[nn.Linear]) -> list[Tensor]:
    biases = cast("list[Tensor | None]", [linear.bias for linear in linears])
    return [bias for bias in biases if bias is not None]
