"""End-to-end benchmark: goal, claims, and the measurement of commands."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import endtoend
from benchmarks.harness import REPO
from benchmarks.measured_command import MeasuredCommand


def rows(*rewards: float) -> list[Mapping[str, float]]:
    return [
        {"step": number + 1, "reward": reward, "time": 100.0 + number}
        for number, reward in enumerate(rewards)
    ]


def result(wall: float) -> endtoend.RunResult:
    return endtoend.RunResult(
        wall=wall, wall_with_start=wall + 5,
        bytes_per_update=1e6, memory=1e9, steps=20, tokens_per_s=1e3, reached=True,
    )  # fmt: skip


@pytest.mark.parametrize(("rewards", "steps"), [
    ((0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 1.0), 6),  # means of five: .88, .9, .94
    ((1.0, 1.0, 1.0, 1.0), None),
    ((0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5), None),
])  # fmt: skip
def test_goal_is_the_first_step_with_the_mean_of_the_last_five(
    rewards: tuple[float, ...], steps: int | None
) -> None:
    assert endtoend.steps_to_goal(rows(*rewards), 5) == steps


def test_ratio_is_the_median_over_the_rounds() -> None:
    ours, theirs = [result(10), result(20), result(10)], [result(30), result(40), result(90)]
    claims = {each.name: each for each in endtoend.comparison("trl", ours, theirs)}
    assert claims["wall_vs_trl"].ratio == pytest.approx(3.0)  # of 3, 2 and 9
    assert claims["wall_vs_trl"].n == 3
    assert claims["wall_vs_trl"].spread == pytest.approx(1.0)  # (20 - 10) / 10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_everything_is_loaded_when_the_first_generator_joins(tmp_path: Path) -> None:
    events = [("start", 100.0), ("join", 101.0), ("join", 101.5), ("publish", 102.0)]
    lines = [json.dumps({"event": name, "time": moment}) for name, moment in events]
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "events.jsonl").write_text("\n".join([*lines, ""]))
    command = ["sleep", "60"]
    with MeasuredCommand(command, cwd=REPO, environment={}, errors=subprocess.DEVNULL) as child:
        assert next(endtoend.our_rows(tmp_path, child)) == {"time": 101.0}


ORPHAN = """
import subprocess, sys
print("begun", flush=True)
orphan = "import time; big = b'x' * (100 << 20); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", orphan], start_new_session=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_orphaned_processes_are_counted_and_ended() -> None:
    command = [sys.executable, "-c", ORPHAN]
    earlier = subprocess.Popen(["sleep", "60"])
    with MeasuredCommand(command, cwd=REPO, environment={}, errors=subprocess.DEVNULL) as left:
        ends = time.monotonic() + 20
        while left.peak_memory < 100 << 20 and time.monotonic() < ends:
            left.process.poll()
            time.sleep(0.02)
        orphans = left.members()
        assert left.read_output() == "begun\n"
    assert orphans and not any(orphan.is_running() for orphan in orphans)
    assert 100 << 20 < left.peak_memory < 300 << 20
    assert earlier.poll() is None  # a process of the caller goes on
    earlier.kill()
    earlier.wait()
