"""What changed between two versions of a set of 16-bit floats, without loss.

A change is a gap and a step: how many unchanged elements lie before it, and how far the new value
is from the old one among all values in their order (so the next larger bfloat16 is one step, for
any sign, subnormals, infinities and NaN payloads included). Gaps are bytes, 255 meaning "255 and
go on"; steps are signed bytes, -128 meaning "see the wide ones"; both are compressed by zstd.
Knows arrays; knows nothing of files or versions.

    file    = MAGIC tensor* END
    tensor  = u16 length of name, name, u64 elements, piece*, u32 crc32 of the result
    piece   = 3 x (u32 bytes, u32 compressed bytes), gaps, steps, wide     one per CHUNK elements
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import zstandard
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from peralta_zmq.weights.tensors import CHUNK, specs_of

MAGIC, END = b"PZD1", b"\0\0"  # a name of no bytes ends the file
LEVEL = 1
GO_ON, WIDE = 255, -128
HALVES = (torch.bfloat16, torch.float16)
Bits: TypeAlias = NDArray[np.int16]
Read: TypeAlias = Callable[[int], bytes]  # exactly so many bytes


def unsuitable(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Why these tensors are better sent whole; None when a delta is worth trying."""
    if strange := {tensor.dtype for tensor in tensors.values()} - set(HALVES):
        name = str(min(strange, key=str)).removeprefix("torch.")
        return f"{name} weights change everywhere"
    if tensors and all("lora_" in name for name in tensors):
        return "an adapter is small and changes everywhere"
    return None


def encode(
    base: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    checksums: dict[str, int],
) -> Iterator[bytes]:
    """The delta from `base` to `tensors` in pieces; fills in the crc32 of each tensor.

    Both sets have equal names, shapes and dtypes, all 16 bits wide.
    """
    assert specs_of(base) == specs_of(tensors)
    compressor = _compressor()
    yield MAGIC
    for name, tensor in tensors.items():
        label = name.encode()
        yield struct.pack("<H", len(label)) + label + struct.pack("<Q", tensor.numel())
        old, new = bits_of(base[name]), bits_of(tensor)
        checksum = 0
        for start in range(0, len(new), CHUNK):
            piece = new[start : start + CHUNK]
            checksum = crc32(memoryview(cast(Any, piece)), checksum)
            yield _encode_piece(old[start : start + CHUNK], piece, compressor)
        checksums[name] = checksum
        yield struct.pack("<I", checksum)
    yield END


