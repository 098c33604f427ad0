"""RMS norm and rotary embedding with faster backward passes, for training on a CPU.

transformers computes RMS norm (arXiv 1910.07467) with six operations and rotary embedding
(RoFormer, arXiv 2104.09864) with five, each of which reads and writes whole rows. The C code of
layer_ops.c makes one pass forward and one backward. The two ways round differently:
`use_operators` chooses the way that a repeated step was taken.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.models.llama import modeling_llama

from peralta_zmq import compiler
from peralta_zmq.compiler import FLOAT, INT, INT64, POINTER
from peralta_zmq.models.logprobs import compute_dtype

SOURCE = Path(__file__).with_name("layer_ops.c")
DEFINES = {torch.float32: (), torch.bfloat16: ("-DSCALAR_IS_BF16",)}  # by the dtype of the rows
# Types of the arguments of the C functions.
ARGUMENTS = {
    "norm": (*[POINTER] * 4, INT64, INT64, FLOAT, INT),
    "norm_backward": (*[POINTER] * 6, INT64, INT64, INT),
    "rotate": (*[POINTER] * 4, INT64, INT64, INT64, INT),
}
TORCH = "torch"  # name of the operators without C code
ROTARY = "apply_rotary_pos_emb"  # name of the function in transformers' modules
LLAMA_ROTARY = modeling_llama.apply_rotary_pos_emb  # transformers', which `replace_rotary` replaces


def replace_norms(model: torch.nn.Module) -> int:
    """Let RMS norms of a transformers model compute with `rms_norm`; returns their number.

    Only norms on a CPU with the code of Llama's, not distributed over ranks.
    """

    def forward(module: Any, rows: Tensor) -> Tensor:
        return rms_norm(rows, module.weight, module.variance_epsilon)

    num_replaced = 0
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        is_plain = type(weight) is torch.nn.Parameter and weight.device.type == "cpu"
        if is_plain and _has_code(type(module).forward, modeling_llama.LlamaRMSNorm.forward):
            cast(Any, module).forward = partial(forward, module)
            num_replaced += 1
    return num_replaced


def _has_code(function: Any, known: Any) -> bool:
    """Whether a function of transformers is a copy of `known`, apart from its docstring."""
    ours, theirs = (getattr(inspect.unwrap(each), "__code__", None) for each in (function, known))
    return ours is not None and theirs is not None and _code_of(ours) == _code_of(theirs)


def _code_of(code: CodeType) -> tuple[object, ...]:
    constants = tuple(each for each in code.co_consts if not isinstance(each, str))
    return code.co_code, code.co_names, code.co_varnames, constants


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Each row of `rows` [..., W], divided by sqrt(mean(row^2) + epsilon), times `weight` [W].

    A row is divided in fp32 or float64, and rounded to its dtype before it is multiplied.
    """
    return _RMSNorm.apply(rows, weight, epsilon)  # pyright: ignore[reportReturnType]


class _RMSNorm(torch.autograd.Function):
    """With f = 1 / sqrt(mean(x^2) + epsilon), the output is y = f x w.

    For the gradient g of y, that of x is f g w - f^3 x mean(g w x), and that of w is sum(f g x).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        is_plain = weight.dtype == torch.float32 and weight.shape == rows.shape[-1:]
        ctx.library = _library_for(rows) if is_plain and weight.is_contiguous() else None
        if ctx.library is None:
            out, factor = _norm(rows, weight, epsilon)
        else:
            rows = rows.contiguous()
            out = rows.new_empty(rows.shape, dtype=torch.float32)
            factor = out.new_empty((*rows.shape[:-1], 1))
            addresses = _addresses(rows, weight, out, factor)
            threads = torch.get_num_threads()
            ctx.library.norm(*addresses, factor.numel(), rows.shape[-1], epsilon, threads)
        ctx.save_for_backward(rows, weight, factor)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        rows, weight, factor = ctx.saved_tensors
        if ctx.library is None:
            return *_norm_gradients(rows, weight, factor, grads[0]), None
        threads = torch.get_num_threads()
        width = rows.shape[-1]
        grad = grads[0].contiguous()
        rows_grad = torch.empty_like(rows)
        sums = grad.new_empty(threads, width)
        addresses = _addresses(rows, weight, factor, grad, rows_grad, sums)
        ctx.library.norm_backward(*addresses, factor.numel(), width, threads)
        return rows_grad, sums.sum(0), None


def _norm(rows: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The output of `rms_norm` and the factor [..., 1] of each row, by torch's operators."""
    x = rows.to(compute_dtype(rows))
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    factor = (squares / x.shape[-1] + epsilon).rsqrt_()
    return (x * factor).to(rows.dtype) * weight, factor


