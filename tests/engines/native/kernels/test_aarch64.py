"""The C code of decode_layer.c on ARM: cross-compiled, and run under qemu-user."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_layers import ROWS, SCALES, Layer, assert_norm_and_gate_are_as_exact_as_torchs
from exactness import is_as_exact_as_torch

from peralta_zmq import compiler
from peralta_zmq.engines.native.kernels import decode_layer

CC, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
POINTERS = f"{decode_layer.INPUTS} {decode_layer.CACHES} out".split()


class EmulatedLibrary:
    """Functions of decode_layer.c, each call in an emulated process."""

    def __init__(self, folder: Path, dtype: torch.dtype, head_dim: int) -> None:
        self._program, self._item_size = folder / "emulated", dtype.itemsize
        kernels, driver = Path(decode_layer.__file__).parent, Path(__file__).with_name("emulated.c")
        defines = decode_layer.defines_for(dtype, head_dim)
        flags = (
            *compiler.FLAGS,
            f"-I{kernels}",
            f"-I{compiler.HEADER.parent}",
            "-static",
            "-o",
            str(self._program),
        )
        subprocess.run([CC, *flags, *defines, str(driver), "-lm"], check=True)

    def attend(self, argument: Any) -> None:
        attention = argument._obj  # of ctypes.byref
        sizes = self._sizes(attention)
        arrays = [(getattr(attention, name), sizes[name]) for name in POINTERS]
        result = self._run("attend", arrays, before=bytes(attention))
        for name in ("keys", "values", "out"):
            ctypes.memmove(getattr(attention, name), result[: sizes[name]], sizes[name])
            result = result[sizes[name] :]
        assert not result

    def norm(
        self, hidden: int, weight: int, out: int, rows: int, width: int, epsilon: float, _: int
    ) -> None:
        arrays = [(hidden, rows * width * self._item_size), (weight, width * self._item_size)]
        result = self._run("norm", arrays, rows, width, epsilon)
        ctypes.memmove(out, result, rows * width * self._item_size)

    def gate(
        self, gates: int, ups: int, out: int, rows: int, stride: int, width: int, _: int
    ) -> None:
        size = ((rows - 1) * stride + width) * self._item_size
        result = self._run("gate", [(gates, size), (ups, size)], rows, stride, width)
        ctypes.memmove(out, result, rows * width * self._item_size)

    def sum_blocks(
        self, logits: int, largest: int, sums: int, blocks: int, scale: float, _: int
    ) -> None:
        array = logits, blocks * decode_layer.BLOCK_SIZE * self._item_size
        result = self._run("sum_blocks", [array], blocks, scale)
        size = 4 * blocks  # bytes of each of the two results
        ctypes.memmove(largest, result[:size], size)
        ctypes.memmove(sums, result[size:], size)

    def _run(
        self, name: str, arrays: list[tuple[int, int]], *numbers: float, before: bytes = b""
    ) -> bytes:
        """Output of a function; `arrays` are addresses, 0 for NULL, and sizes in bytes."""
        request = before
        for address, size in arrays:
            data = ctypes.string_at(address, size) if address else b""
            request += len(data).to_bytes(8, "little") + data
        command = [QEMU, str(self._program), name, *map(str, numbers)]
        return subprocess.run(command, input=request, capture_output=True, check=True).stdout

    def _sizes(self, a: Any) -> dict[str, int]:
        """Bytes of each array."""
        tokens, row, last, scalars = a.tokens, a.heads * a.width, a.tokens - 1, {}
        scalars["query"] = last * a.query_stride + row * a.group
        scalars["key"], scalars["value"] = last * a.key_stride + row, last * a.value_stride + row
        scalars["query_norm"] = scalars["key_norm"] = a.width
        scalars["cosine"] = scalars["sine"] = tokens * a.width
        scalars["shared_keys"] = scalars["shared_values"] = row * a.shared
        scalars["keys"] = scalars["values"] = (ROWS + 1) * row * a.capacity
        scalars["out"] = tokens * row * a.group
        sizes = {name: self._item_size * number for name, number in scalars.items()}
        return sizes | dict.fromkeys(("row", "column", "start", "end"), 8 * tokens)


pytestmark = [
    pytest.mark.slow,  # compiles and emulates
    pytest.mark.skipif(
        not (shutil.which(CC) and shutil.which(QEMU)),
        reason="needs Debian's gcc-aarch64-linux-gnu and qemu-user",
    ),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"]),
]


@pytest.mark.parametrize(
    ("group", "width", "new_tokens"), [(1, 16, 1), (2, 128, 1), (3, 48, 9), (8, 256, 1)]
)
def test_attention_on_arm_is_as_exact_as_torchs(
    tmp_path: Path, group: int, width: int, new_tokens: int, dtype: torch.dtype
) -> None:
    layer = Layer(dtype, group, width, normed=True, new_tokens=new_tokens)
    exact_layer = layer.in_float64()
    exact = exact_layer.torch_ops().attend(exact_layer.module, "", *exact_layer.inputs)
    library: Any = EmulatedLibrary(tmp_path, dtype, width)
    ours = layer.compiled_ops(library).attend(layer.module, "", *layer.inputs)
    written = [part.clone() for part in layer.cache.layers[1]]
    torchs = layer.torch_ops().attend(layer.module, "", *layer.inputs)
    assert is_as_exact_as_torch(ours, torchs, exact)
    for parts in zip(written, layer.cache.layers[1], exact_layer.cache.layers[1], strict=True):
        assert is_as_exact_as_torch(*parts)


def test_norm_gate_and_sums_on_arm_are_as_exact_as_torchs(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    library: Any = EmulatedLibrary(tmp_path, dtype, 64)
    for scale in SCALES:
        assert_norm_and_gate_are_as_exact_as_torchs(library, dtype, scale)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4 * decode_layer.BLOCK_SIZE, generator=generator).to(dtype)
    largest, sums = decode_layer.sum_blocks(library, logits, 0.7)

    def in_blocks(logits: torch.Tensor) -> torch.Tensor:
        return (logits / 0.7).unflatten(-1, (-1, decode_layer.BLOCK_SIZE)).logsumexp(-1)

    ours = largest / 0.7 + sums.log()
    assert is_as_exact_as_torch(ours, in_blocks(logits.float()), in_blocks(logits.double()))
