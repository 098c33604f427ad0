"""Packed weights: stored in the memory order that this machine multiplies fastest.

Either in oneDNN's order, or in the panels of our C files: gemm.c for bfloat16, with AVX512-BF16 or
AMX, and gemm_float.c for float32. There, they beat oneDNN for every measured number of input rows
(products_vs_onednn_* of `bin/bench generation`). Each is checked against a plain matmul before use,
because torch's operators for oneDNN are private, and ours depend on the local compiler.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from peralta_zmq import compiler, models
from peralta_zmq.compiler import INT, INT64, POINTER
from peralta_zmq.errors import described

logger = logging.getLogger(__name__)
ARGUMENTS = {
    "pack": (POINTER, POINTER, INT64, INT64, INT),
    "multiply": (POINTER, POINTER, POINTER, POINTER, INT64, INT64, INT64, INT),
}


class Variant(NamedTuple):
    source: Path
    dtype: torch.dtype  # of weights and rows
    product_dtype: torch.dtype  # dtype in which numbers are multiplied
    cpu_feature: str  # needed to use it
    defines: tuple[str, ...]  # compiler options
    panel_width: int  # outputs per panel, as in the C file
    step: int  # the number of inputs of a weight must be a multiple of it


BF16 = torch.bfloat16
FP32 = torch.float32
GEMM, GEMM_FLOAT = (Path(__file__).with_name(name) for name in ("gemm.c", "gemm_float.c"))
VARIANTS = (
    Variant(GEMM, BF16, BF16, "amx_bf16", ("-DWITH_AMX",), panel_width=32, step=32),
    Variant(GEMM, BF16, BF16, "avx512_bf16", (), panel_width=32, step=2),
    Variant(GEMM, BF16, FP32, "avx512_bf16", ("-DWITH_FMA",), panel_width=32, step=2),
    Variant(GEMM_FLOAT, FP32, FP32, "avx2", (), panel_width=16, step=1),
)


class OnednnWeight:
    """A weight in the order of oneDNN."""

    def __init__(self, weight: Tensor) -> None:
        self.load(weight)

    def load(self, weight: Tensor) -> None:
        # 32: the number of input rows for which oneDNN optimizes the order.
        self._weight = cast(Any, torch.ops.mkldnn)._reorder_linear_weight(weight, 32)

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        operators = cast(Any, torch.ops.mkldnn)
        return operators._linear_pointwise(rows, self._weight, bias, "none", [], "")


class PanelWeight:
    """A weight [outputs, inputs] in the panels of a C file; `library` is that of `variant`."""

    def __init__(self, variant: Variant, library: ctypes.CDLL, weight: Tensor) -> None:
        self.library = library
        (self.outputs, self.inputs) = weight.shape
        num_panels = -(-self.outputs // variant.panel_width)  # rounded up
        self._panels = weight.new_empty(num_panels, self.inputs * variant.panel_width)
        self.load(weight)

    def load(self, weight: Tensor) -> None:
        """Replace the weight by one of the same shape and dtype, in the same memory."""
        weight = weight.contiguous()
        addresses = weight.data_ptr(), self._panels.data_ptr()
        self.library.pack(*addresses, self.outputs, self.inputs, torch.get_num_threads())

    def data_ptr(self) -> int:
        return self._panels.data_ptr()

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply `rows`, [..., in], to [..., out]; RuntimeError for another size or dtype."""
        if rows.dtype != self._panels.dtype or rows.shape[-1] != self.inputs:
            expected = f"[..., {self.inputs}] of {self._panels.dtype}"
            raise RuntimeError(f"rows are {list(rows.shape)} of {rows.dtype}, not {expected}")
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self.outputs)
        bias_address = None if bias is None else bias.data_ptr()
        addresses = rows.data_ptr(), self._panels.data_ptr(), bias_address, out.data_ptr()
        sizes = rows.numel() // self.inputs, self.inputs, self.outputs
        self.library.multiply(*addresses, *sizes, torch.get_num_threads())
        return out


PackedWeight: TypeAlias = OnednnWeight | PanelWeight


def pack(weight: Tensor) -> PackedWeight:
    """Pack a weight [out, in]; `can_pack` must be true for its dtype."""
    kernel = panel_kernel(weight.dtype)
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
def panel_kernel(dtype: torch.dtype) -> tuple[Variant, ctypes.CDLL] | None:
    """The fastest usable variant for `dtype` and its library; None if none can be used."""
    for variant in variants_for(dtype):

        def check(library: ctypes.CDLL, variant: Variant = variant) -> bool:
            return _is_correct(functools.partial(PanelWeight, variant, library), variant.dtype)

        library = compiler.load(variant.source, ARGUMENTS, variant.defines, check=check)
        if library is not None:
            return variant, library
    return None


def variants_for(dtype: torch.dtype) -> list[Variant]:
    """The variants for `dtype` that suit this CPU, the fastest one first."""
    features = compiler.cpu_features().split()
    product_dtype = BF16 if dtype == BF16 and models.multiplies_bf16_faster() else FP32
    return [
        each for each in VARIANTS
        if (each.dtype, each.product_dtype) == (dtype, product_dtype)
        and each.cpu_feature in features
    ]  # fmt: skip


def _is_correct(make: Callable[[Tensor], PackedWeight], dtype: torch.dtype) -> bool:
    # Full and partial panels and blocks of all variants.
    weight = torch.linspace(-1, 1, 80 * 64).reshape(80, 64).to(dtype)
    rows = torch.linspace(-1, 1, 41 * 64).reshape(41, 64).to(dtype)
    bias = torch.ones(80, dtype=dtype)
    out = make(weight).multiply(rows, bias)
    expected = functional.linear(rows, weight, bias)
    return torch.allclose(out, expected, rtol=0.02 if dtype != torch.float32 else 1e-5, atol=1e-4)
