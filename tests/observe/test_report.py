"""Summary and closing report of a small synthetic run."""

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import append

from peralta_zmq.observe.metrics import EVALUATIONS, EVENTS, METRICS, Row
from peralta_zmq.observe.report import closing_text, write_summary
from peralta_zmq.observe.verdict import Verdict

REWARDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.9)
VERDICT = Verdict("balanced", "", "ok")
ACCOUNTING = {"made": 9, "trained": 6, "no_signal": 2, "lost": 0, "in_flight": 1, "duplicates": 3}
LAST = {"ann/aa": 9}
CLOSING: Any = {"accounting": ACCOUNTING, "final_statuses": LAST, "verdict": VERDICT}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six steps in two sessions: 100-112 s, a pause, 200-207 s; step 3 was trained twice."""
    steps = (1, 2, 3, 3, 4, 5)
    times = (105.0, 110.0, 111.0, 203.0, 205.0, 207.0)
    rows: list[Row] = [
        {"step": step, "time": moment, "reward": reward, "reward_std": 0.2}
        for step, moment, reward in zip(steps, times, REWARDS, strict=True)
    ]
    events: list[Row] = [
        {"time": 100.0, "event": "start", "step": 0},
        {"time": 112.0, "event": "restart", "worker": "trainer"},
        {"time": 200.0, "event": "resume", "step": 2},
    ]
    append(tmp_path / METRICS, *rows)
    append(tmp_path / EVENTS, *events)
    return tmp_path


def evaluate(folder: Path, step: int, accuracy: float, *answers: tuple[str, str, float]) -> None:
    names = ("problem", "answer", "reward")
    listed = [dict(zip(names, answer, strict=True)) for answer in answers]
    append(folder / EVALUATIONS, {"step": step, "accuracy": accuracy, "answers": listed})


@pytest.fixture
def evaluated(folder: Path) -> Path:
    """The same run with an evaluation of the base and of the trained model."""
    evaluate(folder, 0, 0.5, ("add 3 to 5", "3 5 +", 0.0), ("x" * 60, "the result\nis 8.", 0.0))
    evaluate(folder, 5, 0.97, ("add 3 to 5", "3 + 5", 1.0), ("x" * 60, "8", 0.5))
    return folder


def test_summary_fields(evaluated: Path) -> None:
    write_summary(evaluated, **CLOSING | {"accounting": {}})
    summary = write_summary(evaluated, **CLOSING)  # replaces the earlier one
    assert summary == {
        "reward_first": 0.3,
        "reward_last5": pytest.approx((0.4 + 0.5 + 0.6 + 0.7 + 0.9) / 5),
        "eval_before": 0.5,
        "eval_after": 0.97,
        "seconds": 12.0 + 7.0,  # the pause between the sessions does not count
        "steps": 5,
        "restarts": 1,
        "accounting": ACCOUNTING,
        "final_statuses": LAST,
        "verdict": {"sentence": "balanced", "advice": "", "level": "ok"},
    }
    assert json.loads((evaluated / "summary.json").read_text()) == summary
    assert len(list(evaluated.iterdir())) == 4  # no temporary file


def test_summary_of_a_run_without_rows_has_nulls(tmp_path: Path) -> None:
    summary = write_summary(tmp_path, **CLOSING)
    for key in ("reward_first", "reward_last5", "eval_before", "eval_after"):
        assert summary[key] is None
    assert (summary["seconds"], summary["steps"], summary["restarts"]) == (0.0, 0, 0)


def test_closing_text_shows_answers_and_results(evaluated: Path) -> None:
    summary = write_summary(evaluated, **CLOSING)
    weights = evaluated / "weights/step_000006"
    lines = closing_text(evaluated, summary, weights).splitlines()
    assert lines[0].split() == ["problem", "base", "answer", "trained", "answer", "reward"]
    assert lines[1].split("  ")[0] == "add 3 to 5"
    assert lines[1].index("3 5 +") < lines[1].index("3 + 5") < lines[1].index("0 -> 1")
    assert lines[2].startswith("x" * 44 + "  the result is 8.")
    assert lines[3] == "x" * 16  # the rest of the problem
    assert "held-out accuracy  0.500 -> 0.970" in lines
    assert "verdict            balanced" in lines
    outcomes = "6 trained + 2 without signal + 1 in flight; 3 received twice and counted once"
    assert f"groups             9 made = {outcomes}" in lines
    assert f"metrics            {evaluated / METRICS}" in lines
    load = f'model = AutoModelForCausalLM.from_pretrained("{weights}")'
    assert lines[-3:-1] == ["from transformers import AutoModelForCausalLM, AutoTokenizer", load]


def test_closing_text_shows_long_answers_at_full_length(evaluated: Path) -> None:
    long = "The result is\n" + "8" * 200
    evaluate(evaluated, 6, 0.97, ("x" * 60, long, 1.0), ("add 3 to 5", "3 + 5", 1.0))
    text = closing_text(evaluated, write_summary(evaluated, **CLOSING), evaluated)
    blocks = text.split("\n\n")
    assert blocks[0].splitlines() == [
        "problem            " + "x" * 60,
        "base answer        the result is 8.",
        "trained answer     The result is " + "8" * 200,
        "reward             0 -> 1",
    ]
    assert blocks[1].startswith("problem            add 3 to 5\n")
    assert blocks[2].startswith("held-out accuracy")


def test_closing_text_marks_answers_that_were_cut_off(folder: Path) -> None:
    rows = (("3 5 +", False), ("no end, " * 9, True))
    for step, (answer, cut_off) in enumerate(rows):
        listed = {"problem": "add", "answer": answer, "reward": 0.0, "cut_off": cut_off}
        append(folder / EVALUATIONS, {"step": step, "accuracy": 0.5, "answers": [listed]})
    lines = closing_text(folder, write_summary(folder, **CLOSING), folder).splitlines()
    assert lines[1] == "base answer        3 5 +"
    assert lines[2] == f"trained answer     {'no end, ' * 9}[cut off]"


def test_closing_text_without_base_evaluation_compares_no_answers(folder: Path) -> None:
    evaluate(folder, 5, 0.97)
    text = closing_text(folder, write_summary(folder, **CLOSING), folder)
    assert text.startswith("held-out accuracy  - -> 0.970")
