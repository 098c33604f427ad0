"""The C code of a decoder layer on ARM: cross-compiled, and run under qemu-user."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_layers import ROWS, Layer, is_as_exact_as_torch

from peralta_zmq.engines.native.kernels import compiler, decode_layer

CC, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
POINTERS = f"{decode_layer.INPUTS} {decode_layer.CACHES} out".split()


class EmulatedLibrary:
    """The function `attend` of decode_layer.c, in an emulated process."""

    def __init__(self, program: Path, dtype: torch.dtype) -> None:
        self._program, self._item_size = program, dtype.itemsize

    def attend(self, argument: Any) -> None:
        attention = argument._obj  # of ctypes.byref
        sizes = self._sizes(attention)
        request = bytes(attention)
        for name in POINTERS:
            address = getattr(attention, name)
            size = sizes[name] if address else 0
            request += size.to_bytes(8, "little") + ctypes.string_at(address or 0, size)
        result = subprocess.run(
            [QEMU, str(self._program)], input=request, capture_output=True, check=True
        ).stdout
        for name in ("keys", "values", "out"):
            ctypes.memmove(getattr(attention, name), result[: sizes[name]], sizes[name])
            result = result[sizes[name] :]
        assert not result

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


@pytest.mark.slow  # compiles and emulates
@pytest.mark.skipif(
    not (shutil.which(CC) and shutil.which(QEMU)),
    reason="needs Debian's gcc-aarch64-linux-gnu and qemu-user",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("group", "width", "new_tokens"), [(1, 16, 1), (2, 128, 1), (3, 48, 9), (8, 256, 1)]
)
def test_attention_on_arm_is_as_exact_as_torchs(
    tmp_path: Path, group: int, width: int, new_tokens: int, dtype: torch.dtype
) -> None:
    program = tmp_path / "emulated"
    kernels, driver = Path(compiler.__file__).parent, Path(__file__).with_name("emulated.c")
    defines = (*decode_layer.DEFINES[dtype], f"-DWIDTH_UNIT={16 if width % 32 else 32}")
    flags = (*compiler.FLAGS, f"-I{kernels}", "-static")
    subprocess.run([CC, *flags, *defines, str(driver), "-lm", "-o", str(program)], check=True)
    layer = Layer(dtype, group, width, normed=True, new_tokens=new_tokens)
    exact_layer = layer.in_float64()
    exact = exact_layer.torch_ops().attend(exact_layer.module, "", *exact_layer.inputs)
    library = EmulatedLibrary(program, dtype)
    ours = layer.compiled_ops(library).attend(layer.module, "", *layer.inputs)
    written = [part.clone() for part in layer.cache.layers[1]]
    torchs = layer.torch_ops().attend(layer.module, "", *layer.inputs)
    assert is_as_exact_as_torch(ours, torchs, exact)
    for parts in zip(written, layer.cache.layers[1], exact_layer.cache.layers[1], strict=True):
        assert is_as_exact_as_torch(*parts)
