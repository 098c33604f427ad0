"""Python binding of decode_layer.c: the operations between a layer's matmuls, and all layers.

For a few new tokens per row, C needs four calls per layer, or one for all layers, torch about forty
operations per layer. Letters in shapes: T new tokens of all rows, D head_dim.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from peralta_zmq import compiler
from peralta_zmq.compiler import FLOAT, INT, INT64, POINTER
from peralta_zmq.engines.native.kv_cache import KVCache
from peralta_zmq.engines.native.packed_linears import panels_of

SOURCE = Path(__file__).with_name("decode_layer.c")
LANES = 16  # floats in a SIMD vector
MAX_WIDTH = 256  # largest head_dim
MAX_GROUP = 8  # most query heads per key head
BLOCK_SIZE = 128  # logits per block of `sum_blocks`
SIZES = (
    f"-DLANES={LANES}",
    f"-DMAX_WIDTH={MAX_WIDTH}",
    f"-DMAX_GROUP={MAX_GROUP}",
    f"-DLOGITS_PER_BLOCK={BLOCK_SIZE}",
)
DEFINES = {torch.bfloat16: (*SIZES, "-DSCALAR_IS_BF16"), torch.float32: SIZES}

# Fields of the struct `Attention`, in the order of decode_layer.c.
INTEGERS = "tokens heads group width shared capacity threads query_stride key_stride value_stride"
INPUTS = "query key value query_norm key_norm cosine sine"
CACHES = "shared_keys shared_values keys values row column start end"


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class AttentionStruct(ctypes.Structure):
    """The struct `Attention` of decode_layer.c, which explains the fields."""

    _fields_ = (
        *_fields(INTEGERS, INT64),
        *_fields(f"{INPUTS} {CACHES} out", POINTER),
        *_fields("epsilon scaling", FLOAT),
    )


class LinearStruct(ctypes.Structure):
    _fields_ = (("packed", POINTER), ("bias", POINTER), ("inputs", INT64), ("outputs", INT64))


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *_fields("attention_norm mlp_norm query_norm key_norm", POINTER),
        *_fields("shared_keys shared_values keys values", POINTER),
        *_fields("qkv attention_out gate_up down", LinearStruct),
    )


class DecodeStruct(ctypes.Structure):
    _fields_ = (
        ("attention", ctypes.POINTER(AttentionStruct)),
        ("layers", ctypes.POINTER(LayerStruct)),
        ("multiply", POINTER),
        ("num_layers", INT64),
        *_fields("hidden last_norm out", POINTER),
        *_fields("qkv attended gates_and_ups gated update", POINTER),
        ("epsilon", FLOAT),
    )


# Types of the arguments of the C functions.
ARGUMENTS = {
    "norm": (POINTER, POINTER, POINTER, INT64, INT64, FLOAT, INT),
    "gate": (POINTER, POINTER, POINTER, INT64, INT64, INT64, INT),
    "attend": (ctypes.POINTER(AttentionStruct),),
    "add_and_norm": (POINTER, POINTER, POINTER, POINTER, INT64, INT64, FLOAT, INT),
    "decode": (ctypes.POINTER(DecodeStruct),),
    "sum_blocks": (POINTER, POINTER, POINTER, INT64, FLOAT, INT),
}


class CompiledLayerOps:
    """Replaces `decoder.TorchLayerOps` for a few new tokens per row."""

    def __init__(
        self,
        library: ctypes.CDLL,
        cache: KVCache,
        *,
        rotary: tuple[Tensor, Tensor],  # cosines and sines, [T, D]
        places: Tensor,  # [4, T]: row, column in its own part, start and end in the shared part
    ) -> None:
        self._library = library
        self._cache = cache
        self._threads = torch.get_num_threads()
        cosine, sine = rotary
        row, column, start, end = places
        self._tensors = cosine, sine, places  # must stay alive while C reads them
        # The struct calls the width of the rows, in tokens, `capacity`.
        self.arguments = AttentionStruct(
            tokens=places.shape[1],
            width=cosine.shape[-1],
            capacity=cache.width,
            threads=self._threads,
        )
        self._set_pointers(cosine=cosine, sine=sine, row=row, column=column, start=start, end=end)

    def norm(self, norm: Any, hidden: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        addresses = hidden.data_ptr(), norm.weight.data_ptr(), out.data_ptr()
        num_tokens = hidden.shape[:-1].numel()
        size = hidden.shape[-1]
        self._library.norm(*addresses, num_tokens, size, norm.variance_epsilon, self._threads)
        return out

    def gate(self, mlp: Any, gates: Tensor, ups: Tensor) -> Tensor:
        """SwiGLU: silu(gates) * ups; both are [T, intermediate_size]."""
        out = gates.new_empty(gates.shape)
        addresses = gates.data_ptr(), ups.data_ptr(), out.data_ptr()
        num_tokens = gates.shape[:-1].numel()
        stride = gates.stride(-2)
        size = gates.shape[-1]
        self._library.gate(*addresses, num_tokens, stride, size, self._threads)
        return out

    def attend(
        self, module: Any, layer_type: str, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Write key and value to the KV cache, and return the attention; all [T, heads * D]."""
        arguments = self.arguments
        layer = module.layer_idx
        shared_keys, shared_values = self._cache.shared[layer]
        keys, values = self._cache.layers[layer]
        arguments.heads, arguments.shared = shared_keys.shape[:2]
        arguments.group = query.shape[-1] // key.shape[-1]
        arguments.query_stride = query.stride(-2)
        arguments.key_stride = key.stride(-2)
        arguments.value_stride = value.stride(-2)
        arguments.scaling = module.scaling
        out = query.new_empty(query.shape)
        self._set_pointers(query=query, key=key, value=value, keys=keys, values=values, out=out)
        self._set_pointers(shared_keys=shared_keys, shared_values=shared_values)
        if hasattr(module, "q_norm"):
            self._set_pointers(query_norm=module.q_norm.weight, key_norm=module.k_norm.weight)
            arguments.epsilon = module.q_norm.variance_epsilon
        self._library.attend(ctypes.byref(arguments))
        return out

    def _set_pointers(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            setattr(self.arguments, name, tensor.data_ptr())


class CompiledLayers:
    """All layers of `model`, a Llama-family model without its head, in one C call.

    `can_compile` must be true. With a call per operation, a decode step of Qwen3-0.6B takes 1.1
    times as long, and one of a small model 1.4 times; the bits are the same. New weights must be
    loaded into the same memory.
    """

    def __init__(self, library: ctypes.CDLL, model: Any, cache: KVCache) -> None:
        self._library = library
        self._model = model
        self._cache = cache
        panels = model.layers[0].mlp.down_proj.fused.packed
        self._multiply = ctypes.cast(panels.library.multiply, POINTER)
        self._table: Any = None  # LayerStructs, valid for the cache's layout `_layout`
        self._layout = -1

    def __call__(self, hidden: Tensor, ops: CompiledLayerOps) -> Tensor:
        """Last hidden states [T, hidden_size]; overwrites the embeddings `hidden`."""
        if self._cache.layout != self._layout:
            self._table = self._addresses()
            self._layout = self._cache.layout
        attention = self._model.layers[0].self_attn
        layer = self._table[0]
        norm = self._model.norm
        arguments = ops.arguments
        out = torch.empty_like(hidden)
        arguments.heads, arguments.shared = self._cache.shared[0][0].shape[:2]
        arguments.group = layer.attention_out.inputs // (arguments.heads * arguments.width)
        arguments.scaling = attention.scaling
        arguments.epsilon = norm.variance_epsilon
        sizes = (
            layer.qkv.outputs,
            layer.attention_out.inputs,
            layer.gate_up.outputs,
            layer.down.inputs,
            hidden.shape[-1],
        )
        num_tokens = len(hidden)
        buffers = hidden.new_empty(num_tokens * sum(sizes)).split(
            [num_tokens * size for size in sizes]
        )
        decode = DecodeStruct(
            ctypes.pointer(arguments),
            self._table,
            self._multiply,
            len(self._table),
            hidden.data_ptr(),
            norm.weight.data_ptr(),
            out.data_ptr(),
            *(buffer.data_ptr() for buffer in buffers),
            norm.variance_epsilon,
        )
        self._library.decode(ctypes.byref(decode))
        return out

    def _addresses(self) -> Any:
        table = (LayerStruct * len(self._model.layers))()
        caches = zip(self._cache.layers, self._cache.shared, strict=True)
        for entry, layer, (own, shared) in zip(table, self._model.layers, caches, strict=True):
            attention = layer.self_attn
            mlp = layer.mlp
            tensors = {
                "attention_norm": layer.input_layernorm.weight,
                "mlp_norm": layer.post_attention_layernorm.weight,
                "keys": own[0],
                "values": own[1],
                "shared_keys": shared[0],
                "shared_values": shared[1],
            }
            if hasattr(attention, "q_norm"):
                tensors["query_norm"] = attention.q_norm.weight
                tensors["key_norm"] = attention.k_norm.weight
            for name, tensor in tensors.items():
                setattr(entry, name, tensor.data_ptr())
            entry.qkv = _linear_struct(attention.q_proj)
            entry.attention_out = _linear_struct(attention.o_proj)
            entry.gate_up = _linear_struct(mlp.gate_proj)
            entry.down = _linear_struct(mlp.down_proj)
        return table


def can_compile(model: Any) -> bool:
    """Whether all linear weights of the layers are in panels, fused as in LayerStruct."""
    return all(
        panels_of(*linears) is not None
        for layer in model.layers
        for attention, mlp in [(layer.self_attn, layer.mlp)]
        for linears in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
    )


def _linear_struct(linear: Any) -> LinearStruct:
    panels = linear.fused.packed
    bias = linear.fused.bias
    bias_address = None if bias is None else bias.data_ptr()
    return LinearStruct(panels.data_ptr(), bias_address, panels.inputs, panels.outputs)


def sum_blocks(library: ctypes.CDLL, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Each block's largest logit, and sum of exp((logit - largest) / temperature), in fp32."""
    num_blocks = logits.shape[1] // BLOCK_SIZE
    largest, sums = logits.new_empty((2, len(logits), num_blocks), dtype=torch.float32)
    addresses = (tensor.data_ptr() for tensor in (logits, largest, sums))
    library.sum_blocks(*addresses, sums.numel(), 1 / temperature, torch.get_num_threads())
    return largest, sums


@functools.cache
def library_for(
    dtype: torch.dtype, device: torch.device, *, queries_per_head: int, head_dim: int
) -> ctypes.CDLL | None:
    """The library of decode_layer.c; None if it is not supported or its results are wrong."""
    supported = not head_dim % LANES and head_dim <= MAX_WIDTH and queries_per_head <= MAX_GROUP
    if device.type != "cpu" or dtype not in DEFINES or not supported:
        return None
    check = functools.partial(_is_correct, dtype=dtype, group=queries_per_head, head_dim=head_dim)
    return compiler.load(SOURCE, ARGUMENTS, defines_for(dtype, head_dim), check=check)


def defines_for(dtype: torch.dtype, head_dim: int) -> tuple[str, ...]:
    """The compiler's options that compile decode_layer.c for `dtype` and `head_dim`."""
    unit = LANES if head_dim % (2 * LANES) else 2 * LANES  # the latter is faster
    return (*DEFINES[dtype], f"-DWIDTH_UNIT={unit}")


def _is_correct(library: ctypes.CDLL, *, dtype: torch.dtype, group: int, head_dim: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sizes = {"num_layers": 1, "num_rows": 1, "num_heads": 1, "capacity": 4, "head_dim": head_dim}
    cache = KVCache(**sizes, dtype=dtype, device=torch.device("cpu"))
    cache.shared = [(random(1, 3, head_dim), random(1, 3, head_dim))]
    query, key, value = (random(1, size) for size in (group * head_dim, head_dim, head_dim))
    # A cosine of 1 and a sine of 0: the rotary embedding changes nothing.
    no_rotation = torch.ones(1, head_dim, dtype=dtype), torch.zeros(1, head_dim, dtype=dtype)
    places = torch.tensor([[0], [0], [1], [3]])
    ops = CompiledLayerOps(library, cache, rotary=no_rotation, places=places)
    layer = SimpleNamespace(layer_idx=0, scaling=0.3)
    attended = ops.attend(layer, "", query, key, value)
    keys, values = (
        torch.cat([shared[:, 1:], new[None]], 1)
        for shared, new in zip(cache.shared[0], (key, value), strict=True)
    )
    expected = torch.softmax(query.view(1, group, head_dim) @ keys.mT * 0.3, -1) @ values
    norm = SimpleNamespace(weight=key[0], variance_epsilon=1e-6)
    sums = value.clone()
    normed = torch.empty_like(value)
    addresses = (tensor.data_ptr() for tensor in (sums, key, norm.weight, normed))
    library.add_and_norm(*addresses, 1, head_dim, 1e-6, 1)
    logits = random(2, 2 * BLOCK_SIZE)
    blocks = (logits.float() / 0.7).unflatten(-1, (2, BLOCK_SIZE)).logsumexp(-1)
    largest, block_sums = sum_blocks(library, logits, 0.7)
    pairs = (
        (largest / 0.7 + block_sums.log(), blocks),
        (sums, value + key),
        (normed, functional.rms_norm(value + key, (head_dim,), norm.weight, 1e-6)),
        (attended, expected.view_as(attended)),
        (ops.norm(norm, value), functional.rms_norm(value, (head_dim,), norm.weight, 1e-6)),
        (ops.gate(None, key, value), functional.silu(key) * value),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    return all(
        torch.allclose(ours, torchs, atol=tolerance, rtol=tolerance) for ours, torchs in pairs
    )
