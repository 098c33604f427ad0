"""Sets of named tensors: safetensors files of them, digests, copies, the check for NaN.

Files are written as a stream and read, or updated in place, through a memory mapping. The digest of
a set identifies its names, dtypes, shapes and bytes; the fingerprint only names and shapes.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from isal.isal_zlib import crc32

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 1 << 20  # elements (or bytes) processed at a time
MAX_HEADER = 100 << 20  # bytes; also the limit of the safetensors library
MAX_DIMENSION = 1 << 48  # elements
TENSOR_NAME = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class Spec:
    """Dtype and shape of a tensor, in a set or a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """The spec of each tensor, in file order: largest dtype first, then by name."""
    in_file_order = sorted(tensors.items(), key=lambda pair: (-pair[1].dtype.itemsize, pair[0]))
    return {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in in_file_order}


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


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of a set, computed from its tensors."""
    return set_digest(checksums_of(tensors), specs_of(tensors))


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The crc32 of each tensor's bytes."""
    return {name: crc32(_bytes_of(tensors[name])) for name in tensors}


def file_size(specs: Mapping[str, Spec]) -> int:
    """Size of the safetensors file of a set in bytes."""
    return len(_header(specs)) + sum(spec.bytes for spec in specs.values())


def file_of(
    tensors: Mapping[str, torch.Tensor], checksums: dict[str, int]
) -> Iterator[bytes | memoryview]:
    """The safetensors file of a set in pieces; adds the crc32 of each tensor to `checksums`."""
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
    """The file header, padded to a multiple of 8 bytes so that the tensors are aligned."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, spec in specs.items():
        end = start + spec.bytes
        fields[name] = {
            "dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape),
            "data_offsets": [start, end],
        }  # fmt: skip
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(cast(Any, tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def copy_set(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A copy of a set on the CPU in another dtype."""
    return {
        name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError with the name of the first tensor that has a NaN or an infinity."""
    for name, tensor in tensors.items():
        for piece in tensor.reshape(-1).split(CHUNK):
            # The sum is ten times as fast as isfinite on all elements; it may overflow, hence `or`.
            if not (piece.sum(dtype=torch.float32).isfinite() or piece.isfinite().all()):
                raise ValueError(f"{name} is not finite")


class MappedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file as views of a memory mapping.

    Changes are written to the file only if `writable`. Raises ValueError for a malformed file.
    """

    def __init__(self, file: Path, *, writable: bool = False) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        with file.open("r+b" if writable else "rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=access)
        self._entries = _parse_header(self._map)
        self.specs = {name: spec for name, (spec, _) in self._entries.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        spec, start = self._entries[name]
        count = math.prod(spec.shape)
        if count == 0:
            return torch.empty(spec.shape, dtype=spec.dtype)
        flat = torch.frombuffer(self._map, dtype=spec.dtype, count=count, offset=start)
        return flat.reshape(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _parse_header(content: mmap.mmap) -> dict[str, tuple[Spec, int]]:
    """Spec and file offset of each tensor; the tensors must fill the file without gaps."""
    (length,) = struct.unpack("<Q", content[:8]) if len(content) >= 8 else (MAX_HEADER + 1,)
    if length > min(MAX_HEADER, len(content) - 8):
        raise ValueError("not a safetensors file")
    try:
        fields = cast("dict[str, Any]", json.loads(content[8 : 8 + length]))
        fields.pop("__metadata__", None)
        entries = {name: _parse_entry(entry) for name, entry in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a safetensors file ({type(error).__name__}: {error})") from None
    end = 0
    for spec, start in sorted(entries.values(), key=lambda entry: (entry[1], entry[0].bytes)):
        if start != end:
            raise ValueError("its tensors overlap or leave a gap")
        end = start + spec.bytes
    if 8 + length + end != len(content):
        raise ValueError("its tensors do not fill the file")
    if invalid := [name for name in entries if not TENSOR_NAME.fullmatch(name)]:
        raise ValueError(f"invalid tensor name {invalid[0]!r:.80}")
    return {name: (spec, 8 + length + start) for name, (spec, start) in entries.items()}


def _parse_entry(entry: Mapping[str, Any]) -> tuple[Spec, int]:
    """Spec and offset of a tensor; the offset counts from the end of the header."""
    shape = tuple(entry["shape"])
    if not all(type(size) is int and 0 <= size < MAX_DIMENSION for size in shape):
        raise ValueError("invalid shape")
    spec = Spec(DTYPES[entry["dtype"]], shape)
    start, end = entry["data_offsets"]
    if type(start) is not int or start < 0 or end - start != spec.bytes:
        raise ValueError("offsets do not match the shape")
    return spec, start