def apply(read: Read, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Turn `tensors`, the base, into the result, in place; returns the crc32 of each tensor.

    `read(n)` gives the next n bytes of the delta. Raises ValueError when it is malformed or was
    made from another base; the tensors are then to be thrown away.
    """
    decompressor = zstandard.ZstdDecompressor()
    left = dict(tensors)
    checksums: dict[str, int] = {}
    _require(read(len(MAGIC)) == MAGIC, "not a delta")
    while length := struct.unpack("<H", read(2))[0]:
        name = read(length).decode("utf-8", errors="replace")
        _require(name in left, f"unknown tensor {name!r:.80}")
        flat = bits_of(left.pop(name))
        _require(struct.unpack("<Q", read(8))[0] == len(flat), f"{name} has another size")
        checksum = 0
        for start in range(0, len(flat), CHUNK):
            piece = flat[start : start + CHUNK]
            _apply_piece(read, piece, decompressor)
            checksum = crc32(memoryview(cast(Any, piece)), checksum)
        checksums[name] = checksum
        _require(struct.unpack("<I", read(4))[0] == checksum, f"{name} comes from another base")
    _require(not left, f"the delta lacks {next(iter(left), '')}")
    return checksums


def bits_of(tensor: torch.Tensor) -> Bits:
    """The bit patterns of a 16-bit tensor, flat and not copied."""
    flat = tensor.detach().reshape(-1).view(torch.int16)
    return cast(Bits, flat.numpy())


def ordered(bits: Bits) -> Bits:
    """Bit patterns of floats as integers in the order of the floats; its own inverse."""
    return bits ^ ((bits >> 15) & np.int16(0x7FFF))


def entropy_bits(old: Bits, new: Bits) -> float:
    """The least bits that say which elements changed and by which step, each drawn alone."""
    changed = np.flatnonzero(old != new)
    if len(changed) == 0:
        return 0.0
    share = len(changed) / len(new)
    places = len(new) * float(-share * np.log2(share) - (1 - share) * np.log2(1 - share or 1.0))
    steps = ordered(new[changed]) - ordered(old[changed])
    counts = np.unique(steps, return_counts=True)[1] / len(steps)
    return places + len(steps) * float(-(counts * np.log2(counts)).sum())


def _encode_piece(old: Bits, new: Bits, compressor: Any) -> bytes:
    changed = np.flatnonzero(old != new)
    if len(changed) == 0:
        return bytes(24)
    gaps = np.diff(changed, prepend=-1) - 1
    steps = ordered(new[changed]) - ordered(old[changed])  # modulo 65536, as is the way back
    narrow = steps.astype(np.int8)
    is_wide = (narrow != steps) | (narrow == WIDE)
    narrow[is_wide] = WIDE
    streams = [_gap_bytes(gaps), narrow.tobytes(), steps[is_wide].astype("<i2").tobytes()]
    packed = [compressor.compress(stream) if stream else b"" for stream in streams]
    head = b"".join(
        struct.pack("<II", len(stream), len(small))
        for stream, small in zip(streams, packed, strict=True)
    )
    return b"".join([head, *packed])


def _apply_piece(read: Read, flat: Bits, decompressor: Any) -> None:
    sizes = struct.unpack("<6I", read(24))
    gaps, narrow, wide = (
        np.frombuffer(_decompress(read, sizes[at], sizes[at + 1], len(flat), decompressor), kind)
        for at, kind in ((0, np.uint8), (2, np.int8), (4, "<i2"))
    )
    changed = _positions(gaps)
    _require(len(changed) == len(narrow), "as many gaps as steps are needed")
    if len(changed) == 0:
        return
    _require(int(changed[-1]) < len(flat), "a change behind the end")
    steps = narrow.astype(np.int16)
    is_wide = narrow == WIDE
    _require(int(is_wide.sum()) == len(wide), "wide steps are missing")
    steps[is_wide] = wide
    flat[changed] = ordered(ordered(flat[changed]) + steps)


def _decompress(read: Read, size: int, packed: int, elements: int, decompressor: Any) -> bytes:
    """One stream; its size is bounded by what so many elements can need."""
    _require(size <= 2 * elements + elements // GO_ON and packed <= 2 * size + 64, "a bomb")
    if size == 0:
        return b""
    frame = read(packed)
    try:
        _require(zstandard.frame_content_size(frame) == size, "a stream of another size")
        return cast(bytes, decompressor.decompress(frame))
    except zstandard.ZstdError as error:
        raise ValueError(f"not zstd: {error}") from None


def _gap_bytes(gaps: NDArray[np.int64]) -> bytes:
    """255 as often as it fits in each gap, then the rest."""
    long = gaps >= GO_ON
    if not long.any():
        return gaps.astype(np.uint8).tobytes()
    ends = np.cumsum(gaps // GO_ON + 1) - 1
    spread = np.full(int(ends[-1]) + 1, GO_ON, np.uint8)
    spread[ends] = gaps % GO_ON
    return spread.tobytes()


def _positions(gaps: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where the changes are; a gap that ends in 255 ends nowhere."""
    ends = np.flatnonzero(gaps != GO_ON)
    _require(len(gaps) == 0 or (len(ends) > 0 and ends[-1] == len(gaps) - 1), "a gap without end")
    reached = np.cumsum(gaps, dtype=np.int64)[ends]
    return reached + np.arange(len(ends))


def _compressor() -> Any:
    """Gaps and steps repeat by chance only: few matches are looked for, the entropy coder works."""
    settings = zstandard.ZstdCompressionParameters.from_level(
        LEVEL, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6
    )
    return zstandard.ZstdCompressor(compression_params=settings)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def reader_of(chunks: Iterator[bytes]) -> Read:
    """`read(n)` over a stream of chunks; ValueError when it ends too early."""
    buffer = bytearray()

    def read(count: int) -> bytes:
        while len(buffer) < count:
            chunk = next(chunks, None)
            if chunk is None:
                raise ValueError("the delta ends too early")
            buffer.extend(chunk)
        taken = bytes(buffer[:count])
        del buffer[:count]
        return taken

    return read
