"""The results that `make run` promises, measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_programs import missing_keys, ran

from peralta_zmq.observe.metrics import read_rows
from tools.link_proxy import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("loss", ["reinforce", "grpo"])
def test_embedded_run_learns_within_three_minutes(loss: str, tmp_path: Path) -> None:
    ran("lan", "local", "@", "configs/demo.toml", "--run.dir", str(tmp_path), "--loss.name", loss,
        "--wire.port", str(free_ports()))  # fmt: skip
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    # Of 128 answers of 16 prompts; the base's mean is near .32, one step's lies within .2 of it.
    assert 0.12 <= summary["reward_first"] <= 0.52
    assert summary["reward_last5"] >= 0.95
    assert summary["eval_before"] <= 0.60
    assert summary["eval_after"] >= 0.95
    assert summary["seconds"] < 180
    assert summary["restarts"] == 0
    rows = read_rows(tmp_path / "demo" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 81))
    assert [missing_keys(row) for row in rows] == [set()] * 80


@pytest.mark.parametrize(("task", "chance"), [("guess_number", 0.1), ("calculator_tool", 0.0)])
@pytest.mark.parametrize("max_turns", [8, 1])
def test_task_with_several_turns_is_learned_only_with_them(
    task: str, chance: float, max_turns: int, tmp_path: Path
) -> None:
    ran("lan", "local", "@", f"configs/{task}.toml", "--run.dir", str(tmp_path),
        "--task.max-turns", str(max_turns), "--wire.port", str(free_ports()))  # fmt: skip
    summary = json.loads((tmp_path / task / "summary.json").read_text())
    assert summary["seconds"] < 300
    if max_turns == 1:
        assert summary["eval_after"] <= chance + 0.1  # 100 problems
    else:
        assert summary["eval_before"] <= 0.5
        assert summary["eval_after"] >= 0.95
