"""Packed weights: stored in the memory order that this machine multiplies fastest.

There are two packed orders, and both are faster than a plain weight. One is the order of oneDNN.
The other is the order of gemm.c, which stores a weight in panels. On processors with AVX512-BF16
or AMX, gemm.c is faster than oneDNN for every measured number of input rows
(products_vs_onednn_* in the results of `bin/bench generation`). Each implementation is checked
against a plain matmul before use, because torch's operators for oneDNN are private, and gemm.c
depends on the local compiler.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from peralta_zmq.engines.native.kernels import compiler
from peralta_zmq.engines.native.kernels.compiler import INT, INT64, POINTER
from peralta_zmq.errors import described

logger = logging.getLogger(__name__)
ONEDNN_ROWS = 32  # number of input rows for which oneDNN optimizes its order
PANEL_WIDTH = 32  # outputs per panel, as in gemm.c
ARGUMENTS = {
    "pack": (POINTER, POINTER, INT64, INT64, INT),
    "multiply": (POINTER, POINTER, POINTER, POINTER, INT64, INT64, INT64, INT),
}


class Variant(NamedTuple):
    """One of the ways to compile gemm.c."""

    cpu_feature: str  # that the code needs
    defines: tuple[str, ...]  # compiler options
    step: int  # as in gemm.c: the number of inputs of a weight must be a multiple of it


# The faster one first.
VARIANTS = (
    Variant("amx_bf16", ("-DWITH_AMX",), step=32),
    Variant("avx512_bf16", (), step=2),
)


class OnednnWeight:
    """A weight in the order of oneDNN, for every dtype that oneDNN supports."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = cast(Any, torch.ops.mkldnn)._reorder_linear_weight(weight, ONEDNN_ROWS)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply `rows`, [..., in], to [..., out]; `bias` is [out]."""
        operators = cast(Any, torch.ops.mkldnn)
        return operators._linear_pointwise(rows, self._weight, bias, "none", [], "")


class PanelWeight:
    """A bfloat16 weight [outputs, inputs] in the panels of gemm.c."""

    def __init__(self, variant: Variant, library: ctypes.CDLL, weight: Tensor) -> None:
        self._library, (self.outputs, self.inputs) = library, weight.shape
        num_panels = -(-self.outputs // PANEL_WIDTH)  # rounded up
        self._panels = weight.new_empty(num_panels, self.inputs // 2, PANEL_WIDTH, 2)
        weight = weight.contiguous()
        addresses = weight.data_ptr(), self._panels.data_ptr()
        library.pack(*addresses, self.outputs, self.inputs, torch.get_num_threads())

    def data_ptr(self) -> int:
        """The address of the panels."""
        return self._panels.data_ptr()

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply `rows`, [..., in], to [..., out]; `bias` is [out].

        Raises RuntimeError, like torch's linear layers, if the size or dtype does not match.
        """
        if rows.dtype != torch.bfloat16 or rows.shape[-1] != self.inputs:
            expected = f"[..., {self.inputs}] of torch.bfloat16"
            raise RuntimeError(f"rows are {list(rows.shape)} of {rows.dtype}, not {expected}")
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self.outputs)
        bias_address = None if bias is None else bias.data_ptr()
        addresses = rows.data_ptr(), self._panels.data_ptr(), bias_address, out.data_ptr()
        sizes = rows.numel() // self.inputs, self.inputs, self.outputs
        self._library.multiply(*addresses, *sizes, torch.get_num_threads())
        return out


PackedWeight: TypeAlias = OnednnWeight | PanelWeight


def pack(weight: Tensor) -> PackedWeight:
    """Pack a weight [out, in]; `can_pack` must be true for its dtype."""
    kernel = panel_kernel() if weight.dtype == torch.bfloat16 else None
    if kernel is not None and weight.shape[1] % kernel[0].step == 0:
        return PanelWeight(*kernel, weight)
    return OnednnWeight(weight)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of `dtype` with correct results."""
    try:
        return _is_correct(OnednnWeight, dtype)
    except (AttributeError, RuntimeError) as error:  # no such operator, or not for this dtype
        logger.info("weights are not packed, which is slower: %s", described(error))
        return False


@functools.cache
def panel_kernel() -> tuple[Variant, ctypes.CDLL] | None:
    """The fastest usable variant of gemm.c and its library; None if the CPU supports none."""
    cpu_features = compiler.cpu_features().split()
    for variant in VARIANTS:
        if variant.cpu_feature in cpu_features:
            check = functools.partial(_reproduces_matmul, variant)
            library = compiler.load("gemm.c", ARGUMENTS, variant.defines, check=check)
            if library is not None:
                return variant, library
    return None


def _reproduces_matmul(variant: Variant, library: ctypes.CDLL) -> bool:
    return _is_correct(functools.partial(PanelWeight, variant, library), torch.bfloat16)


def _is_correct(make: Callable[[Tensor], PackedWeight], dtype: torch.dtype) -> bool:
    """Whether a weight packed by `make` gives the outputs of a plain matmul."""
    # Full and partial panels and blocks of all variants of gemm.c.
    weight = torch.linspace(-1, 1, 80 * 64).reshape(80, 64).to(dtype)
    rows = torch.linspace(-1, 1, 41 * 64).reshape(41, 64).to(dtype)
    bias = torch.ones(80, dtype=dtype)
    out, expected = make(weight).multiply(rows, bias), functional.linear(rows, weight, bias)
    return torch.allclose(out, expected, rtol=0.02 if dtype != torch.float32 else 1e-5, atol=1e-4)
