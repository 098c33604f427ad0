"""Lossless codec for the difference (delta) between two sets of 16-bit floating-point tensors.

A changed element is stored as a gap (number of unchanged elements before it) and a step (distance
between old and new value in the order of all floats: the next larger bfloat16 is one step, for
either sign and including subnormals, infinities and NaN payloads). A gap is the sum of its bytes:
as many bytes 255 as fit, then one byte below 255. Steps are signed bytes; -128 stands for a larger
step, which is in the stream of wide (16-bit) steps. A piece with many changes has no gaps but a
step for each element, 0 for an unchanged one. All streams are compressed by zstd. Integers are
little-endian.

    file    = MAGIC tensor* END
    tensor  = u16 length of name, name, u64 number of elements, piece*, u32 crc32 of the result
    piece   = 3 x (u32 size, u32 compressed size), gaps, steps, wide       one per CHUNK elements

The three pairs of sizes, in bytes, are those of the streams gaps, steps and wide.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
import torch
import zstandard
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from peralta_zmq.weights.tensor_set import CHUNK, specs_of

MAGIC, END = b"PZD1", b"\0\0"  # END: a name of length 0
CONTINUE = 255  # gap byte that is followed by another byte of the same gap
WIDE = -128  # step byte that stands for a wide step
DTYPES = {torch.bfloat16, torch.float16}
Bits: TypeAlias = NDArray[np.int16]


def reason_against(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The reason to write keyframes instead of deltas of these tensors, or None."""
    if others := {tensor.dtype for tensor in tensors.values()} - DTYPES:
        name = str(min(others, key=str)).removeprefix("torch.")
        return f"deltas need 16-bit float weights, not {name}"
    if tensors and all("lora_" in name for name in tensors):
        return "an adapter is small, and all its elements change at each step"
    return None


def encode(
    base: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    checksums: dict[str, int],
    *,
    piece_size: int = CHUNK,
    dense: float = 0.5,
) -> Iterator[bytes]:
    """The delta file from `base` to `tensors`, in pieces; both have equal names, shapes and dtypes.

    Adds the crc32 of each tensor of `tensors` to `checksums`. A piece has `piece_size` elements. If
    the part `dense` of them has changed, the steps of all are stored: they are about as small as
    gaps and the steps of the changed ones, and faster to read and write.
    """
    assert specs_of(base) == specs_of(tensors)
    # Spend little time on the search for repetitions: gaps and steps have few.
    settings = zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6
    )
    compressor = zstandard.ZstdCompressor(compression_params=settings)
    yield MAGIC
    for name, tensor in tensors.items():
        label = name.encode()
        yield struct.pack("<H", len(label)) + label + struct.pack("<Q", tensor.numel())
        old = bits_of(base[name])
        new = bits_of(tensor)
        checksum = 0
        for start in range(0, len(new), piece_size):
            piece = new[start : start + piece_size]
            checksum = crc32(memoryview(cast(Any, piece)), checksum)
            yield _encode_piece(old[start : start + piece_size], piece, compressor, dense)
        checksums[name] = checksum
        yield struct.pack("<I", checksum)
    yield END


def apply(
    file: BinaryIO,
    tensors: Mapping[str, torch.Tensor],
    write: Callable[[str, int, memoryview], None] = lambda name, start, piece: None,
    *,
    piece_size: int = CHUNK,
) -> dict[str, int]:
    """Apply a delta to `tensors` in place; returns the crc32 of each resulting tensor.

    Calls `write` with each changed piece, and the byte of the named tensor at which it begins.
    Raises ValueError if the delta is malformed or was computed from other tensors, which may then
    be partly changed.
    """
    decompressor = zstandard.ZstdDecompressor()
    remaining = dict(tensors)
    checksums: dict[str, int] = {}
    _require(_read(file, len(MAGIC)) == MAGIC, "not a delta")
    while length := struct.unpack("<H", _read(file, 2))[0]:
        name = _read(file, length).decode("utf-8", errors="replace")
        _require(name in remaining, f"unknown tensor {name!r:.80}")
        bits = bits_of(remaining.pop(name))
        elements = struct.unpack("<Q", _read(file, 8))[0]
        _require(elements == len(bits), f"{name} has {len(bits)} elements, the delta {elements}")
        checksum = 0
        for start in range(0, len(bits), piece_size):
            piece = bits[start : start + piece_size]
            view = memoryview(cast(Any, piece))
            if _apply_piece(file, piece, decompressor):
                write(name, piece.itemsize * start, view.cast("B"))
            checksum = crc32(view, checksum)
        checksums[name] = checksum
        expected = struct.unpack("<I", _read(file, 4))[0]
        _require(checksum == expected, f"{name} differs: the delta has another base, or is damaged")
    _require(not remaining, f"the delta lacks {next(iter(remaining), '')}")
    return checksums


