"""A generator whose allocations fail."""

from __future__ import annotations

import pytest
from config_files import load

from peralta_zmq.config import Config
from peralta_zmq.errors import OutOfMemoryError
from peralta_zmq.generator import generator


class Attempts:
    """Stands in for `run_once`: an allocation fails with more than `fitting` slots."""

    def __init__(self, fitting: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slots, self._fitting = list[int](), fitting
        monkeypatch.setattr(generator, "run_once", self._run_once)

    def _run_once(self, config: Config) -> None:
        self.slots.append(config.engine.slots)
        if config.engine.slots > self._fitting:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def test_generator_without_memory_continues_with_half_the_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = Attempts(8, monkeypatch)
    generator.run(load("--model.device=cpu", "--engine.slots=24"))
    assert attempts.slots == [24, 12, 6]
    assert [each.message.rpartition("; ")[2] for each in caplog.records] == [
        "continuing with engine.slots=12",
        "continuing with engine.slots=6",
    ]
    assert "the generator is out of memory (CUDA out of memory" in caplog.records[0].message


def test_generator_without_memory_for_one_slot_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(0, monkeypatch)
    with pytest.raises(OutOfMemoryError):
        generator.run(load("--model.device=cpu", "--engine.slots=2"))
    assert attempts.slots == [2, 1]