def _norm_gradients(
    rows: Tensor, weight: Tensor, factor: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    x, g, w = (each.to(compute_dtype(rows)) for each in (rows, grad, weight))
    products = (g * x).reshape(-1, x.shape[-1])
    weight_grad = factor.view(1, -1) @ products
    mean = (products @ w).view(factor.shape) / x.shape[-1]
    rows_grad = (g * w).mul_(factor).addcmul_(x, factor.pow(3).mul_(mean), value=-1)
    return rows_grad.to(rows.dtype), weight_grad[0].to(weight.dtype)


def replace_rotary(model: torch.nn.Module) -> int:
    """Let the attention of a transformers model on a CPU rotate with layer_ops.c.

    Replaces the function of its Python module, for all models of the family in this process, if it
    has the code of Llama's. Returns the number of modules with a replaced function.
    """
    num_replaced = 0
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return num_replaced
    for name in sorted({type(module).__module__ for module in model.modules()}):
        module: Any = sys.modules.get(name)
        theirs: Any = getattr(module, ROTARY, None)
        is_ours = isinstance(theirs, partial) and theirs.func is rotary_embedding
        is_known = _has_code(theirs, LLAMA_ROTARY) and _has_code(
            getattr(module, "rotate_half", None), modeling_llama.rotate_half
        )
        if is_known and not is_ours:
            setattr(module, ROTARY, partial(rotary_embedding, theirs))
            is_ours = True
        num_replaced += is_ours
    return num_replaced


def rotary_embedding(
    theirs: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,  # [B, heads, T, D]
    k: Tensor,  # [B, key heads, T, D]
    cos: Tensor,  # [B or 1, T, D]
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Queries and keys with rotary embedding; `theirs` is transformers' function."""
    is_supported = (
        unsqueeze_dim == 1
        and q.ndim == k.ndim == 4
        and cos.ndim == sin.ndim == 3
        and q.shape[0] == k.shape[0]
        and q.shape[2:] == k.shape[2:] == cos.shape[1:] == sin.shape[1:]
        and q.shape[-1] % 2 == 0
        and len(cos) == len(sin) in (1, len(q))
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype == torch.float32
        and not (cos.requires_grad or sin.requires_grad)
        and q.device == k.device == cos.device == sin.device
        and None not in (_library_for(q), _library_for(cos))  # the latter for the gradients
    )
    if not is_supported:
        return theirs(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)  # pyright: ignore


class _Rotation(torch.autograd.Function):
    """With a head's halves a and b, and those of cosines c and sines s: a c - b s and b c + a s.

    The gradient is rotated back.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.dtype = heads.dtype
        return _rotated(heads, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        back = -sines.roll(sines.shape[-1] // 2, -1)  # each half's sine, of the other half
        return _rotated(grads[0], cosines, back).to(ctx.dtype), None, None


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate heads [B, heads, T, D]; the result, in fp32, has the memory order [B, T, heads, D]."""
    rows = heads.transpose(1, 2).contiguous()
    batch, tokens, num_heads, width = rows.shape
    cosines, sines = (each.expand(batch, -1, -1).contiguous() for each in (cosines, sines))
    out = rows.new_empty(rows.shape, dtype=torch.float32)
    library = _library_for(rows)
    assert library is not None
    addresses = _addresses(rows, cosines, sines, out)
    threads = torch.get_num_threads()
    library.rotate(*addresses, batch * tokens, num_heads, width, threads)
    return out.transpose(1, 2)


def _addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _library_for(rows: Tensor) -> ctypes.CDLL | None:
    return _loaded[_in_use or operators()].get(rows.dtype) if rows.device.type == "cpu" else None


_loaded: dict[str, Mapping[torch.dtype, ctypes.CDLL]] = {TORCH: {}}  # libraries by operators
_in_use = ""  # name of the operators that `use_operators` has chosen; empty: those of `operators`


@cache
def operators() -> str:
    """Name of the operators of this machine: the files of the compiled libraries, or TORCH."""
    libraries = {
        dtype: compiler.load(SOURCE, ARGUMENTS, defines, check=partial(_is_correct, dtype=dtype))
        for dtype, defines in DEFINES.items()
    }
    found = {dtype: library for dtype, library in libraries.items() if library is not None}
    if len(found) < len(DEFINES):
        return TORCH
    name = " ".join(Path(library._name).name for library in found.values())  # pyright: ignore[reportPrivateUsage]
    _loaded[name] = found
    return name


def use_operators(name: str) -> None:
    """Compute with the operators of this name from now on.

    Raises OSError, RuntimeError or ValueError if a library cannot be used here.
    """
    global _in_use
    if name not in _loaded and name != operators():
        _loaded[name] = {
            dtype: compiler.load_again(file, ARGUMENTS, check=partial(_is_correct, dtype=dtype))
            for dtype, file in zip(DEFINES, name.split(), strict=True)
        }
    _in_use = name


def _is_correct(library: ctypes.CDLL, *, dtype: torch.dtype) -> bool:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 40, generator=random, device="cpu").to(dtype)
    weight, grad, cosines, sines = torch.randn(4, 6, 40, generator=random, device="cpu")
    expected, expected_factor = _norm(rows, weight[0], 1e-3)
    out = weight.new_empty(6, 40)
    factor = weight.new_empty(6, 1)
    sums = weight.new_empty(2, 40)
    rows_grad = torch.empty_like(rows)
    rotated = torch.empty_like(out)
    library.norm(*_addresses(rows, weight, out, factor), 6, 40, 1e-3, 2)
    library.norm_backward(*_addresses(rows, weight, factor, grad, rows_grad, sums), 6, 40, 2)
    library.rotate(*_addresses(rows, cosines, sines, rotated), 3, 2, 40, 2)  # two heads per row
    swapped = torch.cat([-rows[:, 20:], rows[:, :20]], -1)
    cosine, sine = (each[:3].repeat_interleave(2, 0) for each in (cosines, sines))
    expected_grads = _norm_gradients(rows, weight[0], expected_factor, grad)
    pairs = (
        (out, expected),
        (rows_grad, expected_grads[0]),
        (sums.sum(0), expected_grads[1]),
        (rotated, rows * cosine + swapped * sine),
    )
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    return all(
        torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)
        for ours, theirs in pairs
    )
