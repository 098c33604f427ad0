"""Random inputs of a layer for tests of the kernels, in float32 and in float64."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from exactness import is_as_exact_as_torch

from peralta_zmq.engines.native import decoder
from peralta_zmq.engines.native.kernels import decode_layer
from peralta_zmq.engines.native.kv_cache import KVCache, RowWindow

ROWS, HEADS, SHARED, CAPACITY = 5, 2, 70, 160
SPANS = [[0, 70], [3, 70], [3, 9], [0, 0], [69, 70]]
COLUMNS = [130, 0, 63, 64, 100]  # of the first new tokens; the kernel's blocks have 64 keys
SCALES = 0.1, 3, 40  # of inputs of norm and gate; with 40, exp(-gate) overflows for some gates
CPU = torch.device("cpu")


class Layer:
    """Random inputs of one attention layer, and a KV cache filled with random values."""

    def __init__(
        self, dtype: torch.dtype, group: int, width: int, *, normed: bool, new_tokens: int = 1
    ) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(0), dtype
        self.cache = KVCache(
            num_layers=2, num_rows=ROWS + 1, num_heads=HEADS, capacity=CAPACITY, head_dim=width,
            dtype=dtype, device=CPU,
        )  # fmt: skip
        self.cache.widen(max(COLUMNS) + new_tokens)
        for part in self.cache.layers[1]:
            part.copy_(self.random(*part.shape))
        shape = HEADS, SHARED, width
        self.cache.shared[1] = self.random(*shape), self.random(*shape)
        shape = ROWS, new_tokens, width // 2
        angles = torch.cat([6 * torch.rand(shape, generator=self._generator)] * 2, -1)
        self.rotary = angles.cos().to(dtype), angles.sin().to(dtype)
        sizes = [group * HEADS * width, HEADS * width, HEADS * width]
        self.inputs = self.random(ROWS, new_tokens, sum(sizes)).split(
            sizes, -1
        )  # views of one matmul
        self.start, self.end = torch.tensor(SPANS).T.contiguous()[..., None]
        self.columns = torch.tensor(COLUMNS)[:, None] + torch.arange(new_tokens)
        self.module = SimpleNamespace(layer_idx=1, scaling=0.2, head_dim=width)
        if normed:
            self.module.q_norm, self.module.k_norm = self.norm(width), self.norm(width)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype)

    def norm(self, width: int) -> Any:
        return SimpleNamespace(weight=self.random(width), variance_epsilon=1e-6)

    def compiled_ops(self, library: Any) -> decode_layer.CompiledLayerOps:
        rows = torch.arange(1, 1 + ROWS)[:, None]
        places = torch.broadcast_tensors(rows, self.columns, self.start, self.end)
        cosine, sine = (each.flatten(0, 1) for each in self.rotary)
        return decode_layer.CompiledLayerOps(
            library, self.cache, rotary=(cosine, sine), places=torch.stack(places).flatten(1)
        )

    def torch_ops(self) -> decoder.TorchLayerOps:
        outside_span = (torch.arange(SHARED) < self.start) | (torch.arange(SHARED) >= self.end)
        hidden = torch.cat([
            outside_span[:, None].expand(-1, self.columns.shape[1], -1),
            torch.arange(self.cache.width) > self.columns[..., None],
        ], -1)  # fmt: skip
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill(hidden, -torch.inf)
        window = RowWindow(self.cache, 1, self.columns)
        rotary = decoder.RotaryEmbedding(*self.rotary)
        return decoder.TorchLayerOps(rotary, window, {"": mask[:, None]})

    def in_float64(self) -> Layer:
        """The same values in double precision: the reference for both implementations."""
        exact = copy.copy(self)
        exact._dtype = torch.float64
        exact.cache = copy.copy(self.cache)
        exact.cache.layers = [tuple(part.double() for part in layer) for layer in self.cache.layers]
        exact.cache.shared = [tuple(part.double() for part in layer) for layer in self.cache.shared]
        cosine, sine = self.rotary
        exact.rotary = cosine.double(), sine.double()
        exact.inputs = tuple(part.double() for part in self.inputs)
        exact.module = SimpleNamespace(**vars(self.module))
        for name in {"q_norm", "k_norm"} & vars(self.module).keys():
            setattr(exact.module, name, in_float64(getattr(self.module, name)))
        return exact


def in_float64(norm: Any) -> Any:
    """The same RMS norm in double precision."""
    return SimpleNamespace(weight=norm.weight.double(), variance_epsilon=norm.variance_epsilon)


def assert_norm_and_gate_are_as_exact_as_torchs(
    library: Any, dtype: torch.dtype, scale: float
) -> None:
    layer = Layer(dtype, 2, 64, normed=False)
    ours, torchs = layer.compiled_ops(library), layer.torch_ops()
    hidden, norm = scale * layer.random(ROWS, 1, 48), layer.norm(48)
    exact = torchs.norm(in_float64(norm), hidden.double())
    assert is_as_exact_as_torch(ours.norm(norm, hidden), torchs.norm(norm, hidden), exact)
    gates, ups = (scale * layer.random(ROWS, 1, 2 * 80)).split(80, -1)
    mlp = SimpleNamespace(act_fn=torch.nn.functional.silu)
    exact = torchs.gate(mlp, gates.double(), ups.double())
    assert is_as_exact_as_torch(ours.gate(mlp, gates, ups), torchs.gate(mlp, gates, ups), exact)
