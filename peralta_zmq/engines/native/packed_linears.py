"""Linear layers with packed weights, for fast matmuls on a CPU.

Layers with the same input (such as q_proj, k_proj and v_proj) are fused into one packed weight.
Where packing is not supported, the model keeps its own layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from peralta_zmq import models
from peralta_zmq.engines.native.kernels.gemm import PanelWeight, can_pack, pack

# Each tuple: attribute names of layers with the same input.
FUSED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear:
    """Linear layers with the same input, stored as one packed weight, which multiplies faster.

    Weights and biases are named as in the model: one bias per layer, or none at all.
    """

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        weight_names: Sequence[str],
        bias_names: Sequence[str] = (),
    ) -> None:
        self._weight_names = weight_names
        self._bias_names = bias_names
        self._sizes = [linear.out_features for linear in linears]
        self._dtype = linears[0].weight.dtype
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()  # outputs of the layers for `_input`
        self.packed = pack(self._concatenated([linear.weight for linear in linears]))
        biases = _biases_of(linears)
        # Cloned: `_concatenated` does not copy a single bias, and `load` overwrites this one.
        self.bias = self._concatenated(biases).clone() if biases else None

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.packed.load(self._concatenated([weights[name] for name in self._weight_names]))
        if self.bias is not None:
            self.bias.copy_(self._concatenated([weights[name] for name in self._bias_names]))
        self._input = None  # outputs of the old weights are not used again

    def output(self, index: int, rows: Tensor) -> Tensor:
        """The output [..., out] of layer `index` for the input `rows` [..., in].

        The first call for an input computes all layers; the call for the last layer frees them.
        """
        if len(self._sizes) == 1:
            return self.packed.multiply(rows, self.bias)
        if rows is not self._input:
            self._input = rows
            self._outputs = self.packed.multiply(rows, self.bias).split(self._sizes, -1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input = None
            self._outputs = ()
        return output

    def _concatenated(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors in the dtype of the layers, concatenated; a single tensor is not copied."""
        converted = [tensor.detach().to(self._dtype) for tensor in tensors]
        return torch.cat(converted) if len(converted) > 1 else converted[0]


class PackedLinear(nn.Module):
    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self.fused = fused
        self._index = index

    def forward(self, rows: Tensor) -> Tensor:
        return self.fused.output(self._index, rows)


class ModelWeights:
    """The weights of a model by name, with packed linear layers if `pack` and if supported."""

    def __init__(self, model: models.Model, *, pack: bool) -> None:
        self._plain = models.weights_of(model)  # all, until `_pack` removes the packed ones
        self._shapes = {name: tensor.shape for name, tensor in self._plain.items()}
        self._fused: list[FusedLinear] = []
        if pack and model.device.type == "cpu" and can_pack(model.dtype):
            self._pack(model)

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights, with extra memory for one fused weight at a time.

        Raises ValueError, with nothing changed, if names or shapes differ.
        """
        models.check_weights(self._shapes, weights)
        with torch.no_grad():
            for name, tensor in self._plain.items():
                tensor.copy_(weights[name])
            for fused in self._fused:
                fused.load(weights)

    def _pack(self, model: models.Model) -> None:
        # The address of a tied weight has one name for all its layers.
        names = {tensor.data_ptr(): name for name, tensor in self._plain.items()}
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        # An embedding needs its weight unpacked, even if the output head has the same one.
        kept = {names[embedding.weight.data_ptr()] for embedding in embeddings}
        # Without the linear layers themselves, because a list of them would keep their weights.
        for parent in [each for each in model.modules() if not isinstance(each, nn.Linear)]:
            for attributes in list(_layer_groups(parent)):
                linears = [cast(nn.Linear, getattr(parent, each)) for each in attributes]
                weights = [names[linear.weight.data_ptr()] for linear in linears]
                biases = [names[bias.data_ptr()] for bias in _biases_of(linears)]
                fused = FusedLinear(linears, weights, biases)
                self._fused.append(fused)
                for index, attribute in enumerate(attributes):
                    setattr(parent, attribute, PackedLinear(fused, index))
                for name in {*weights, *biases} - kept:
                    del self._plain[name]
                del linears
                models.release_memory()  # the freed weights leave gaps that are seldom reused


def panels_of(*linears: nn.Module) -> PanelWeight | None:
    """The weight in which exactly these layers are fused; None if it is not in panels."""
    fused = [linear.fused for linear in linears if isinstance(linear, PackedLinear)]
    if len(fused) < len(linears) or len(set(map(id, fused))) > 1:
        return None
    packed = fused[0].packed
    return packed if isinstance(packed, PanelWeight) else None


def _layer_groups(parent: nn.Module) -> Iterator[tuple[str, ...]]:
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
