"""Sets of named tensors: safetensors files, digests, copies, a check for NaN.

The digest of a set identifies names, dtypes, shapes and bytes; the fingerprint names and shapes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from isal.isal_zlib import crc32
from safetensors import SafetensorError, safe_open

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
MAX_HEADER = 16 << 20  # bytes; enough for 100,000 tensors
DTYPE_NAMES = {
    **{dtype: name for name, dtype in DTYPES.items()},
    # In checkpoints: counters, states of random number generators and optimizers.
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
ALL_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
DISK_FOLDER = "/var/tmp"  # folder of temporary files; /tmp may be in memory
CHUNK = 1 << 20  # elements (or bytes) processed at a time


@dataclass(frozen=True, slots=True)
class Spec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """The spec of each tensor, in file order: largest dtype first, then by name."""
    # One tensor at a time, because a lazy mapping computes each.
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return dict(sorted(specs.items(), key=lambda pair: (-pair[1].dtype.itemsize, pair[0])))


def fingerprint(specs: Mapping[str, Spec]) -> str:
    """Identifies a model architecture by tensor names and shapes: 16 hexadecimal digits."""
    lines = (f"{name} {list(spec.shape)}\n" for name, spec in sorted(specs.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def set_digest(checksums: Mapping[str, int], specs: Mapping[str, Spec]) -> str:
    """The digest of a set from the crc32 of each tensor: 32 hexadecimal digits."""
    lines = (
        f"{name} {DTYPE_NAMES[spec.dtype]} {list(spec.shape)} {checksums[name]:08x}\n"
        for name, spec in sorted(specs.items())
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: crc32(_bytes_of(tensors[name])) for name in tensors}


def file_size(specs: Mapping[str, Spec]) -> int:
    return len(_header(specs)) + sum(spec.bytes for spec in specs.values())


def file_of(
    tensors: Mapping[str, torch.Tensor], checksums: dict[str, int]
) -> Iterator[bytes | memoryview]:
    """The safetensors file of a set, in pieces; adds the crc32 of each tensor to `checksums`."""
    specs = specs_of(tensors)
    yield _header(specs)
    for name in specs:
        view = _bytes_of(tensors[name])
        checksums[name] = 0
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            checksums[name] = crc32(piece, checksums[name])
            yield piece


def _header(specs: Mapping[str, Spec]) -> bytes:
    """The file header, padded so that the tensors are aligned."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, spec in specs.items():
        dtype = DTYPE_NAMES[spec.dtype]
        offsets = [start, start + spec.bytes]
        fields[name] = {"dtype": dtype, "shape": spec.shape, "data_offsets": offsets}
        start += spec.bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous and in CPU memory."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(cast(Any, tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()))


def copy_set(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }


def temporary_copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of a set of one dtype, as views of a temporary file without a name.

    Raises OSError, also if less than twice the size of the set is free.
    """
    folder = os.environ.get("TMPDIR") or DISK_FOLDER
    size = sum(tensor.nbytes for tensor in tensors.values())
    with tempfile.TemporaryFile(dir=folder) as file:
        disk = os.statvfs(folder)
        if disk.f_bavail * disk.f_frsize < 2 * size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
        file.writelines(_bytes_of(tensor) for tensor in tensors.values())
        file.flush()
        content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    views = torch.frombuffer(content, dtype=torch.uint8).split(sizes)
    return {
        name: view.view(tensor.dtype).view(tensor.shape)
        for (name, tensor), view in zip(tensors.items(), views, strict=True)
    }


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError with the name of the first tensor that has a NaN or an infinity."""
    for name, tensor in tensors.items():
        for piece in tensor.reshape(-1).split(CHUNK):
            # A finite sum proves that all elements are finite, ten times as fast as isfinite on
            # each. A sum that is not finite proves nothing: finite elements can overflow it.
            if not (piece.sum(dtype=torch.float32).isfinite() or piece.isfinite().all()):
                raise ValueError(f"{name} is not finite")


def check_header(start: bytes) -> None:
    """Raise ValueError if a safetensors file that begins with `start` has too large a header."""
    if (size := int.from_bytes(start[:8], "little")) > MAX_HEADER:
        raise ValueError(f"it has a header of {size} bytes, more than {MAX_HEADER}")


class FileTensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, each read when it is accessed, not through mmap.

    Raises OSError, and ValueError for a malformed file or tensors that are not of `dtypes`.
    """

    def __init__(self, file: Path, *, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
        with file.open("rb") as opened:
            start = opened.read(8)
            check_header(start)
        try:
            self._opened: Any = safe_open(file, framework="pt", backend="pread")
        except SafetensorError as error:  # it checks that the tensors fill the file without gaps
            raise ValueError(str(error)) from None
        self._file = file
        end = 8 + int.from_bytes(start, "little")
        self.specs: dict[str, Spec] = {}
        self._starts: dict[str, int] = {}  # file offset of each tensor
        for name in self._opened.offset_keys():
            entry = self._opened.get_slice(name)
            dtype = entry.get_dtype()
            shape = tuple(entry.get_shape())
            if dtype not in dtypes:
                raise ValueError(f"{name:.80} has dtype {dtype}, not {', '.join(dtypes)}")
            # With an empty dimension, a huge shape has no elements.
            if math.prod(max(1, size) for size in shape) > 1 << 40:
                raise ValueError(f"{name:.80} has shape {shape!s:.80}")  # 0 times 2**63
            self.specs[name] = Spec(dtypes[dtype], shape)
            self._starts[name] = end
            end += self.specs[name].bytes

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.specs:
            raise KeyError(name)
        try:
            return self._opened.get_tensor(name)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(self._file)) from None

    def write(self, name: str, start: int, piece: memoryview) -> None:
        """Replace bytes of a tensor in the file, from its byte `start` on. Raises OSError."""
        with self._file.open("r+b") as file:
            file.seek(self._starts[name] + start)
            file.write(piece)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)
