"""A weight in the order in which this machine multiplies it fastest. Knows tensors.

oneDNN multiplies a weight that lies in its own order faster than a plain one. Where the processor
multiplies pairs of bfloat16 numbers, gemm.c is faster than that for few rows and for many, as
products_vs_onednn of `bin/bench generation` measures it here. Both are tried before they are used:
oneDNN's operators are private to torch, and gemm.c is what a compiler made of it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from peralta_zmq.engines.native.kernels import compiler

ROWS = 32  # oneDNN chooses its order for about so many rows at once
WIDE = 64  # outputs of a panel, as in gemm.c
_AT, _LONG = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = {
    "pack": (_AT, _AT, _LONG, _LONG, ctypes.c_int),
    "multiply": (_AT, _AT, _AT, _AT, _LONG, _LONG, _LONG, ctypes.c_int),
}
logger = logging.getLogger(__name__)


class PackedWeight(Protocol):
    """A weight [out, in] in an order of its own; the tensor that it came from is not kept."""

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in] to [..., out]; `bias` is [out]."""
        ...


class PrepackedWeight:
    """In oneDNN's order, for any type it has."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = cast(Any, torch.ops.mkldnn)._reorder_linear_weight(weight, ROWS)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """As Packed says."""
        operators = cast(Any, torch.ops.mkldnn)
        return operators._linear_pointwise(rows, self._weight, bias, "none", [], "")


class PanelWeight:
    """In gemm.c's order: bfloat16, and an even number of inputs."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor) -> None:
        self._library, (self._out, self._in) = library, weight.shape
        self._panels = weight.new_empty(-(-self._out // WIDE), self._in // 2, WIDE, 2)
        plain = weight.contiguous()
        library.pack(
            plain.data_ptr(), self._panels.data_ptr(), self._out, self._in, torch.get_num_threads()
        )

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """As Packed says; RuntimeError, as a plain linear's, for rows that do not fit."""
        if rows.dtype != torch.bfloat16 or rows.shape[-1] != self._in:
            wanted = f"[..., {self._in}] of torch.bfloat16"
            raise RuntimeError(f"rows are {list(rows.shape)} of {rows.dtype}, not {wanted}")
        plain = rows.contiguous()
        out = plain.new_empty(*rows.shape[:-1], self._out)
        self._library.multiply(
            plain.data_ptr(), self._panels.data_ptr(), None if bias is None else bias.data_ptr(),
            out.data_ptr(), plain.numel() // self._in, self._in, self._out,
            torch.get_num_threads(),
        )  # fmt: skip
        return out


def pack(weight: Tensor) -> PackedWeight:
    """`weight`, [out, in], as this machine multiplies it fastest; of a type that `can_pack`."""
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0:
        library = library_of_panels()
        if library is not None:
            return PanelWeight(library, weight)
    return PrepackedWeight(weight)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build packs weights of `dtype` and then multiplies like a plain linear."""
    try:
        return _is_right(PrepackedWeight, dtype)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def suits_panels(processor: str) -> bool:
    """Whether gemm.c is for what `compiler.processor` says. Where there are tiles (AMX), which
    oneDNN multiplies by, we have not measured it."""
    able = processor.split()
    return "avx512_bf16" in able and "amx_bf16" not in able


@functools.cache
def library_of_panels() -> ctypes.CDLL | None:
    """gemm.c; None where the processor is not for it, or it cannot be built, or does not give
    what torch gives."""
    if not suits_panels(compiler.processor()):
        return None
    library = compiler.load("gemm.c", ARGUMENTS)
    if library is None or _is_right(functools.partial(PanelWeight, library), torch.bfloat16):
        return library
    logger.warning("gemm.c is not used, which is slower: results differ from those of torch")
    return None


def _is_right(way: Callable[[Tensor], PackedWeight], dtype: torch.dtype) -> bool:
    weight = torch.linspace(-1, 1, 80 * 48).reshape(80, 48).to(dtype)
    rows = torch.linspace(-1, 1, 7 * 48).reshape(7, 48).to(dtype)
    bias = torch.ones(80, dtype=dtype)
    ours, plain = way(weight).multiply(rows, bias), functional.linear(rows, weight, bias)
    return torch.allclose(ours, plain, rtol=0.02 if dtype != torch.float32 else 1e-5, atol=1e-4)
