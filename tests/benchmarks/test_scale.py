"""Scale benchmark: when it begins to measure and when it stops."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks import scale


def side(rate: float) -> dict[str, Any]:
    return {"rates": [rate] * 3, "costs": [500.0] * 3}


def test_rate_rises_until_the_trainer_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = list[float]()

    def measured(count: int, *, rate: float, seconds: float) -> dict[str, Any]:
        rates.append(rate)
        return side(min(1600.0, count * rate))

    monkeypatch.setattr(scale, "measured", measured)
    claims = {
        each.name: each for each in scale.faster(1000, side(1000.0), (1.25, 2.0, 4.0), seconds=1.0)
    }
    assert rates == [1.25, 2.0]
    assert claims["groups_per_s_1000_at_1250"].share == 1.0
    assert claims["groups_per_s_1000_at_2000"].share == pytest.approx(0.8)
    assert claims["most_groups_per_s_1000"].ours == 1600.0
    assert claims["cores_at_most_1000"].ours == pytest.approx(0.8)  # 1600 x 500 us


class Queue:
    """A collector with 100 groups in every step."""

    @property
    def acknowledgements(self) -> Queue:
        return self

    def collect(self, step: int, meanwhile: object) -> tuple[list[int], int]:
        return [step] * 100, 0

    def commit(self) -> None:
        pass

    def publish(self, step: int, *, started_step: int) -> None:
        pass


def drained(*moments: float) -> int:
    clock = iter(moments)
    return scale.drain(cast(Any, Queue()), 5, rate=100.0, clock=lambda: next(clock))


def test_drain_consumes_the_queue_before_the_measurement() -> None:
    assert drained(0.0, 0.2, 0.6, 1.6) == 8  # two steps from the queue, one at the rate


def test_drain_ends_at_once_when_the_trainer_falls_behind() -> None:
    assert drained(0.0, 2.0) == 6


def test_drain_has_a_time_limit() -> None:
    assert drained(0.0, 0.5, scale.DRAIN_SECONDS) == 7
