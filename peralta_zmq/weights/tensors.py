"""Sets of named tensors as one safetensors file: written as a stream, read and patched by mapping.

Knows the file format; knows nothing of versions. A set's digest tells whether two sets are equal
bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from isal.isal_zlib import crc32

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 1 << 20  # elements handled at a time
MAX_HEADER = 100 << 20  # bytes, as safetensors itself allows
SHARED_NAME = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor of a set."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """Name, dtype and shape of each tensor, the widest dtype first, then by name."""
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].dtype.itemsize, each[0]))
    return {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered}


def fingerprint(specs: Mapping[str, Spec]) -> str:
    """What tells this model's names and shapes from another's: 16 hexadecimal digits."""
    lines = (f"{name} {list(spec.shape)}\n" for name, spec in sorted(specs.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def set_digest(checksums: Mapping[str, int], specs: Mapping[str, Spec]) -> str:
    """The digest of a set from the crc32 of each tensor's bytes, 32 hexadecimal digits."""
    lines = (
        f"{name} {NAMES[spec.dtype]} {list(spec.shape)} {checksums[name]:08x}\n"
        for name, spec in sorted(specs.items())
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of a set; reads every byte."""
    return set_digest(checksums_of(tensors), specs_of(tensors))


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The crc32 of each tensor's bytes."""
    return {name: crc32(raw(tensors[name])) for name in tensors}


def file_size(specs: Mapping[str, Spec]) -> int:
    """Bytes of the set's file."""
    return len(header_of(specs)) + sum(spec.bytes for spec in specs.values())


def header_of(specs: Mapping[str, Spec]) -> bytes:
    """The head of a safetensors file, a multiple of 8 bytes so that the tensors are aligned."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, spec in specs.items():
        end = start + spec.bytes
        fields[name] = {
            "dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end],
        }  # fmt: skip
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def file_of(
    tensors: Mapping[str, torch.Tensor], checksums: dict[str, int]
) -> Iterator[bytes | memoryview]:
    """The set's file in pieces; fills in the crc32 of each tensor on the way."""
    specs = specs_of(tensors)
    yield header_of(specs)
    for name in specs:
        view = raw(tensors[name])
        checksums[name] = 0
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            checksums[name] = crc32(piece, checksums[name])
            yield piece


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(cast(Any, tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def copy_set(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A copy of a set on the CPU in another dtype."""
    return {
        name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }


class MappedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file as views of a mapping: no copy, memory as it is touched.

    Changes reach the file only when `writable`. Raises ValueError for a malformed file.
    """

    def __init__(self, file: Path, *, writable: bool = False) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        with file.open("r+b" if writable else "rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=access)
        self._places = _places(self._map)
        self.specs = {name: spec for name, (spec, _) in self._places.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        spec, start = self._places[name]
        count = math.prod(spec.shape)
        if count == 0:
            return torch.empty(spec.shape, dtype=spec.dtype)
        flat = torch.frombuffer(self._map, dtype=spec.dtype, count=count, offset=start)
        return flat.reshape(spec.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError naming the first tensor that holds a NaN or an infinity.

    A sum is ten times as fast as a look at each number; only a strange sum needs the looks.
    """
    for name, tensor in tensors.items():
        for piece in pieces_of(tensor):
            if not (piece.sum(dtype=torch.float32).isfinite() or piece.isfinite().all()):
                raise ValueError(f"{name} is not finite")


def pieces_of(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensor's elements in flat pieces of at most CHUNK."""
    return tensor.reshape(-1).split(CHUNK) if tensor.numel() else ()


def _places(content: mmap.mmap) -> dict[str, tuple[Spec, int]]:
    """Spec and first byte of each tensor; they must fill the file without gap or overlap."""
    (length,) = struct.unpack("<Q", content[:8]) if len(content) >= 8 else (MAX_HEADER + 1,)
    if length > min(MAX_HEADER, len(content) - 8):
        raise ValueError("not a safetensors file")
    try:
        fields = cast("dict[str, Any]", json.loads(content[8 : 8 + length]))
        fields.pop("__metadata__", None)
        places = {name: _place(entry) for name, entry in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a safetensors file ({type(error).__name__}: {error})") from None
    end = 0
    for spec, start in sorted(places.values(), key=lambda each: (each[1], each[0].bytes)):
        if start != end:
            raise ValueError("its tensors overlap or leave a gap")
        end = start + spec.bytes
    if 8 + length + end != len(content):
        raise ValueError("its tensors do not fill the file")
    if strange := [name for name in places if not SHARED_NAME.fullmatch(name)]:
        raise ValueError(f"{strange[0]!r:.80} is not a tensor's name")
    return {name: (spec, 8 + length + start) for name, (spec, start) in places.items()}


def _place(entry: Mapping[str, Any]) -> tuple[Spec, int]:
    shape = tuple(entry["shape"])
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise ValueError("a shape that is none")
    spec = Spec(DTYPES[entry["dtype"]], shape)
    start, end = entry["data_offsets"]
    if type(start) is not int or start < 0 or end - start != spec.bytes:
        raise ValueError("offsets that do not fit the shape")
    return spec, start
