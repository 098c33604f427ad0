"""Deltas are lossless for any two sets of 16-bit floats, and malformed deltas are refused."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.weights import entropy_bits
from peralta_zmq.weights import delta, tensor_set
from peralta_zmq.weights.tensor_set import checksums_of

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0x7FFF, 0xFFFF, 0xFFC1, 0x0001, 0x8001, 0x7F7F]
PATTERNS = st.sampled_from(SPECIAL) | st.integers(0, 0xFFFF)


def halves(patterns: list[int] | np.ndarray[Any, Any]) -> torch.Tensor:
    bits = np.array(patterns, np.uint16).view(np.int16)
    return torch.from_numpy(bits.copy()).view(torch.bfloat16)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.int16).tolist()


def round_trip(
    old: dict[str, torch.Tensor],
    new: dict[str, torch.Tensor],
    *,
    piece_size: int = delta.CHUNK,
    dense: float = 0.5,
) -> int:
    """Size of the delta; checks that it turns `old` into `new`."""
    checksums: dict[str, int] = {}
    encoded = b"".join(delta.encode(old, new, checksums, piece_size=piece_size, dense=dense))
    copy = {name: tensor.clone() for name, tensor in old.items()}
    assert delta.apply(io.BytesIO(encoded), copy, piece_size=piece_size) == checksums
    assert checksums == checksums_of(new)
    assert copy.keys() == new.keys()
    assert all(bits(copy[name]) == bits(new[name]) for name in new)
    return len(encoded)


@given(pairs=st.lists(st.tuples(PATTERNS, PATTERNS), max_size=40))
@settings(max_examples=300, deadline=None, database=None)
def test_any_bit_patterns_round_trip(pairs: list[tuple[int, int]]) -> None:
    old, new = (halves([pair[i] for pair in pairs]) for i in (0, 1))
    round_trip({"w": old}, {"w": new})


@given(
    changed=st.lists(
        st.sampled_from([254, 255, 256, 509, 510, 511]) | st.integers(0, 5000), max_size=12
    ),
    piece_size=st.sampled_from([1, 255, 256, 1000, 5001]),
)
@settings(max_examples=60, deadline=None, database=None)
def test_any_gaps_and_piece_sizes_round_trip(changed: list[int], piece_size: int) -> None:
    old = torch.zeros(5001).bfloat16()
    new = old.clone()
    new[changed] = 1.0
    round_trip({"w": old}, {"w": new}, piece_size=piece_size)


@pytest.mark.parametrize("shape", [(0,), (1,), (), (0, 5), (3, 0, 2), (2, 3, 4)])
def test_empty_and_tiny_tensors_round_trip(shape: tuple[int, ...]) -> None:
    round_trip({"w": torch.zeros(shape).bfloat16()}, {"w": torch.ones(shape).bfloat16()})


def test_delta_without_changes_has_headers_only() -> None:
    same = {"w": torch.randn(1000).bfloat16()}
    assert round_trip(same, same) == 4 + (2 + 1 + 8) + 24 + 4 + 2


@pytest.mark.parametrize("num_changed", [1, 499, 500, 999, 1000])
def test_pieces_with_few_and_many_changes_round_trip(num_changed: int) -> None:
    random = np.random.default_rng(num_changed)
    old = random.integers(0, 1 << 16, 1000)
    new = old.copy()
    new[random.permutation(1000)[:num_changed]] ^= random.integers(1, 1 << 16, num_changed)
    pair = {"w": halves(old)}, {"w": halves(new)}
    round_trip(*pair)
    encoded = b"".join(delta.encode(*pair, {}))
    (gaps_size,) = struct.unpack_from("<I", encoded, len(delta.MAGIC) + 2 + 1 + 8)
    assert (gaps_size == 0) == (num_changed >= 500)


def test_float16_and_changes_of_every_element_round_trip() -> None:
    random = np.random.default_rng(0)
    old, new = (halves(random.integers(0, 1 << 16, 70_000)) for _ in range(2))
    round_trip({"w": old}, {"w": new})
    round_trip({"w": old.half()}, {"w": new.half()})


@given(left=PATTERNS, right=PATTERNS)
@settings(max_examples=300, deadline=None, database=None)
def test_ordered_integers_have_the_order_of_the_floats(left: int, right: int) -> None:
    pair = halves([left, right])
    floats = pair.float()
    low, high = delta.ordered(delta.bits_of(pair)).tolist()
    if floats[0] < floats[1]:
        assert low < high
    assert delta.ordered(delta.ordered(delta.bits_of(pair))).tolist() == bits(pair)


def test_delta_of_small_steps_is_close_to_its_entropy() -> None:
    assert entropy_bits(np.zeros(8, np.int16), np.tile([1, 0], 4).astype(np.int16)) == 8
    random = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(400_000, generator=random)
    moved = weights + 2e-6 * torch.randn(400_000, generator=random)
    old, new = {"w": weights.bfloat16()}, {"w": moved.bfloat16()}
    size = round_trip(old, new)
    assert 2 * 400_000 / size > 30
    bound = entropy_bits(delta.bits_of(old["w"]), delta.bits_of(new["w"])) / 8
    assert 0.75 < bound / size < 1.0


@pytest.mark.parametrize(
    "tensors, reason",
    [
        ({"w": torch.full((9,), 5.0).bfloat16()}, "w differs: the delta has another base"),
        ({}, "unknown tensor 'w'"),
        ({"w": torch.zeros(8).bfloat16()}, "w has 8 elements, the delta 9"),
        ({"w": torch.zeros(9).bfloat16(), "x": torch.zeros(1).bfloat16()}, "the delta lacks x"),
    ],
)
def test_delta_of_other_tensors_is_refused(tensors: dict[str, torch.Tensor], reason: str) -> None:
    old, new = {"w": torch.zeros(9).bfloat16()}, {"w": torch.ones(9).bfloat16()}
    encoded = b"".join(delta.encode(old, new, {}))
    with pytest.raises(ValueError, match=reason):
        delta.apply(io.BytesIO(encoded), tensors)


def delta_with(sizes: tuple[int, ...], streams: bytes, elements: int = 100) -> bytes:
    head = struct.pack("<H", 1) + b"w" + struct.pack("<Q", elements)
    return delta.MAGIC + head + struct.pack("<6I", *sizes) + streams


def apply_to_zeros(encoded: bytes, elements: int = 100) -> None:
    delta.apply(io.BytesIO(encoded), {"w": torch.zeros(elements).bfloat16()})


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


BOMB = frame(b"\0" * 100_000)  # but its piece states 200 bytes, the limit for 100 elements
GAPS, STEPS, ALL_WIDE = frame(b"\xff\xff"), frame(b"\1"), frame(b"\x80" * 100)
FAR = frame(b"\xc8")


@pytest.mark.parametrize(
    "encoded, reason",
    [
        (b"", "truncated"),
        (b"NOPE", "not a delta"),
        (delta_with((1 << 31, 10, 0, 0, 0, 0), b""), "exceeds its maximum size"),
        (delta_with((1, 1 << 30, 0, 0, 0, 0), b""), "exceeds its maximum size"),
        (delta_with((200, len(BOMB), 0, 0, 0, 0), BOMB), "sizes in a zstd frame"),
        (delta_with((9, 9, 0, 0, 0, 0), b"not zstd!"), "not zstd"),
        (delta_with((2, len(GAPS), 0, 0, 0, 0), GAPS), "gap is incomplete"),
        (delta_with((1, len(FAR), 1, len(STEPS), 0, 0), FAR + STEPS), "beyond the end"),
        (delta_with((1, len(FAR), 0, 0, 0, 0), FAR), "numbers of gaps and steps differ"),
        (delta_with((0, 0, 1, len(STEPS), 0, 0), STEPS), "numbers of elements and steps differ"),
        (delta_with((0, 0, 100, len(ALL_WIDE), 0, 0), ALL_WIDE), "number of wide steps differs"),
    ],
)
def test_malformed_delta_is_refused(encoded: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        apply_to_zeros(encoded)


@given(noise=st.binary(max_size=200), keep=st.integers(0, 60))
@settings(max_examples=300, deadline=None, database=None)
def test_random_bytes_raise_only_value_error(noise: bytes, keep: int) -> None:
    old, new = {"w": torch.zeros(100).bfloat16()}, {"w": torch.ones(100).bfloat16()}
    valid = b"".join(delta.encode(old, new, {}))
    with pytest.raises(ValueError):
        apply_to_zeros(valid[:keep] + noise)


def test_memory_of_encode_and_apply_is_bounded(tmp_path: Path) -> None:
    import tracemalloc

    random = torch.Generator().manual_seed(0)
    old = {"w": torch.randn(40 << 20, generator=random).bfloat16()}  # 80 MiB
    new = {"w": old["w"].clone()}
    new["w"][::25] *= 1.01
    assert tensor_set.CHUNK <= 1 << 20
    tracemalloc.start()
    copy = {"w": old["w"].clone()}
    with (tmp_path / "delta").open("w+b") as file:
        file.writelines(delta.encode(old, new, {}))
        size = file.tell()
        file.seek(0)
        delta.apply(file, copy)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.1 * (80 << 20)
    assert size < 80 << 20
    assert torch.equal(copy["w"], new["w"])
