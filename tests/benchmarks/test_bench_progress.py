"""Every long bench says how many of its parts are done, and how long the others take."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import endtoend, losses, original_size, scale

SIDE = {"rates": [1.0], "costs": [1.0], "memory": 1, "announcement": 1, "staleness": 0.0,
        "smallest": 1.0, "steps": 1}  # fmt: skip
COURSE = endtoend.Course(
    wall=10.0, wall_with_start=15.0, cpu=20.0, cpu_with_start=25.0, rollouts_per_s=10.0,
    bytes_per_update=1e6, memory=1e9, steps=20, reached=True, parts={"wait": 4.0, "rest": 6.0},
    kinds={},
)  # fmt: skip
OUTCOME = losses.Outcome("x", first=0.1, last=0.9, held_out=0.9, mismatch_kl=0.0, seconds=1.0)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """How many parts are done by each line, and that it says what is left."""

    def lines() -> list[str]:
        printed = capsys.readouterr().err.splitlines()
        found = [re.fullmatch(r"\S+ (\d+ of \d+) .*, \d+s left", line) for line in printed]
        return [each[1] if each else "" for each in found]

    return lines


def test_endtoend(told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endtoend.environment, "python", lambda: Path(sys.executable))
    monkeypatch.setattr(endtoend, "course_of", lambda *_, **__: COURSE)
    assert list(endtoend.run(quick=False))
    assert told() == [f"{done} of 9" for done in range(1, 10)]


def test_scale(told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "measured", lambda *_, **__: SIDE)
    assert list(scale.run(quick=False))
    assert told() == [*(f"{done} of 8" for done in range(1, 9)), "1 of 6"]


def test_original_size(told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        original_size, "alone", lambda *_, **__: dict.fromkeys(original_size.PARTS, 1.0)
    )
    assert list(original_size.run(quick=False))
    assert told() == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]


def test_losses(told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "train", lambda *_: OUTCOME)
    monkeypatch.setattr(sys, "argv", ["losses", "--rows", "loss grpo", "loss gspo"])
    losses.main()
    assert told() == ["1 of 2", "2 of 2"]
