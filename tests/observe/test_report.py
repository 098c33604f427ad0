"""Summary, plot and closing report of a small synthetic run."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq.observe.metrics import EVENTS, METRICS, JsonLines, Row
from peralta_zmq.observe.report import closing_text, write_reward_plot, write_summary
from peralta_zmq.observe.verdict import Verdict
from peralta_zmq.rollout import Answer

pytestmark = pytest.mark.timeout(60)

REWARDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.9)
VERDICT = Verdict("balanced", "", "ok")
ACCOUNTING = {"made": 9, "trained": 6, "no_signal": 2, "lost": 0, "in_flight": 1, "duplicates": 3}
LAST = {"ann/aa": 9}
CLOSING: Any = {"accounting": ACCOUNTING, "last_reports": LAST, "verdict": VERDICT}


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
    for name, lines in ((METRICS, rows), (EVENTS, events)):
        with JsonLines(tmp_path / name) as file:
            for line in lines:
                file.append(line)
    return tmp_path


def test_summary_fields(folder: Path) -> None:
    summary = write_summary(folder, eval_before=0.5, eval_after=0.97, **CLOSING)
    assert summary == {
        "reward_first": 0.3,
        "reward_last5": pytest.approx((0.4 + 0.5 + 0.6 + 0.7 + 0.9) / 5),
        "eval_before": 0.5,
        "eval_after": 0.97,
        "seconds": 12.0 + 7.0,  # the pause between the sessions does not count
        "steps": 5,
        "restarts": 1,
        "accounting": ACCOUNTING,
        "last_reports": LAST,
        "verdict": {"sentence": "balanced", "advice": "", "level": "ok"},
    }
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_summary_of_a_run_without_rows_has_nulls(tmp_path: Path) -> None:
    summary = write_summary(tmp_path, eval_before=None, eval_after=None, **CLOSING)
    assert (summary["reward_first"], summary["reward_last5"]) == (None, None)
    assert (summary["seconds"], summary["steps"], summary["restarts"]) == (0.0, 0, 0)


def test_summary_replaces_the_earlier_one(folder: Path) -> None:
    write_summary(folder, eval_before=0.5, eval_after=None, **CLOSING)
    write_summary(folder, eval_before=0.5, eval_after=0.9, **CLOSING)
    assert json.loads((folder / "summary.json").read_text())["eval_after"] == 0.9
    assert {path.name for path in folder.iterdir()} == {METRICS, EVENTS, "summary.json"}


def test_plot_is_a_png(folder: Path) -> None:
    write_summary(folder, eval_before=0.5, eval_after=0.97, **CLOSING)
    path = write_reward_plot(folder)
    assert path == folder / "reward.png"
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (1350, 720)


def test_plot_draws_evaluations_and_resumes(folder: Path) -> None:
    def plot() -> bytes:
        path = write_reward_plot(folder)
        assert path
        return path.read_bytes()

    with_resume = plot()
    write_summary(folder, eval_before=0.5, eval_after=0.97, **CLOSING)
    with_both = plot()
    (folder / EVENTS).unlink()
    assert len({with_resume, with_both, plot()}) == 3


def test_plot_without_matplotlib_is_none(folder: Path) -> None:
    program = (
        "import sys, pathlib; sys.modules['matplotlib'] = None\n"
        "from peralta_zmq.observe.report import write_reward_plot\n"
        "print(write_reward_plot(pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    assert not (folder / "reward.png").exists()


def test_report_imports_neither_matplotlib_nor_torch() -> None:
    program = (
        "import sys, peralta_zmq.observe.report, peralta_zmq.observe.terminal\n"
        "print({'matplotlib', 'torch'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_closing_text_shows_answers_and_results(folder: Path) -> None:
    summary = write_summary(folder, eval_before=0.5, eval_after=0.97, **CLOSING)
    write_reward_plot(folder)
    before = [Answer("add 3 to 5", "3 5 +", 0.0), Answer("x" * 60, "the result\nis 8.", 0.0)]
    after = [Answer("add 3 to 5", "3 + 5", 1.0), Answer("x" * 60, "8", 0.5)]
    text = closing_text(folder, summary, before, after, folder / "weights/step_000006")
    lines = text.splitlines()
    assert lines[0].split() == ["problem", "base", "answer", "trained", "answer", "reward"]
    assert lines[1].split("  ")[0] == "add 3 to 5"
    assert lines[1].index("3 5 +") < lines[1].index("3 + 5") < lines[1].index("0 -> 1")
    assert lines[2].startswith("x" * 41 + "...  the result is 8.")
    assert "held-out accuracy  0.500 -> 0.970" in lines
    assert "verdict            balanced" in lines
    outcomes = "6 trained + 2 without signal + 1 in flight; 3 received twice and counted once"
    assert f"groups             9 made = {outcomes}" in lines
    assert f"plot               {folder / 'reward.png'}" in lines
    assert f"metrics            {folder / METRICS}" in lines
    load = f'model = AutoModelForCausalLM.from_pretrained("{folder / "weights/step_000006"}")'
    assert lines[-3:-1] == ["from transformers import AutoModelForCausalLM, AutoTokenizer", load]


def test_closing_text_without_base_evaluation_has_a_dash(folder: Path) -> None:
    summary = write_summary(folder, eval_before=None, eval_after=0.97, **CLOSING)
    text = closing_text(folder, summary, [], [], folder)
    assert "held-out accuracy  - -> 0.970" in text
