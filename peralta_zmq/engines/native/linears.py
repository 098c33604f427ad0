"""Linear layers with packed weights: stored in the order in which this machine multiplies fastest.

Layers with the same input (such as q_proj, k_proj and v_proj) are fused into one packed weight.
Newer weights replace the packed ones while the model is in use. On devices that cannot pack, the
layers stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from peralta_zmq import models
from peralta_zmq.engines.native.kernels.gemm import can_pack, pack

FUSED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # with the same input


class FusedLinear:
    """Linear layers with the same input, stored as one packed weight.

    One wide matmul reads its weight faster than three narrow ones. `names` are the names of the
    layers' weights in the model, `biases` the names of their biases: one per layer, or none.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], names: Sequence[str], biases: Sequence[str] = ()
    ) -> None:
        self._names, self._biases = names, biases
        self._sizes = [linear.out_features for linear in linears]
        self._dtype = linears[0].weight.dtype
        self._input: Tensor | None = None  # of the latest matmul
        self._outputs: tuple[Tensor, ...] = ()  # of the latest matmul, by layer
        self._pack([linear.weight for linear in linears], _biases_of(linears))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the layers' weights [out, in] and biases [out]."""
        self._pack(
            [weights[name] for name in self._names], [weights[name] for name in self._biases]
        )

    def output(self, index: int, rows: Tensor) -> Tensor:
        """The output of layer `index` for `rows`, [..., in].

        The outputs of all layers are computed together and kept until the output of the last layer
        is read. Callers must read them in order.
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
        # A copy, because the source may be a mapped file that changes later.
        self._bias = self._concatenated(biases).clone() if biases else None
        self._input = None

    def _concatenated(self, tensors: Sequence[Tensor]) -> Tensor:
        converted = [tensor.detach().to(self._dtype) for tensor in tensors]
        return torch.cat(converted) if len(converted) > 1 else converted[0]


class PackedLinear(nn.Module):
    """One layer of a FusedLinear."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self._fused, self._index = fused, index

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self._fused.output(self._index, rows)


class ModelWeights:
    """The weights of a model by name; packs the linear layers if `pack` and the machine can."""

    def __init__(self, model: models.Model, *, pack: bool) -> None:
        weights = models.weights_of(model)
        self._shapes = {name: tensor.shape for name, tensor in weights.items()}
        self._plain = dict(weights)  # weights that are not packed
        self._fused: list[FusedLinear] = []
        if pack and model.device.type == "cpu" and can_pack(model.dtype):
            self._pack(model)

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights; needs memory for one more fused weight.

        Raises ValueError, with nothing changed, if names or shapes differ from the model's.
        """
        models.check_weights(self._shapes, weights)
        with torch.no_grad():
            for name, tensor in self._plain.items():
                tensor.copy_(weights[name])
            for fused in self._fused:
                fused.load(weights)

    def _pack(self, model: models.Model) -> None:
        """Replace the linear layers of a model by packed ones."""
        names = {tensor.data_ptr(): name for name, tensor in self._plain.items()}
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        kept = {names[embedding.weight.data_ptr()] for embedding in embeddings}
        for parent in list(model.modules()):
            for attributes in _fused_attributes(parent):
                linears = [cast(nn.Linear, getattr(parent, name)) for name in attributes]
                weights = [names[linear.weight.data_ptr()] for linear in linears]
                biases = [names[bias.data_ptr()] for bias in _biases_of(linears)]
                fused = FusedLinear(linears, weights, biases)
                self._fused.append(fused)
                for index, attribute in enumerate(attributes):
                    setattr(parent, attribute, PackedLinear(fused, index))
                for name in {*weights, *biases} - kept:  # an embedding tied to the head stays
                    del self._plain[name]


def _fused_attributes(parent: nn.Module) -> Iterator[tuple[str, ...]]:
    """Attribute names of the linear layers of `parent`; layers with the same input together."""
    linears = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
    for names in FUSED_LAYERS:
        group = [linears[name] for name in names if name in linears]
        if len(group) == len(names) and len(_biases_of(group)) in (0, len(group)):
            yield names
            for name in names:
                del linears[name]
    yield from ((name,) for name in linears)


def _biases_of(linears: Sequence[nn.Linear]) -> list[Tensor]:
    biases = cast("list[Tensor | None]", [linear.bias for linear in linears])
    return [bias for bias in biases if bias is not None]
