from __future__ import annotations

import pytest

from peralta_zmq.learning.lr_schedule import learning_rate


def rates(kind: str, *, warmup_steps: int, max_steps: int) -> list[float]:
    return [
        learning_rate(step, peak=8.0, kind=kind, warmup_steps=warmup_steps, max_steps=max_steps)
        for step in range(1, max_steps + 1)
    ]


def test_constant_is_the_peak_at_every_step() -> None:
    assert rates("constant", warmup_steps=0, max_steps=3) == [8, 8, 8]


def test_linear_falls_evenly_and_ends_above_zero() -> None:
    assert rates("linear", warmup_steps=0, max_steps=4) == [8, 6, 4, 2]


def test_cosine_is_at_half_of_the_peak_halfway() -> None:
    # 4 (1 + cos 0), 4 (1 + cos 45), 4 (1 + cos 90), 4 (1 + cos 135)
    expected = [8, 6.828427, 4, 1.171573]
    assert rates("cosine", warmup_steps=0, max_steps=4) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warmup_rises_evenly_to_the_peak(kind: str) -> None:
    assert rates(kind, warmup_steps=4, max_steps=8)[:5] == [2, 4, 6, 8, 8]


def test_linear_falls_after_the_warmup() -> None:
    assert rates("linear", warmup_steps=2, max_steps=6) == [4, 8, 8, 6, 4, 2]


def test_warmup_as_long_as_the_run_is_only_warmup() -> None:
    assert rates("cosine", warmup_steps=4, max_steps=4) == [2, 4, 6, 8]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_no_step_of_a_run_has_rate_zero(kind: str) -> None:
    assert min(rates(kind, warmup_steps=3, max_steps=50)) > 0
