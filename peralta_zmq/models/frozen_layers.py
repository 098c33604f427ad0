"""Layers that are not trained, whose weights are stored in a format of base_formats.py.

Both passes unpack the weight and neither keeps it. Weights are buffers, because the dtype of a
transformers model is that of its first parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, linear

from peralta_zmq.models.base_formats import PackedTensor, digest_of
from peralta_zmq.models.published_names import BASE_LAYER, LazyWeights, weights_of

SCALES = ".packed_scales"  # end of the name of a packed layer's scales


def freeze(model: nn.Module, packed: Mapping[str, PackedTensor], device: torch.device) -> None:
    """Replace linear layers and embeddings by frozen ones on `device`; freeze other parameters.

    Weights that layers share stay shared. Other parameters become float32.
    """
    moved = dict[int, Tensor]()  # by address

    def move(weight: Tensor) -> Tensor:
        address = weight.data_ptr()
        if address not in moved:
            moved[address] = weight.detach().to(device)
        return moved[address]

    for path, module in list(model.named_modules()):
        layer = packed.get(f"{path}.weight")
        if _is_embedding(module):
            frozen = FrozenEmbedding(module, move(module.weight))
        elif type(module) is nn.Linear:
            frozen = FrozenLinear(module, layer or move(module.weight))
        else:
            continue
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, frozen)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(False)


def _is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether a module looks up rows, and at most multiplies them by its `embed_scale` (Gemma)."""
    scale = getattr(module, "embed_scale", None)
    if not isinstance(module, nn.Embedding) or not isinstance(scale, Tensor):
        return type(module) is nn.Embedding
    ids = torch.arange(min(8, module.num_embeddings), device=module.weight.device)
    expected = embedding(ids, module.weight) * scale.to(module.weight.dtype)
    return torch.equal(module(ids), expected)


class FrozenLinear(nn.Linear):
    """A linear layer that is not trained; `weight` has the codes of a packed weight."""

    def __init__(self, layer: nn.Linear, weight: Tensor | PackedTensor) -> None:
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        is_packed = isinstance(weight, PackedTensor)
        self._base_dtype = weight.base_dtype if is_packed else "bfloat16"
        self.register_buffer("weight", weight.codes if is_packed else weight)
        self.register_buffer("packed_scales", weight.scales if is_packed else None)
        bias = cast("Tensor | None", layer.bias)
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @property
    def packed(self) -> PackedTensor | None:
        scales = cast("Tensor | None", self.packed_scales)
        if scales is None:
            return None
        shape = self.out_features, self.in_features
        return PackedTensor(self._base_dtype, shape, self.weight, scales)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        packed = self.packed
        return self.weight.to(dtype) if packed is None else packed.unpack(dtype)

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        autocasts = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocasts else input.dtype
        return cast(Tensor, _FrozenProduct.apply(input, self, dtype))


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: FrozenLinear, dtype: torch.dtype) -> Tensor:
        ctx.layer = layer
        ctx.dtype = rows.dtype
        bias = cast("Tensor | None", layer.bias)
        return linear(rows.to(dtype), layer.unpack(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        return (grads[0] @ ctx.layer.unpack(grads[0].dtype)).to(ctx.dtype), None, None


class FrozenEmbedding(nn.Embedding):
    def __init__(self, layer: nn.Embedding, weight: Tensor) -> None:
        nn.Module.__init__(self)
        self.num_embeddings = layer.num_embeddings
        self.embedding_dim = layer.embedding_dim
        self.padding_idx = layer.padding_idx
        self.register_buffer("weight", weight)
        scale = cast("Tensor | None", getattr(layer, "embed_scale", None))
        self.register_buffer("scale", None if scale is None else scale.float(), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        rows = embedding(input, self.weight).float()
        scale = cast("Tensor | None", self.scale)
        return rows if scale is None else rows * scale


# Weights and digest of a model with such layers.


def packed_digest(model: nn.Module) -> str | None:
    """The digest of a model's packed weights, as in BaseWeights; None if it has none."""
    checksums = {
        _original_name(f"{name}.weight"): layer.packed.checksum()
        for name, layer in model.named_modules()
        if isinstance(layer, FrozenLinear) and layer.packed is not None
    }
    return digest_of(checksums) if checksums else None


def _original_name(name: str) -> str:
    """Name of a base weight without the names of the modules that peft adds."""
    return name.replace(f"{BASE_LAYER}.", ".")


def unpacked_weights(model: nn.Module) -> LazyWeights:
    """Weights of a base model without its adapters, with original names, unpacked when read."""
    layers = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, FrozenLinear)
    }
    weights = {
        _original_name(name): layers.get(name, tensor)
        for name, tensor in weights_of(model).items()
        if ".lora_" not in name and not name.endswith(SCALES)
    }

    def read(name: str) -> Tensor:
        weight = weights[name]
        return weight.unpack(torch.bfloat16) if isinstance(weight, FrozenLinear) else weight

    return LazyWeights(weights, read)
