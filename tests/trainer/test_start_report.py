"""The lines that say what a new run will do."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from peralta_zmq.config import load_config
from peralta_zmq.trainer.trainer import Trainer
from tools.link_proxy import free_ports

LinesOf = Callable[..., list[str]]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"add {n} and 2", "answer": n + 2}) for n in range(20)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def lines_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> LinesOf:
    """A function that returns the lines of a run with these arguments."""

    def lines(*arguments: str, reasons: dict[str, str] | None = None) -> list[str]:
        places = ["--run.dir", str(tmp_path / "runs"), "--wire.port", str(free_ports())]
        config = load_config("bin/trainer", [*places, "--dashboard.port=None", *arguments])
        with ExitStack() as stack:
            trainer = Trainer(config, stack)
            trainer.recover()
            capsys.readouterr()
            trainer.describe(reasons or {})
            return capsys.readouterr().out.splitlines()

    return lines


def test_start_says_what_is_trained_on_what(lines_of: LinesOf, rows: Path) -> None:
    lines = lines_of(
        "--data.train", str(rows), "--train.learning-rate=2e-4", "--train.batch-size=128",
        "--sampling.max-completion-length=48", "--engine.max-model-len=512",
        "--train.max-tokens-per-microbatch=4096", "--eval.interval=20",
        reasons={"train.learning_rate": "the model is small"},
    )  # fmt: skip
    assert len(lines) <= 7
    text = "\n".join(lines)
    assert "embedded, 1.7 M parameters; full fine-tuning" in text
    assert "rows, reward answer_match (18 numbers)" in text
    assert "18 prompts to train on, 2 held out, evaluated every 20 steps" in text
    assert "rate 0.0002 (the model is small), linear; 80 steps of 128 rollouts" in text
    assert "completions of up to 48 tokens; context 512; micro-batches of 4096 tokens" in text


def test_start_shows_an_answer_with_its_reward(
    lines_of: LinesOf, tmp_path: Path, rows: Path
) -> None:
    (tmp_path / "r.py").write_text("def half(problem, text): return 0.5\n")
    lines = lines_of("--data.train", str(rows), "--task.reward", f"{tmp_path}/r.py:half")
    assert lines[-1].startswith("example   'add 0 and 2' -> ")
    assert lines[-1].endswith("earns 0.5; the answer is '2'")


def test_start_names_a_reward_that_fails(lines_of: LinesOf, tmp_path: Path, rows: Path) -> None:
    (tmp_path / "r.py").write_text("def wrong(problem, text): return text + 1\n")
    lines = lines_of("--data.train", str(rows), "--task.reward", f"{tmp_path}/r.py:wrong")
    assert "an answer of the model gets no reward" in lines[-1]
    assert "TypeError" in lines[-1]
