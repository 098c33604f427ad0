"""RMS norm and rotary embedding against float64 and transformers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from exactness import is_as_exact_as_torch
from sample_data import tiny_model
from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from peralta_zmq import compiler
from peralta_zmq.models import layer_ops
from peralta_zmq.models.layer_ops import replace_norms, rms_norm
from peralta_zmq.models.scorer import Scorer

EPSILON = 1e-3


def by_operations(rows: Tensor, weight: Tensor) -> Tensor:
    """The operations of transformers; in float64 the reference."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight * normalized.to(rows.dtype)


def results(function: Any, rows: Tensor, weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of rows and weight for a fixed gradient of the output."""
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    out = function(rows, weight)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(gradient.to(out.dtype))
    assert rows.grad is not None and weight.grad is not None
    return [out.detach(), rows.grad, weight.grad]


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the C code, if this machine has a compiler, and without it."""
    if request.param == "torch":
        layer_ops.use_operators(layer_ops.TORCH)
    yield
    layer_ops.use_operators(layer_ops.operators())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(1, 50, 192), (2, 7, 4, 48), (1, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_and_its_gradients_are_as_exact_as_transformers(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (3 * torch.randn(shape, generator=generator)).to(dtype)
    weight = torch.randn(shape[-1], generator=generator)
    exact = results(by_operations, rows.double(), weight.double())
    ours = results(lambda x, w: rms_norm(x, w, EPSILON), rows, weight)
    theirs = results(by_operations, rows, weight)
    for our, their, reference in zip(ours, theirs, exact, strict=True):
        assert our.dtype == their.dtype
        assert is_as_exact_as_torch(our, their, reference)


def rotated(function: Any, dtype: torch.dtype, computed_in: torch.dtype) -> list[Tensor]:
    """Rotated queries and keys of two sequences, whose values `dtype` has, and their gradients."""
    random = torch.Generator().manual_seed(0)
    # In the order of memory of transformers: [batch, tokens, heads, width].
    shapes = (2, 7, 4, 24), (2, 7, 2, 24)
    inputs = [torch.randn(shape, generator=random).to(dtype).to(computed_in) for shape in shapes]
    for each in inputs:
        each.requires_grad_()
    wide = torch.promote_types(computed_in, torch.float32)
    angles = 6 * torch.rand(1, 7, 24, generator=random).to(wide)
    out = function(*(each.transpose(1, 2) for each in inputs), angles.cos(), angles.sin())
    gradients = [torch.randn(each.shape, generator=random).to(wide) for each in out]
    torch.autograd.backward(out, gradients)
    return [*(each.detach() for each in out), *(cast(Tensor, each.grad) for each in inputs)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotary_embedding_and_its_gradients_are_as_exact_as_transformers(
    dtype: torch.dtype,
) -> None:
    theirs = original_of(modeling_qwen3)
    exact = rotated(theirs, dtype, torch.float64)
    reference = rotated(theirs, dtype, dtype)
    ours = rotated(partial(layer_ops.rotary_embedding, theirs), dtype, dtype)
    for our, their, value in zip(ours, reference, exact, strict=True):
        assert our.dtype == their.dtype and our.shape == their.shape
        assert is_as_exact_as_torch(our, their, value)


def original_of(module: Any) -> Any:
    """transformers' function, although another test may have replaced it."""
    function = getattr(module, layer_ops.ROTARY)
    return function.args[0] if isinstance(function, partial) else function


@pytest.mark.parametrize("module", [modeling_qwen3, modeling_qwen2, modeling_llama])
def test_scorer_replaces_the_rotary_embedding(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = original_of(module)
    monkeypatch.setattr(module, layer_ops.ROTARY, original)
    model = tiny_model(model_type=module.__name__.split("_")[-1])
    Scorer(model)
    replaced = getattr(module, layer_ops.ROTARY)
    assert replaced.args == (original,) and layer_ops.replace_rotary(model) == 1
    assert getattr(module, layer_ops.ROTARY) is replaced


def with_half_width(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """As of gpt_oss, whose cosines have half the width of a head."""
    halves = [each.chunk(2, -1) for each in (q, k)]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return [torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in halves]


def in_its_dtype(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """As of OLMo, whose results have the dtype of the queries."""
    out = original_of(modeling_qwen3)(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return [each.to(q.dtype) for each in out]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, cos, sin, position_ids=None: (q, k),
        lambda q, k, cos, sin, unsqueeze_dim=1: (q, k),
        with_half_width,
        in_its_dtype,
    ],
)
def test_other_rotary_embedding_is_not_replaced(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_qwen3, layer_ops.ROTARY, function)
    assert layer_ops.replace_rotary(tiny_model()) == 0
    assert getattr(modeling_qwen3, layer_ops.ROTARY) is function


@pytest.mark.parametrize(
    ("heads", "key_tokens", "angles", "options"),
    [
        ((2, 4, 7, 24), 7, (2, 7, 24), {}),  # other positions in each sequence
        ((2, 4, 7, 24), 7, (1, 7, 16), {}),  # partial: transformers raises an error
        ((2, 7, 4, 24), 7, (2, 7, 24), {"unsqueeze_dim": 2}),
        ((1, 4, 7, 24), 7, (2, 7, 24), {}),
        ((1, 4, 3, 24), 7, (1, 7, 24), {}),  # fewer queries than keys: an error, too
        ((1, 4, 7, 24), 7, (7, 24), {"unsqueeze_dim": 0}),
        ((1, 4, 7, 5), 7, (1, 7, 5), {}),
    ],
)
@pytest.mark.parametrize("angle_dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding_of_any_shape_has_the_result_of_transformers(
    heads: tuple[int, ...],
    key_tokens: int,
    angles: tuple[int, ...],
    options: dict[str, int],
    angle_dtype: torch.dtype,
) -> None:
    random = torch.Generator().manual_seed(0)
    keys = heads if "unsqueeze_dim" in options else (*heads[:2], key_tokens, heads[3])
    q, k, cos, sin = (
        torch.randn(shape, generator=random) for shape in (heads, keys, angles, angles)
    )
    inputs = q, k, cos.to(angle_dtype), sin.to(angle_dtype)
    theirs = original_of(modeling_qwen3)
    try:
        expected = theirs(*inputs, **options)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            layer_ops.rotary_embedding(theirs, *inputs, **options)
        return
    for ours, reference in zip(
        layer_ops.rotary_embedding(theirs, *inputs, **options), expected, strict=True
    ):
        assert ours.dtype == reference.dtype and ours.shape == reference.shape
        # Two products and a sum of values below 20: a few rounding steps of the largest.
        assert torch.allclose(ours, reference, rtol=0, atol=1e-5)


def test_scorer_replaces_the_norms_of_qwen3_but_not_of_gemma() -> None:
    model = tiny_model()
    Scorer(model)
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    assert norms and all(type(norm).forward is not norm.forward for norm in norms)
    assert replace_norms(tiny_model(model_type="gemma")) == 0


@pytest.fixture
def compile_all_but(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that lets the compiler fail for commands with `options`; the cache is empty."""
    real = shutil.which("cc")
    if sys.platform != "linux" or real is None:
        pytest.skip("no C compiler for Linux here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiler.INSTRUCTION_SET, raising=False)

    def write(options: str) -> None:
        command = f'case "$*" in *"{options}"*) exit 1;; esac; PATH=/usr/bin:/bin exec {real} "$@"'
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / "cc").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        layer_ops.operators.cache_clear()

    yield write
    monkeypatch.undo()
    layer_ops.operators.cache_clear()
    layer_ops.use_operators(layer_ops.operators())


@pytest.mark.parametrize("options", ["-DSCALAR_IS_BF16", "-march=native -I"])
def test_operators_are_torchs_unless_the_libraries_of_all_dtypes_load(
    compile_all_but: Any, options: str
) -> None:
    """The name of the operators in a journal must be enough to load them again."""
    compile_all_but(options)
    assert layer_ops.operators() == layer_ops.TORCH
    layer_ops.use_operators(layer_ops.operators())
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(3, 8).to(dtype).requires_grad_()
        norm: Any = rms_norm(rows, torch.ones(8), EPSILON)
        assert norm.grad_fn.library is None
