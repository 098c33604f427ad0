"""Python binding of decode_layer.c: everything between the matmuls of a layer during decode.

For one new token per row, torch needs about forty operations per layer and one product per row for
the row's own keys; the C code needs four calls. Without a C compiler torch's operators are used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from peralta_zmq.engines.native.cache import KVCache
from peralta_zmq.engines.native.kernels import compiler

LANES, MAX_WIDTH, MAX_SHARED = 16, 256, 8  # numbers at a time; of a head; heads for one of keys
SIZES = (f"-DLANES={LANES}", f"-DMAX_WIDTH={MAX_WIDTH}", f"-DMAX_SHARED={MAX_SHARED}")
DEFINES = {torch.bfloat16: (*SIZES, "-DNUMBER_IS_BF16"), torch.float32: SIZES}
logger = logging.getLogger(__name__)


class _Attention(ctypes.Structure):
    """As in decode_layer.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "rows", "heads", "shared", "width", "common", "room", "threads",
            "query_stride", "key_stride", "value_stride",
        )),
        *((name, ctypes.c_void_p) for name in (
            "query", "key", "value", "query_norm", "key_norm", "cosine", "sine",
            "common_keys", "common_values", "keys", "values", "start", "end", "own", "out",
        )),
        ("epsilon", ctypes.c_float), ("scaling", ctypes.c_float),
    )  # fmt: skip


_AT, _LONG = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = {
    "norm": (_AT, _AT, _AT, _LONG, _LONG, ctypes.c_float, ctypes.c_int),
    "gate": (_AT, _AT, _AT, _LONG, _LONG, _LONG, ctypes.c_int),
    "attend": (ctypes.POINTER(_Attention),),
}


class OneToken:
    """`forward.Between` of a step with one new token a row."""

    def __init__(
        self,
        library: ctypes.CDLL,
        cache: KVCache,
        first: int,  # row of the cache
        *,
        turned: tuple[Tensor, Tensor],  # cosines and sines, [n, 1, D]
        spans: tuple[Tensor, Tensor],  # start and end in the common part, [n, 1]
        own: Tensor,  # [n, 1], where in their rows the new tokens go
    ) -> None:
        self._library, self._cache, self._rows = library, cache, slice(first, None)
        self._threads = torch.get_num_threads()
        self._held = (*turned, *spans, own)  # alive while C reads them
        cosine, sine, start, end, own_ = (each.data_ptr() for each in self._held)
        self._asked = _Attention(
            rows=len(own), width=turned[0].shape[-1], room=cache.width, threads=self._threads,
            cosine=cosine, sine=sine, start=start, end=end, own=own_,
        )  # fmt: skip

    def norm(self, norm: Any, hidden: Tensor) -> Tensor:
        """As Between says."""
        out = torch.empty_like(hidden)
        self._library.norm(
            hidden.data_ptr(), norm.weight.data_ptr(), out.data_ptr(), len(hidden),
            hidden.shape[-1], norm.variance_epsilon, self._threads,
        )  # fmt: skip
        return out

    def gate(self, mlp: Any, gates: Tensor, ups: Tensor) -> Tensor:
        """As Between says."""
        out = gates.new_empty(gates.shape)
        self._library.gate(
            gates.data_ptr(), ups.data_ptr(), out.data_ptr(), len(gates), gates.stride(0),
            gates.shape[-1], self._threads,
        )  # fmt: skip
        return out

    def attend(self, module: Any, kind: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Between says."""
        asked, layer = self._asked, module.layer_idx
        common, rows = self._cache.common[layer], self._cache.layers[layer]
        asked.heads, asked.common = common[0].shape[:2]
        asked.shared = query.shape[-1] // key.shape[-1]
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            setattr(asked, name, tensor.data_ptr())
            setattr(asked, f"{name}_stride", tensor.stride(0))
        if hasattr(module, "q_norm"):
            asked.query_norm = module.q_norm.weight.data_ptr()
            asked.key_norm = module.k_norm.weight.data_ptr()
            asked.epsilon = module.q_norm.variance_epsilon
        asked.common_keys, asked.common_values = (each.data_ptr() for each in common)
        asked.keys, asked.values = (each[self._rows].data_ptr() for each in rows)
        asked.scaling = module.scaling
        out = query.new_empty(query.shape)
        asked.out = out.data_ptr()
        self._library.attend(ctypes.byref(asked))
        return out


@functools.cache
def library_for(
    dtype: torch.dtype, device: torch.device, *, shared: int, width: int
) -> ctypes.CDLL | None:
    """The library for heads of `width` values, of which `shared` use the same keys.

    None if it does not support them, cannot be compiled, or does not reproduce torch's results.
    """
    served = not width % LANES and width <= MAX_WIDTH and shared <= MAX_SHARED
    if device.type != "cpu" or dtype not in DEFINES or not served:
        return None
    library = compiler.load("decode_layer.c", ARGUMENTS, DEFINES[dtype])
    if library is None or _is_right(library, dtype, shared, width):
        return library
    logger.warning(
        "decode_layer.c is not used, which is slower: results differ from those of torch"
    )
    return None


def _is_right(library: ctypes.CDLL, dtype: torch.dtype, shared: int, width: int) -> bool:
    """Whether a norm, a gate, and a row that reads a common part come out as torch's."""
    chance = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance).to(dtype)

    cache = KVCache(
        num_layers=1, num_rows=1, num_heads=1, capacity=4, head_dim=width, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    cache.common = [(drawn(1, 3, width), drawn(1, 3, width))]
    query, key, value = drawn(1, 1, shared * width), drawn(1, 1, width), drawn(1, 1, width)
    plain = torch.ones(1, 1, width, dtype=dtype), torch.zeros(1, 1, width, dtype=dtype)
    spans = torch.tensor([[1]]), torch.tensor([[3]])
    step = OneToken(library, cache, 0, turned=plain, spans=spans, own=torch.tensor([[0]]))
    layer = SimpleNamespace(layer_idx=0, scaling=0.3)
    ours = step.attend(layer, "", query, key, value)
    keys, values = (
        torch.cat([held[:, 1:], new], 1)
        for held, new in zip(cache.common[0], (key, value), strict=True)
    )
    theirs = torch.softmax(query.view(1, shared, width) @ keys.mT * 0.3, -1) @ values
    norm = SimpleNamespace(weight=key[0, 0], variance_epsilon=1e-6)
    both = (
        (ours, theirs.view_as(ours)),
        (step.norm(norm, value), functional.rms_norm(value, (width,), norm.weight, 1e-6)),
        (step.gate(None, key, value), functional.silu(key) * value),
    )
    near = 1e-5 if dtype == torch.float32 else 0.05
    return all(torch.allclose(mine, its, atol=near, rtol=near) for mine, its in both)
