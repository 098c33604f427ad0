"""The KV cache: its memory, and zeros where nothing was written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from peralta_zmq.engines.native.kv_cache import KVCache


def make_cache(*, num_rows: int, capacity: int) -> KVCache:
    return KVCache(
        num_layers=2,
        num_rows=num_rows,
        num_heads=2,
        capacity=capacity,
        head_dim=32,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def is_zero(cache: KVCache) -> bool:
    return not any(part.any() for pair in cache.layers for part in pair)


@pytest.fixture
def nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("nan_in_new_memory")
def test_new_rows_are_zero() -> None:
    assert torch.empty(1).isnan()
    assert is_zero(make_cache(num_rows=3, capacity=128))


def test_cleared_and_widened_rows_are_zero() -> None:
    cache = make_cache(num_rows=3, capacity=128)
    cache.widen(128)
    for pair in cache.layers:
        for part in pair:
            part.fill_(torch.nan)
    cache.clear()
    assert cache.width < 128
    for length in (1, 64, 128):
        cache.widen(length)
        assert cache.width >= length and is_zero(cache)
