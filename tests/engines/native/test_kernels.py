"""What is compiled gives what torch's operators give, and torch does it where nothing compiles."""

from __future__ import annotations

import copy
import ctypes
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peralta_zmq.engines.native import decoder
from peralta_zmq.engines.native.cache import KVCache, RowWindow
from peralta_zmq.engines.native.kernels import compiler, decode_layer, gemm

ROWS, HEADS, COMMON, CAPACITY = 5, 2, 70, 160
SPANS = [[0, 70], [3, 70], [3, 9], [0, 0], [69, 70]]
OWN = [130, 0, 63, 64, 100]  # blocks are of 64
CPU = torch.device("cpu")
HAS_COMPILER = sys.platform == "linux" and shutil.which("cc") is not None
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: Any) -> torch.dtype:
    return request.param


class Drawn:
    """The same numbers for both ways, and a cache that is full of them."""

    def __init__(self, dtype: torch.dtype, shared: int, width: int, *, normed: bool) -> None:
        self._chance, self._dtype = torch.Generator().manual_seed(0), dtype
        self.cache = KVCache(
            num_layers=2, num_rows=ROWS + 1, num_heads=HEADS, capacity=CAPACITY, head_dim=width,
            dtype=dtype, device=CPU,
        )  # fmt: skip
        self.cache.widen(max(OWN) + 1)
        for rows in self.cache.layers[1]:
            rows.copy_(self(*rows.shape))
        self.cache.shared[1] = self(HEADS, COMMON, width), self(HEADS, COMMON, width)
        angles = torch.cat([6 * torch.rand(ROWS, 1, width // 2, generator=self._chance)] * 2, -1)
        self.turned = angles.cos().to(dtype), angles.sin().to(dtype)
        sizes = [shared * HEADS * width, HEADS * width, HEADS * width]
        self.asked = self(ROWS, 1, sum(sizes)).split(sizes, -1)  # as one product gives them
        self.start, self.end = torch.tensor(SPANS).T.contiguous()[..., None]
        self.own = torch.tensor(OWN)[:, None]
        self.layer = SimpleNamespace(layer_idx=1, scaling=0.2, head_dim=width)
        if normed:
            self.layer.q_norm, self.layer.k_norm = self.norm(width), self.norm(width)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._chance).to(self._dtype)

    def norm(self, width: int) -> Any:
        return SimpleNamespace(weight=self(width), variance_epsilon=1e-6)

    def compiled(self, library: Any) -> decode_layer.CompiledLayerOps:
        return decode_layer.CompiledLayerOps(
            library,
            self.cache,
            1,
            rotary=self.turned,
            span=(self.start, self.end),
            columns=self.own,
        )

    def by_torch(self) -> decoder.TorchLayerOps:
        unseen = torch.cat([
            (torch.arange(COMMON) < self.start) | (torch.arange(COMMON) >= self.end),
            torch.arange(self.cache.width) > self.own,
        ], -1)  # fmt: skip
        mask = torch.zeros(unseen.shape, dtype=self._dtype).masked_fill(unseen, -torch.inf)
        return decoder.TorchLayerOps(
            decoder.RotaryEmbedding(*self.turned), RowWindow(self.cache, 1, self.own),
            {"": mask[:, None, None]},
        )  # fmt: skip

    def in_float64(self) -> Drawn:
        """The same values in double precision: the reference that both ways are compared with."""
        exact = copy.copy(self)
        exact._dtype = torch.float64
        exact.cache = copy.copy(self.cache)
        exact.cache.layers = [tuple(rows.double() for rows in layer) for layer in self.cache.layers]
        exact.cache.shared = [tuple(part.double() for part in layer) for layer in self.cache.shared]
        cos, sin = self.turned
        exact.turned = cos.double(), sin.double()
        exact.asked = tuple(part.double() for part in self.asked)
        exact.layer = SimpleNamespace(**vars(self.layer))
        for name in {"q_norm", "k_norm"} & vars(self.layer).keys():
            norm = getattr(self.layer, name)
            weight, epsilon = norm.weight.double(), norm.variance_epsilon
            setattr(exact.layer, name, SimpleNamespace(weight=weight, variance_epsilon=epsilon))
        return exact


def is_as_exact_as_torch(ours: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> bool:
    """True if our largest error is at most four times the largest error of torch's operators.

    Both errors are measured against float64, because float32 results differ between processors
    (here 2.8e-6 from torch and 1.5e-6 from us in the worst case). One rounding step of the largest
    value is the least error that counts, for cases that torch computes exactly.
    """

    def error(result: torch.Tensor) -> float:
        return float((result.double() - exact).abs().max())

    rounding = torch.finfo(ours.dtype).eps * float(exact.abs().max())
    return error(ours) <= 4 * max(error(torchs), rounding)


def library(dtype: torch.dtype, shared: int = 2, width: int = 64) -> Any:
    if not HAS_COMPILER:
        pytest.skip("no C compiler for Linux here")
    found = decode_layer.library_for(dtype, CPU, queries_per_head=shared, width=width)
    assert found is not None
    return found


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("shared", "width"), [(1, 16), (2, 128), (3, 48), (2, 96), (4, 64), (8, 256)]
)
def test_attention_is_that_of_torch(
    shared: int, width: int, normed: bool, dtype: torch.dtype
) -> None:
    drawn = Drawn(dtype, shared, width, normed=normed)
    reference = drawn.in_float64()
    exact = reference.by_torch().attend(reference.layer, "", *reference.asked)
    ours = drawn.compiled(library(dtype, shared, width)).attend(drawn.layer, "", *drawn.asked)
    written = [each.clone() for each in drawn.cache.layers[1]]
    theirs = drawn.by_torch().attend(drawn.layer, "", *drawn.asked)
    assert is_as_exact_as_torch(ours, theirs, exact)
    for mine, its, exactly in zip(
        written, drawn.cache.layers[1], reference.cache.layers[1], strict=True
    ):
        assert is_as_exact_as_torch(mine, its, exactly)
    assert not any(each.any() for each in drawn.cache.layers[0])


def test_norms_and_gates_are_those_of_torch(dtype: torch.dtype) -> None:
    drawn = Drawn(dtype, 2, 64, normed=False)
    ours, theirs = drawn.compiled(library(dtype)), drawn.by_torch()
    hidden, norm = 3 * drawn(ROWS, 1, 48), drawn.norm(48)
    assert torch.allclose(ours.norm(norm, hidden), theirs.norm(norm, hidden), rtol=CLOSE[dtype])
    gates, ups = (40 * drawn(ROWS, 1, 2 * 80)).split(80, -1)
    mlp = SimpleNamespace(act_fn=torch.nn.functional.silu)
    expected = theirs.gate(mlp, gates, ups)
    assert torch.allclose(ours.gate(mlp, gates, ups), expected, rtol=CLOSE[dtype], atol=1e-6)


def test_a_number_that_is_none_stays_none_and_in_its_row(dtype: torch.dtype) -> None:
    drawn = Drawn(dtype, 2, 64, normed=True)
    drawn.asked[0][1] = torch.nan
    drawn.asked[2][3, 0, 5] = torch.nan
    out = drawn.compiled(library(dtype)).attend(drawn.layer, "", *drawn.asked)
    assert out.isnan().any(-1).flatten().tolist() == [False, True, False, True, False]
    assert drawn.compiled(library(dtype)).norm(drawn.norm(256), out).isnan().any(-1).sum() == 2


def panels(weight: torch.Tensor) -> gemm.PanelWeight:
    if not (HAS_COMPILER and gemm.supports_panels(compiler.processor())):
        pytest.skip("no C compiler, or no processor for it here")
    packed = gemm.pack(weight)
    assert isinstance(packed, gemm.PanelWeight)
    return packed


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (62, 63), (64, 64), (96, 225)])
def test_panels_multiply_as_torch_does_however_many_the_rows(
    inputs: int, outputs: int, biased: bool
) -> None:
    chance = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(outputs, inputs + 1, generator=chance).bfloat16().split([inputs, 1], -1)
    )  # neither lies in one piece
    bias = bias[:, 0].contiguous() if biased else None
    packed = panels(weight)
    for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 13, 20, 41):
        rows = torch.randn(num_rows, inputs, generator=chance).bfloat16()
        exact = torch.nn.functional.linear(
            rows.double(), weight.double(), None if bias is None else bias.double()
        )
        ours = packed.multiply(rows, bias).double()
        assert torch.allclose(ours, exact, rtol=2**-8, atol=1e-5)  # to the nearest


