"""How a session of a trainer ends: complete, or stopped by hand.

.venv/bin/python -m pytest tests/test_trainer_end.py
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import test_resume
from test_resume import Session

from peralta_zmq.observe.metrics import EVENTS, read_rows
from peralta_zmq.trainer.roster import SILENCE_SECONDS

pytestmark = pytest.mark.timeout(60)
signals = test_resume.signals


def test_a_last_evaluation_that_takes_long_is_no_silence_of_the_generators(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Session(stack, tmp_path, "--train.max-steps=4").trainer
    while trainer.unfinished:
        trainer.advance()
    assert trainer._roster.live()
    clock, passed, evaluate = time.monotonic, [0.0], trainer._evaluations.evaluate

    def evaluate_slowly(step: int) -> None:
        passed[0] += SILENCE_SECONDS + 1
        evaluate(step)

    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])
    monkeypatch.setattr(trainer._evaluations, "evaluate", evaluate_slowly)
    trainer.finish()
    events = [row["event"] for row in read_rows(trainer._folder / EVENTS)]
    assert "complete" in events and "leave" not in events
    assert events[events.index("evaluate") :] == ["evaluate", "evaluated", "complete"]


def test_a_run_that_is_stopped_leaves_its_curve_and_its_page(
    tmp_path: Path, stack: ExitStack
) -> None:
    trainer = Session(stack, tmp_path).trainer
    trainer.advance()
    trainer._stop.asked = True
    trainer.finish()
    assert (trainer._folder / "reward.png").read_bytes()[:4] == b"\x89PNG"
    page = (trainer._folder / "report.html").read_text("utf-8")
    assert '"condition": "stopped"' in page and '"num_steps": 1,' in page


def test_a_trainer_that_waits_for_groups_tells_the_verdict_meanwhile(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trainer = Session(stack, tmp_path, "--train.max-steps=4").trainer
    trainer._books.event("resume", step=trainer._learner.step)
    capsys.readouterr()
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 45.0)
    trainer._stop.asked = True  # after one look for groups
    trainer.advance()
    told = "verdict: no step yet: no generator has come in 45s; start one: bin/generator @ CONFIG"
    assert told in capsys.readouterr().out.splitlines()
