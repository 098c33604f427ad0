"""Compiled kernels against torch and float64; fallbacks without a compiler."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_layers import SCALES, Layer, assert_norm_and_gate_are_as_exact_as_torchs
from exactness import is_as_exact_as_torch

from peralta_zmq import compiler, models
from peralta_zmq.engines.native.kernels import decode_layer, gemm

CPU = torch.device("cpu")
COMPILER = shutil.which("cc") if sys.platform == "linux" else None
AMX_TILES = Path(__file__).with_name("amx_tiles.h")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: Any) -> torch.dtype:
    return request.param


def library(dtype: torch.dtype, group: int = 2, width: int = 64) -> Any:
    if not COMPILER or os.environ.get(compiler.INSTRUCTION_SET) == "none":
        pytest.skip("no C compiler for Linux here, or PERALTA_KERNELS is none")
    found = decode_layer.library_for(dtype, CPU, queries_per_head=group, head_dim=width)
    assert found is not None
    return found


@pytest.mark.parametrize(("normed", "new_tokens"), [(False, 1), (True, 1), (True, 30)])
@pytest.mark.parametrize(
    ("group", "width"), [(1, 16), (2, 128), (3, 48), (2, 96), (4, 64), (8, 256)]
)
def test_attention_is_as_exact_as_torchs(
    group: int, width: int, normed: bool, new_tokens: int, dtype: torch.dtype
) -> None:
    layer = Layer(dtype, group, width, normed=normed, new_tokens=new_tokens)
    exact_layer = layer.in_float64()
    exact = exact_layer.torch_ops().attend(exact_layer.module, "", *exact_layer.inputs)
    ours = layer.compiled_ops(library(dtype, group, width)).attend(layer.module, "", *layer.inputs)
    written = [part.clone() for part in layer.cache.layers[1]]
    torchs = layer.torch_ops().attend(layer.module, "", *layer.inputs)
    assert is_as_exact_as_torch(ours, torchs, exact)
    for parts in zip(written, layer.cache.layers[1], exact_layer.cache.layers[1], strict=True):
        assert is_as_exact_as_torch(*parts)
    assert not any(part.any() for part in layer.cache.layers[0])


@pytest.mark.parametrize("scale", SCALES)
def test_norm_and_gate_are_as_exact_as_torchs(scale: float, dtype: torch.dtype) -> None:
    assert_norm_and_gate_are_as_exact_as_torchs(library(dtype), dtype, scale)


def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    layer = Layer(dtype, 2, 64, normed=True)
    query, _, value = layer.inputs
    query[1] = value[3, 0, 5] = torch.nan
    ops = layer.compiled_ops(library(dtype))
    out = ops.attend(layer.module, "", *layer.inputs)
    assert out.isnan().any(-1).flatten().tolist() == [False, True, False, True, False]
    assert ops.norm(layer.norm(256), out).isnan().any(-1).sum() == 2


@pytest.mark.parametrize(("group", "width"), [(2, 24), (2, 272), (9, 64)])
def test_unsupported_head_shapes_are_left_to_torch(group: int, width: int) -> None:
    assert (
        decode_layer.library_for(torch.float32, CPU, queries_per_head=group, head_dim=width) is None
    )


@pytest.fixture(params=["amx", "amx_emulated", "avx512_bf16", "fma", "avx2"])
def make_panels(
    request: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Callable[[torch.Tensor], gemm.PanelWeight]:
    """Packs a weight for one variant."""
    variants = dict(zip(["amx", "avx512_bf16", "fma", "avx2"], gemm.VARIANTS, strict=True))
    is_emulated = request.param == "amx_emulated"
    variant = variants["amx" if is_emulated else request.param]
    source, needed_feature = variant.source, variant.cpu_feature
    if is_emulated:
        # One file, because the name of a library in the cache depends on the content of the file.
        content = [AMX_TILES.read_text("utf-8"), source.read_text("utf-8")]
        source, needed_feature = tmp_path / source.name, "avx512_bf16"
        source.write_text("".join(content), "utf-8")
    if not COMPILER or needed_feature not in compiler.cpu_features().split():
        pytest.skip(f"no C compiler, or no {needed_feature}")
    with caplog.at_level(logging.INFO):
        library = compiler.load(source, gemm.ARGUMENTS, variant.defines, check=lambda library: True)
    if library is None:
        assert compiler.INSTRUCTION_SET in os.environ, caplog.text
        assert "cannot execute" not in caplog.text
        pytest.skip("PERALTA_KERNELS excludes this variant")
    return functools.partial(gemm.PanelWeight, variant, library)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("least", "outputs"), [(2, 1), (62, 63), (64, 64), (66, 225)])
def test_panels_multiply_exactly_for_any_number_of_rows(
    make_panels: Callable[[torch.Tensor], gemm.PanelWeight],
    least: int, outputs: int, biased: bool,
) -> None:  # fmt: skip
    step, dtype = make_panels.args[0].step, make_panels.args[0].dtype
    inputs = -(-least // step) * step
    generator = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(outputs, inputs + 1, generator=generator).to(dtype).split([inputs, 1], -1)
    )  # neither is contiguous
    bias = bias[:, 0].contiguous() if biased else None
    packed = make_panels(weight)
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 32, 33, 41, 70, 96, 97, 200):
        rows = torch.randn(num_rows, inputs, generator=generator).to(dtype)
        exact_bias = None if bias is None else bias.double()
        exact = torch.nn.functional.linear(rows.double(), weight.double(), exact_bias)
        size = torch.nn.functional.linear(
            rows.double().abs(),
            weight.double().abs(),
            None if exact_bias is None else exact_bias.abs(),
        )
        # Each of the sums is rounded in float32, and the last one to `dtype`.
        allowed = (inputs + 1) * 2**-24 * size + torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((packed.multiply(rows, bias).double() - exact).abs() <= allowed).all()


def test_row_result_does_not_depend_on_other_rows_or_threads(
    make_panels: Callable[[torch.Tensor], gemm.PanelWeight],
) -> None:
    generator, dtype = torch.Generator().manual_seed(0), make_panels.args[0].dtype
    packed = make_panels(torch.randn(128, 512, generator=generator).to(dtype))
    rows = torch.randn(3, 16, 512, generator=generator).to(dtype)
    threads, together = torch.get_num_threads(), packed.multiply(rows, None)
    try:
        torch.set_num_threads(5)  # more than panels
        assert torch.equal(packed.multiply(rows, None), together)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(packed.multiply(rows[:, 8:9], None), together[:, 8:9])


def test_panels_propagate_nan(make_panels: Callable[[torch.Tensor], gemm.PanelWeight]) -> None:
    dtype = make_panels.args[0].dtype
    weight, rows = torch.ones(70, 64).to(dtype), torch.ones(8, 64).to(dtype)
    weight[66, 3] = rows[7, 5] = torch.nan
    is_nan = make_panels(weight).multiply(rows, None).isnan()
    assert is_nan[7].all() and is_nan[:, 66].all() and is_nan.sum() == 70 + 7


def test_panels_reject_rows_of_another_shape_or_dtype(
    make_panels: Callable[[torch.Tensor], gemm.PanelWeight],
) -> None:
    dtype = make_panels.args[0].dtype
    packed = make_panels(torch.ones(4, 64).to(dtype))
    for rows in (torch.ones(2, 64).half(), torch.ones(2, 62).to(dtype)):
        with pytest.raises(RuntimeError, match=r"rows are \[2, 6[24]\] of .*, not \[..., 64\]"):
            packed.multiply(rows, None)


AMX, PAIRS, FMA, FLOAT = gemm.VARIANTS


@pytest.mark.parametrize(
    ("features", "dtype", "is_bf16_faster", "variants"),
    [
        ("avx2 avx512_bf16 amx_bf16", torch.bfloat16, True, [AMX, PAIRS]),
        ("avx2 avx512_bf16", torch.bfloat16, True, [PAIRS]),
        ("avx2 avx512_bf16", torch.bfloat16, False, [FMA]),
        ("avx2 avx512_bf16", torch.float32, True, [FLOAT]),
        ("avx2 avx512_bf16", torch.float32, False, [FLOAT]),
        ("avx2", torch.bfloat16, True, []),
        ("avx2", torch.bfloat16, False, []),
    ],
)
def test_variants_suit_features_and_speed_of_the_processor(
    monkeypatch: pytest.MonkeyPatch,
    features: str, dtype: torch.dtype, is_bf16_faster: bool, variants: list[gemm.Variant],
) -> None:  # fmt: skip
    monkeypatch.setattr(compiler, "cpu_features", lambda: features)
    monkeypatch.setattr(models, "multiplies_bf16_faster", lambda: is_bf16_faster)
    assert gemm.variants_for(dtype) == variants


def test_pack_uses_onednn_where_panels_do_not_apply() -> None:
    if not gemm.can_pack(torch.bfloat16):
        pytest.skip("this build cannot pack")
    assert isinstance(gemm.pack(torch.ones(4, 3).bfloat16()), gemm.OnednnWeight)
    if gemm.can_pack(torch.float16):  # no panels in this dtype
        assert isinstance(gemm.pack(torch.ones(4, 4).half()), gemm.OnednnWeight)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty library cache and a PATH without a compiler; returns the folder of both."""
    if sys.platform != "linux":
        pytest.skip("kernels are compiled on Linux only")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    if os.environ.get(compiler.INSTRUCTION_SET) == "none":  # would leave nothing to compile
        monkeypatch.delenv(compiler.INSTRUCTION_SET)
    cached = (decode_layer.library_for, gemm.panel_kernel)
    for each in cached:
        each.cache_clear()
    yield tmp_path
    for each in cached:
        each.cache_clear()