def bits_of(tensor: torch.Tensor) -> Bits:
    """The bit patterns of a 16-bit tensor, as a one-dimensional view."""
    return cast(Bits, tensor.detach().reshape(-1).view(torch.int16).numpy())


def ordered(bits: Bits) -> Bits:
    """Map bit patterns of floats to integers in the order of the floats; its own inverse."""
    return bits ^ ((bits >> 15) & np.int16(0x7FFF))


def _encode_piece(old: Bits, new: Bits, compressor: Any, dense: float) -> bytes:
    is_changed = old != new
    num_changed = np.count_nonzero(is_changed)
    if num_changed == 0:
        return bytes(24)  # header: the six sizes are 0
    gaps = b""
    if num_changed < dense * len(new):
        changed = np.flatnonzero(is_changed)
        gaps = _gap_bytes(np.diff(changed, prepend=-1) - 1)
        old = old[changed]
        new = new[changed]
    steps = ordered(new) - ordered(old)  # may wrap; `_apply_piece` wraps back
    narrow = steps.astype(np.int8)
    is_wide = (narrow != steps) | (narrow == WIDE)
    narrow[is_wide] = WIDE
    streams = [gaps, narrow.tobytes(), steps[is_wide].astype("<i2").tobytes()]
    compressed = [compressor.compress(stream) if stream else b"" for stream in streams]
    header = b"".join(
        struct.pack("<II", len(stream), len(frame))
        for stream, frame in zip(streams, compressed, strict=True)
    )
    return b"".join([header, *compressed])


def _apply_piece(file: BinaryIO, piece: Bits, decompressor: Any) -> bool:
    """Read one piece of a delta and change `piece`, a view of the tensor; False if unchanged."""
    sizes = struct.unpack("<6I", _read(file, 24))
    if not any(sizes):
        return False
    gaps, narrow, wide = (
        np.frombuffer(_decompress(file, sizes[i], sizes[i + 1], len(piece), decompressor), dtype)
        for i, dtype in ((0, np.uint8), (2, np.int8), (4, "<i2"))
    )
    if len(gaps):
        changed = _positions(gaps)
        _require(len(narrow) == len(changed), "the numbers of gaps and steps differ")
        _require(int(changed[-1]) < len(piece), "a change is beyond the end of its piece")
    else:
        changed = slice(None)
        _require(len(narrow) == len(piece), "the numbers of elements and steps differ")
    steps = narrow.astype(np.int16)
    is_wide = narrow == WIDE
    _require(np.count_nonzero(is_wide) == len(wide), "the number of wide steps differs")
    steps[is_wide] = wide
    piece[changed] = ordered(ordered(piece[changed]) + steps)
    return True


def _decompress(
    file: BinaryIO, size: int, frame_size: int, elements: int, decompressor: Any
) -> bytes:
    """Read one stream of `size` bytes, compressed to `frame_size` bytes. Raises ValueError."""
    # One limit for all three streams. Steps take at most 1 byte for each element, wide steps 2,
    # gaps 1 byte for each change and 1 for every 255 (CONTINUE) unchanged elements. Compression
    # adds little to a stream that it cannot shrink.
    limit = 2 * elements + elements // CONTINUE
    _require(size <= limit and frame_size <= 2 * size + 64, "a stream exceeds its maximum size")
    if size == 0:
        return b""
    frame = _read(file, frame_size)
    try:
        is_equal = zstandard.frame_content_size(frame) == size
        _require(is_equal, "the sizes in a zstd frame and in the header of its piece differ")
        return cast(bytes, decompressor.decompress(frame))
    except zstandard.ZstdError as error:
        raise ValueError(f"not zstd: {error}") from None


def _gap_bytes(gaps: NDArray[np.int64]) -> bytes:
    if not (gaps >= CONTINUE).any():
        return gaps.astype(np.uint8).tobytes()
    ends = np.cumsum(gaps // CONTINUE + 1) - 1
    content = np.full(int(ends[-1]) + 1, CONTINUE, np.uint8)
    content[ends] = gaps % CONTINUE
    return content.tobytes()


def _positions(gaps: NDArray[np.uint8]) -> NDArray[np.int64]:
    ends = np.flatnonzero(gaps != CONTINUE)
    _require(len(ends) > 0 and ends[-1] == len(gaps) - 1, "the last gap is incomplete")
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))


def _read(file: BinaryIO, count: int) -> bytes:
    content = file.read(count)
    _require(len(content) == count, "the delta is truncated")
    return content


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)