def test_a_row_has_the_same_product_among_others_and_threads() -> None:
    chance = torch.Generator().manual_seed(0)
    packed = panels(torch.randn(128, 512, generator=chance).bfloat16())
    rows = torch.randn(3, 16, 512, generator=chance).bfloat16()
    threads, together = torch.get_num_threads(), packed.multiply(rows, None)
    try:
        torch.set_num_threads(5)  # more than panels
        assert torch.equal(packed.multiply(rows, None), together)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(packed.multiply(rows[:, 8:9], None), together[:, 8:9])


def test_a_product_with_what_is_none_is_none() -> None:
    weight, rows = torch.ones(70, 64).bfloat16(), torch.ones(8, 64).bfloat16()
    weight[66, 3] = rows[7, 5] = torch.nan
    none = panels(weight).multiply(rows, None).isnan()
    assert none[7].all() and none[:, 66].all() and none.sum() == 70 + 7


@pytest.mark.parametrize("rows", [torch.ones(2, 64), torch.ones(2, 62).bfloat16()])
def test_rows_that_do_not_fit_are_refused(rows: torch.Tensor) -> None:
    packed = panels(torch.ones(4, 64).bfloat16())
    with pytest.raises(RuntimeError, match=r"rows are \[2, 6[24]\] of .*, not \[..., 64\]"):
        packed.multiply(rows, None)