@pytest.fixture
def compile_with(empty_cache: Path) -> Callable[..., None]:
    """A function that puts a compiler into PATH that includes a header before each file."""
    if not COMPILER:
        pytest.skip("no C compiler for Linux here")
    compiler, header = empty_cache / "cc", empty_cache / "first.h"

    def write(*lines: str) -> None:
        header.write_text("".join(f"{line}\n" for line in lines))
        cc, options = shlex.quote(COMPILER), f"-include {shlex.quote(str(header))}"
        compiler.write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin exec {cc} "$@" {options}\n')
        compiler.chmod(0o755)

    return write


def test_layer_ops_without_compiler_are_torchs(
    empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_not_compiled(torch.float32, "no C compiler here (cc)", caplog)


def assert_not_compiled(dtype: torch.dtype, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """torch's operators are used, and the only message has this reason."""
    with caplog.at_level(logging.INFO):
        assert decode_layer.library_for(dtype, CPU, queries_per_head=2, head_dim=64) is None
    (message,) = caplog.messages
    assert message.startswith("decode_layer.c is not used, which is slower: ")
    assert reason in message


@pytest.mark.parametrize(
    ("header", "dtype", "reason"),
    [
        (("#include <math.h>", "#define sqrtf(x) 1"), torch.float32, "differ from torch's"),
        pytest.param(("#include <math.h>", "#define rintf(x) 1"), torch.bfloat16,
                     "differ from torch's", marks=pytest.mark.slow),
        (("#include <signal.h>", "int probe(void) { return raise(SIGILL); }",
          "#define probe other_probe"), torch.float32, "cannot execute it (Illegal instruction)"),
        (("#include <missing.h>",), torch.float32, "cc fails (compilation terminated.)"),
    ],
    ids=str,
)  # fmt: skip
def test_layer_ops_of_a_compiler_with_defects_are_torchs(
    compile_with: Callable[..., None], header: tuple[str, ...], dtype: torch.dtype, reason: str,
    empty_cache: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    compile_with(*header)
    assert_not_compiled(dtype, reason, caplog)
    assert "cannot execute" in reason or "differ" in reason or not [*empty_cache.rglob("*.so")]


def test_cache_folder_that_cannot_be_written_leaves_torchs_layer_ops(
    compile_with: Callable[..., None], empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_with()
    (empty_cache / "peralta_zmq").write_text("not a folder")
    assert_not_compiled(torch.float32, "[Errno", caplog)


def test_pack_does_not_use_panels_of_a_compiler_with_defects(
    compile_with: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    variants = gemm.variants_for(torch.bfloat16)
    if not variants or compiler.INSTRUCTION_SET in os.environ:
        pytest.skip("gemm.c does not support this processor")
    swapped = "#define _mm512_cvtne2ps_pbh(a, b) _mm512_cvtne2ps_pbh(b, a)"
    compile_with("#include <immintrin.h>", swapped)
    assert isinstance(gemm.pack(torch.ones(4, 32).bfloat16()), gemm.OnednnWeight)
    reason = "gemm.c is not used, which is slower: its results differ from torch's"
    assert caplog.messages == len(variants) * [reason]


@pytest.fixture
def compile_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Path]:
    """A function that compiles a small library into an empty cache folder, or finds it there."""
    if not COMPILER:
        pytest.skip("no C compiler for Linux here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (source := tmp_path / "two.c").write_text("int two(void) { return 2; }\n")
    return lambda: compiler._compiled(source, ())


@pytest.mark.parametrize("kept_part", [0, 0.5, 1], ids=["empty", "cut", "zeroed"])
def test_damaged_library_is_compiled_again(
    compile_library: Callable[[], Path], kept_part: float
) -> None:
    content = (damaged := compile_library()).read_bytes()
    assert compile_library() == damaged
    zeroed = content[:64] + bytes(len(content) - 64)  # only the ELF header is left
    damaged.write_bytes(zeroed[: int(kept_part * len(content))])
    assert compile_library().read_bytes() == content
    assert [each.suffix for each in damaged.parent.iterdir()] == [".so"]
    assert ctypes.CDLL(str(compile_library())).two() == 2


@pytest.mark.parametrize(
    ("name", "value"), [("libc_ver", ("glibc", "2.17")), ("machine", "riscv64")]
)
def test_another_c_library_or_architecture_gets_its_own_library(
    compile_library: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    here = compile_library()
    monkeypatch.setattr(compiler.platform, name, lambda: value)
    assert compile_library() != here and here.exists()
