"""Progress lines of the long benchmarks: parts done and time left."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import endtoend, losses, original_size, scale

SIDE = {"rates": [1.0], "costs": [1.0], "memory": 1, "announcement": 1, "staleness": 0.0,
        "smallest": 1.0, "steps": 1}  # fmt: skip
RESULT = endtoend.RunResult(
    wall=10.0, wall_with_start=15.0, ready=3.0, cpu=20.0, cpu_with_start=25.0, rollouts_per_s=10.0,
    bytes_per_update=1e6, memory=1e9, steps=20, reached=True, parts={"wait": 4.0, "rest": 6.0},
    kinds={},
)  # fmt: skip
OUTCOME = losses.Outcome("x", first=0.1, last=0.9, held_out=0.9, mismatch_kl=0.0, loss_ms=1.0)


@pytest.fixture
def progress(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """The parts done of each printed line, which must also contain the time left."""

    def lines() -> list[str]:
        printed = capsys.readouterr().err.splitlines()
        matches = [re.fullmatch(r"\S+ (\d+ of \d+) .*, \d+s left", line) for line in printed]
        return [match[1] if match else "" for match in matches]

    return lines


def test_endtoend_prints_its_progress(
    progress: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endtoend.environment, "python", lambda: Path(sys.executable))
    monkeypatch.setattr(endtoend, "run_side", lambda *_, **__: RESULT)
    assert list(endtoend.run(quick=False))
    assert progress() == [f"{done} of 9" for done in range(1, 10)]


def test_scale_prints_its_progress(
    progress: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "measured", lambda *_, **__: SIDE)
    assert list(scale.run(quick=False))
    assert progress() == [*(f"{done} of 8" for done in range(1, 9)), "1 of 6"]


def test_original_size_prints_its_progress(
    progress: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        original_size,
        "measure_in_process",
        lambda *_, **__: dict.fromkeys(original_size.PARTS, 1.0),
    )
    assert list(original_size.run(quick=False))
    assert progress() == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]


def test_losses_prints_its_progress(
    progress: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "train", lambda *_: OUTCOME)
    monkeypatch.setattr(sys, "argv", ["losses", "--rows", "loss grpo", "loss gspo"])
    losses.main()
    assert progress() == ["1 of 2", "2 of 2"]
