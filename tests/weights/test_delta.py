"""Any two sets of 16-bit floats come back bit for bit, and no stream of bytes does harm."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from peralta_zmq.weights import delta, tensors
from peralta_zmq.weights.tensors import checksums_of

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0x7FFF, 0xFFFF, 0xFFC1, 0x0001, 0x8001, 0x7F7F]
PATTERNS = st.sampled_from(SPECIAL) | st.integers(0, 0xFFFF)


def halves(patterns: list[int] | np.ndarray[Any, Any]) -> torch.Tensor:
    bits = np.array(patterns, np.uint16).view(np.int16)
    return torch.from_numpy(bits.copy()).view(torch.bfloat16)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.int16).tolist()


def there_and_back(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> int:
    """Bytes of the delta, after checking that it leads from old to new."""
    checksums: dict[str, int] = {}
    encoded = b"".join(delta.encode(old, new, checksums))
    work = {name: tensor.clone() for name, tensor in old.items()}
    assert delta.apply(io.BytesIO(encoded).read, work) == checksums == checksums_of(new)
    assert {name: bits(each) for name, each in work.items()} == {
        name: bits(each) for name, each in new.items()
    }
    return len(encoded)


@given(pairs=st.lists(st.tuples(PATTERNS, PATTERNS), max_size=40))
@settings(max_examples=300, deadline=None, database=None)
def test_any_bit_patterns_come_back(pairs: list[tuple[int, int]]) -> None:
    old, new = halves([each[0] for each in pairs]), halves([each[1] for each in pairs])
    there_and_back({"w": old}, {"w": new})


@given(
    changed=st.lists(st.integers(0, 5000), max_size=12, unique=True),
    pieces=st.sampled_from([1, 255, 256, 1000, 5001]),
)
@settings(max_examples=60, deadline=None, database=None)
def test_any_gaps_come_back_whatever_the_size_of_a_piece(changed: list[int], pieces: int) -> None:
    old = torch.zeros(5001).bfloat16()
    new = old.clone()
    new[changed] = 1.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(delta, "CHUNK", pieces)
        there_and_back({"w": old}, {"w": new})


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511])
def test_gaps_around_multiples_of_255_come_back(gap: int) -> None:
    old = torch.zeros(2000).bfloat16()
    new = old.clone()
    new[gap] = new[2 * gap + 1] = 1.0
    there_and_back({"w": old}, {"w": new})


@pytest.mark.parametrize("shape", [(0,), (1,), (), (0, 5), (3, 0, 2), (2, 3, 4)])
def test_empty_and_tiny_tensors_come_back(shape: tuple[int, ...]) -> None:
    there_and_back({"w": torch.zeros(shape).bfloat16()}, {"w": torch.ones(shape).bfloat16()})


def test_no_change_costs_a_head_per_piece() -> None:
    same = {"w": torch.randn(1000).bfloat16()}
    assert there_and_back(same, same) == 4 + (2 + 1 + 8) + 24 + 4 + 2


def test_all_change_comes_back() -> None:
    random = np.random.default_rng(0)
    old, new = (halves(random.integers(0, 1 << 16, 70_000)) for _ in range(2))
    there_and_back({"w": old}, {"w": new})


def test_float16_comes_back() -> None:
    old = torch.randn(500).half()
    there_and_back({"w": old}, {"w": (old * 1.001).half()})


@given(left=PATTERNS, right=PATTERNS)
@settings(max_examples=300, deadline=None, database=None)
def test_order_of_the_integers_is_the_order_of_the_floats(left: int, right: int) -> None:
    pair = halves([left, right])
    floats = pair.float()
    low, high = delta.ordered(delta.bits_of(pair)).tolist()
    if floats[0] < floats[1]:
        assert low < high
    assert delta.ordered(delta.ordered(delta.bits_of(pair))).tolist() == bits(pair)


def test_next_larger_float_is_one_step_away_for_both_signs() -> None:
    pair = halves([0xBF80, 0xBF7F])  # -1 and the next larger
    low, high = delta.ordered(delta.bits_of(pair)).tolist()
    assert high - low == 1


def test_small_steps_are_far_smaller_than_the_weights() -> None:
    random = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(400_000, generator=random)
    moved = weights + 2e-6 * torch.randn(400_000, generator=random)
    old, new = {"w": weights.bfloat16()}, {"w": moved.bfloat16()}
    size = there_and_back(old, new)
    assert 2 * 400_000 / size > 30
    bound = delta.entropy_bits(delta.bits_of(old["w"]), delta.bits_of(new["w"])) / 8
    assert 0.75 < bound / size < 1.0


def test_entropy_of_one_change_in_two_with_one_step_is_a_bit_per_element() -> None:
    old = torch.zeros(8, dtype=torch.int16).numpy()
    new = old.copy()
    new[::2] = 1
    assert delta.entropy_bits(old, new) == pytest.approx(8.0)


def test_base_of_another_version_is_refused() -> None:
    old, new = {"w": torch.zeros(9).bfloat16()}, {"w": torch.ones(9).bfloat16()}
    encoded = b"".join(delta.encode(old, new, {}))
    with pytest.raises(ValueError, match="w comes from another base"):
        delta.apply(io.BytesIO(encoded).read, {"w": torch.full((9,), 5.0).bfloat16()})


@pytest.mark.parametrize(
    "work, reason",
    [
        ({}, "unknown tensor 'w'"),
        ({"w": torch.zeros(8).bfloat16()}, "w has another size"),
        ({"w": torch.zeros(9).bfloat16(), "x": torch.zeros(1).bfloat16()}, "the delta lacks x"),
    ],
)
def test_delta_of_another_model_is_refused(work: dict[str, torch.Tensor], reason: str) -> None:
    old, new = {"w": torch.zeros(9).bfloat16()}, {"w": torch.ones(9).bfloat16()}
    encoded = b"".join(delta.encode(old, new, {}))
    with pytest.raises(ValueError, match=reason):
        delta.apply(io.BytesIO(encoded).read, work)


def delta_with(sizes: tuple[int, ...], streams: bytes, elements: int = 100) -> bytes:
    head = struct.pack("<H", 1) + b"w" + struct.pack("<Q", elements)
    return delta.MAGIC + head + struct.pack("<6I", *sizes) + streams


def apply_to_zeros(encoded: bytes, elements: int = 100) -> None:
    chunks = iter([encoded[start : start + 7] for start in range(0, len(encoded), 7)])
    delta.apply(delta.reader_of(chunks), {"w": torch.zeros(elements).bfloat16()})


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


BOMB = frame(b"\0" * 50_000_000)
GAPS, STEPS = frame(b"\xff\xff"), frame(b"\1")
FAR = frame(b"\xc8")


@pytest.mark.parametrize(
    "encoded, reason",
    [
        (b"", "ends too early"),
        (b"NOPE", "not a delta"),
        (delta_with((1 << 31, 10, 0, 0, 0, 0), b""), "a bomb"),
        (delta_with((1, 1 << 30, 0, 0, 0, 0), b""), "a bomb"),
        (delta_with((50, len(BOMB), 0, 0, 0, 0), BOMB), "a bomb|another size"),
        (delta_with((9, 9, 0, 0, 0, 0), b"not zstd!"), "not zstd"),
        (delta_with((2, len(GAPS), 0, 0, 0, 0), GAPS), "a gap without end"),
        (delta_with((1, len(FAR), 1, len(STEPS), 0, 0), FAR + STEPS), "behind the end"),
        (delta_with((1, len(FAR), 0, 0, 0, 0), FAR), "as many gaps as steps"),
    ],
)
def test_malformed_delta_is_refused(encoded: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        apply_to_zeros(encoded)


@given(noise=st.binary(max_size=200), keep=st.integers(0, 60))
@settings(max_examples=300, deadline=None, database=None)
def test_nothing_but_value_error_comes_out_of_garbage(noise: bytes, keep: int) -> None:
    old, new = {"w": torch.zeros(100).bfloat16()}, {"w": torch.ones(100).bfloat16()}
    sound = b"".join(delta.encode(old, new, {}))
    with pytest.raises(ValueError):
        apply_to_zeros(sound[:keep] + noise)


def test_delta_is_tried_for_16_bit_weights_only() -> None:
    one = torch.zeros(1)
    assert delta.unsuitable({"w": one.bfloat16()}) is None
    assert delta.unsuitable({"w": one.half()}) is None
    assert delta.unsuitable({"w": one}) == "float32 weights change everywhere"
    adapter = {"q.lora_A.weight": one.bfloat16(), "q.lora_B.weight": one.bfloat16()}
    assert delta.unsuitable(adapter) == "an adapter is small and changes everywhere"


def test_memory_of_both_ways_is_a_fraction_of_the_weights() -> None:
    import tracemalloc

    random = torch.Generator().manual_seed(0)
    old = {"w": torch.randn(40 << 20, generator=random).bfloat16()}  # 80 MiB
    new = {"w": old["w"].clone()}
    new["w"][::25] *= 1.01
    assert tensors.CHUNK <= 1 << 20
    tracemalloc.start()
    size = sum(len(piece) for piece in delta.encode(old, new, {}))
    pieces = delta.encode(old, new, {})
    work = {"w": old["w"].clone()}
    delta.apply(delta.reader_of(pieces), work)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.1 * (80 << 20)
    assert size < 80 << 20
    assert torch.equal(work["w"], new["w"])