def test_panels_are_for_processors_with_pairs_and_no_tiles() -> None:
    assert gemm.supports_panels("flags : avx512f avx512_bf16 sse")
    assert not gemm.supports_panels("flags : avx512f avx512_bf16 amx_bf16")
    assert not gemm.supports_panels("flags : avx512f") and not gemm.supports_panels("")


def test_what_panels_have_no_case_for_is_multiplied_by_onednn() -> None:
    if not gemm.can_pack(torch.bfloat16):
        pytest.skip("this build cannot pack")
    assert isinstance(gemm.pack(torch.ones(4, 3).bfloat16()), gemm.OnednnWeight)
    assert isinstance(gemm.pack(torch.ones(4, 4)), gemm.OnednnWeight)


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A home of its own; returns the folder of its programs."""
    if sys.platform != "linux":
        pytest.skip("elsewhere nothing is compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    cached = (decode_layer.library_for, gemm.panel_library)
    for each in cached:
        each.cache_clear()
    yield tmp_path
    for each in cached:
        each.cache_clear()


def test_without_a_compiler_torch_does_it(
    nothing_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert decode_layer.library_for(torch.float32, CPU, queries_per_head=2, width=64) is None
    assert "decode_layer.c is not compiled, which is slower: no C compiler here (cc)" in caplog.text


@pytest.fixture
def for_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that gemm.c is for, whatever this one is."""
    if not gemm.can_pack(torch.bfloat16):
        pytest.skip("this build cannot pack")
    monkeypatch.setattr(compiler, "processor", lambda: "flags : avx512_bf16")


def test_without_a_compiler_onednn_multiplies(
    nothing_built: Path, for_panels: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(gemm.pack(torch.ones(4, 4).bfloat16()), gemm.OnednnWeight)
    assert "gemm.c is not compiled, which is slower: no C compiler here" in caplog.text


def test_panels_that_multiply_wrongly_are_not_used(
    nothing_built: Path, for_panels: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def multiply(rows: int, packed: int, bias: int, out: int, num: int, *sizes: int) -> None:
        ctypes.memset(out, 0, 2 * num * sizes[1])

    wrong = SimpleNamespace(pack=lambda *_: None, multiply=multiply)
    monkeypatch.setattr(compiler, "load", lambda *_: wrong)
    assert isinstance(gemm.pack(torch.ones(4, 4).bfloat16()), gemm.OnednnWeight)
    assert "gemm.c is not used, which is slower: its results differ" in caplog.text


def test_a_processor_that_says_nothing_of_itself_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(*_: Any) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", hidden)
    assert compiler.processor() == ""


@pytest.fixture
def built_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Path]:
    """Looks for a small program's library in a home of its own, and builds it if need be."""
    if not HAS_COMPILER:
        pytest.skip("no C compiler for Linux here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (source := tmp_path / "two.c").write_text("int two(void) { return 2; }\n")
    return lambda: compiler._compiled(source, ())


@pytest.mark.parametrize("kept", [0, 0.5, 1], ids=["empty", "cut", "zeroed"])
def test_a_damaged_library_is_built_anew(built_here: Callable[[], Path], kept: float) -> None:
    content = (damaged := built_here()).read_bytes()
    assert built_here() == damaged
    zeroed = content[:4096] + bytes(4096) + content[8192:]
    assert zeroed != content
    damaged.write_bytes(zeroed[: int(kept * len(content))])
    assert built_here().read_bytes() == content
    assert [each.suffix for each in damaged.parent.iterdir()] == [".so"]
    assert ctypes.CDLL(str(built_here())).two() == 2


def test_a_machine_with_another_c_library_has_a_library_of_its_own(
    built_here: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = built_here()
    monkeypatch.setattr(compiler.platform, "libc_ver", lambda: ("glibc", "2.17"))
    assert built_here() != here and here.exists()


def test_a_compiler_that_fails_is_named_with_its_reason(
    nothing_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = nothing_built / "cc"
    compiler.write_text("#!/bin/sh\necho stdint.h: No such file >&2\nexit 1\n")
    compiler.chmod(0o755)
    with caplog.at_level(logging.INFO):
        assert decode_layer.library_for(torch.float32, CPU, queries_per_head=2, width=64) is None
    assert f"{compiler} fails (stdint.h: No such file)" in caplog.text
    assert not list(nothing_built.rglob("*.so"))


@pytest.mark.parametrize(("shared", "width"), [(2, 24), (2, 272), (9, 64)])
def test_other_shapes_are_left_to_torch(shared: int, width: int) -> None:
    assert (
        decode_layer.library_for(torch.float32, CPU, queries_per_head=shared, width=width) is None
    )
