"""End-to-end benchmark: goal, claims, and the measurement of commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import endtoend, measured_command
from benchmarks.harness import REPO
from benchmarks.measured_command import MeasuredCommand


def rows(*rewards: float) -> list[Mapping[str, float]]:
    return [
        {"step": number + 1, "reward": reward, "time": 100.0 + number}
        for number, reward in enumerate(rewards)
    ]


def result(wall: float, *, reached: bool = True) -> endtoend.RunResult:
    return endtoend.RunResult(
        wall=wall, wall_with_start=wall + 5, ready=3.0, cpu=2 * wall, cpu_with_start=2 * wall + 5,
        rollouts_per_s=100 / wall, bytes_per_update=1e6, memory=1e9, steps=20, reached=reached,
        parts={"wait": wall / 4, "rest": 3 * wall / 4},
        kinds={"trainer": wall / 2, "generators": 0.0},
    )  # fmt: skip


def test_goal_is_the_first_step_with_the_mean_of_the_last_five() -> None:
    # means of five: .88, .9, .94
    assert endtoend.steps_to_goal(rows(0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 1.0)) == 6


def test_goal_needs_five_steps() -> None:
    assert endtoend.steps_to_goal(rows(1.0, 1.0, 1.0, 1.0)) is None


def test_goal_is_not_reached_by_single_high_rewards() -> None:
    assert endtoend.steps_to_goal(rows(0.5, 1.0, 0.5, 1.0, 0.5, 1.0, 0.5)) is None


def test_cpu_seconds_are_interpolated_between_samples() -> None:
    first, second = {"trainer": 1.0}, {"trainer": 2.0}
    samples = [
        measured_command.Sample(10.0, 4.0, 0, first),
        measured_command.Sample(12.0, 8.0, 0, second),
    ]
    assert measured_command.between(samples, 10.5) == pytest.approx(5.0)
    assert measured_command.between(samples, 10.5, "trainer") == pytest.approx(1.25)
    assert measured_command.between(samples, 9.0) == 4.0
    assert measured_command.between(samples, 13.0) == 8.0


def test_ratio_is_the_median_over_the_rounds() -> None:
    ours, theirs = [result(10), result(20), result(10)], [result(30), result(40), result(90)]
    claims = {each.name: each for each in endtoend.comparison("trl", ours, theirs)}
    assert claims["wall_vs_trl"].ratio == pytest.approx(3.0)  # of 3, 2 and 9
    assert claims["rollouts_per_s_vs_trl"].ratio == pytest.approx(3.0)
    assert claims["wall_vs_trl"].n == 3
    assert claims["wall_vs_trl"].spread == pytest.approx(1.0)  # (20 - 10) / 10


def test_unit_mentions_a_side_that_missed_the_goal() -> None:
    claims = list(endtoend.comparison("trl", [result(10)], [result(30, reached=False)]))
    assert "not all reached" in claims[0].unit


def test_parts_and_rest_add_up_to_the_wall_seconds() -> None:
    parts = {"time/wait_for_batch": 1.0, "time/journal": 0.25, "time/forward_backward": 2.0,
             "time/publish": 0.5}  # fmt: skip
    rows = [{**parts, "time": moment, "step_time": 4.0} for moment in (104.0, 108.0)]
    assert endtoend.parts_of(rows, started=100.0, wall=8.0) == {
        "wait": 2.0, "journal": 0.5, "train": 4.0, "publish": 1.0, "rest": 0.5
    }  # fmt: skip
    # The trainer began the first step 0.75 s before everything was loaded.
    parts = endtoend.parts_of(rows, started=100.75, wall=7.25)
    assert (parts["wait"], parts["rest"]) == (1.25, 0.5)


def test_concurrent_parts_do_not_reduce_the_rest() -> None:
    rows = [{"seconds": {"wait": 3.0, "train": 1.0, "generate_meanwhile": 3.5}}] * 2
    assert endtoend.parts_of(rows, started=0.0, wall=9.0) == {
        "wait": 6.0, "train": 2.0, "generate_meanwhile": 7.0, "rest": 1.0
    }  # fmt: skip


def test_share_of_a_part_is_computed_per_round() -> None:
    cores, first, second, cpu = endtoend.breakdown("trl", [result(10), result(30), result(20)])
    assert (first.name, first.ours, first.share) == ("time_trl_wait", 5.0, 0.25)
    assert (second.name, second.n) == ("time_trl_rest", 3)
    assert (cores.name, cores.ours) == ("cores_trl", 2.0)
    assert (cpu.name, cpu.ours, cpu.share) == ("cpu_trl_trainer", 10.0, 0.25)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_everything_is_loaded_when_the_first_generator_joins(tmp_path: Path) -> None:
    events = [("start", 100.0), ("join", 101.0), ("join", 101.5), ("publish", 102.0)]
    lines = [json.dumps({"event": name, "time": moment}) for name, moment in events]
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "events.jsonl").write_text("\n".join([*lines, ""]))
    command = ["sleep", "60"]
    with MeasuredCommand(command, cwd=REPO, environment={}, errors=subprocess.DEVNULL) as child:
        assert next(endtoend.our_rows(tmp_path, child)) == {"time": 101.0}


def test_rows_of_a_growing_file_are_read_once_and_whole(tmp_path: Path) -> None:
    growing = endtoend.GrowingFile(tmp_path / "rows.jsonl")
    assert growing.new_rows() == []  # no file
    with (tmp_path / "rows.jsonl").open("a", buffering=1) as file:
        for text, rows in (
            ('{"a": 1}\n{"a": 2}\n{"a"', [{"a": 1}, {"a": 2}]),
            (": 3", []),
            ("}\n", [{"a": 3}]),
        ):
            file.write(text)
            file.flush()
            assert growing.new_rows() == rows


def test_share_of_local_ready_is_the_used_part_of_the_limit() -> None:
    claim = endtoend.ready_claim([6.0, 1.0, 1.5])
    assert (claim.ours, claim.bound, claim.share, claim.n) == (1.5, 3.0, 0.5, 3)


ORPHAN = """
import subprocess, sys
print("begun", flush=True)
subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_orphaned_processes_are_counted_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_command, "MEMORY_PERIOD", 0.0)  # read it in each sample
    command = [sys.executable, "-c", ORPHAN]
    with MeasuredCommand(command, cwd=REPO, environment={}, errors=subprocess.DEVNULL) as left:
        before = set(measured_command.family(os.getpid()))
        ends = time.monotonic() + 20
        while not (left.samples and left.samples[-1].cpu > 0.3) and time.monotonic() < ends:
            left.process.poll()
            before |= set(measured_command.family(os.getpid()))
            time.sleep(0.02)
        assert left.samples[-1].cpu > 0.3
        assert left.read_output() == "begun\n"
    assert not [each for each in before if measured_command.is_running(each)]
    assert left.peak_memory > 1 << 20


def burn(seconds: float, name: str) -> list[str]:
    """A command that computes for `seconds`, prints a line and sleeps."""
    work = "import time\nwhile time.process_time() < {}: pass\nprint(1, flush=True)\ntime.sleep(60)"
    return [sys.executable, "-c", work.format(seconds), name]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_earlier_processes_do_not_count() -> None:
    with subprocess.Popen(burn(1.0, "before"), stdout=subprocess.PIPE) as before:
        assert before.stdout
        before.stdout.readline()
        with MeasuredCommand(
            burn(0.0, "next"), cwd=REPO, environment={}, errors=subprocess.DEVNULL
        ) as second:
            ends = time.monotonic() + 20
            while not second.read_output() and time.monotonic() < ends:
                time.sleep(0.02)
            count = len(second.samples)
            while len(second.samples) == count and time.monotonic() < ends:
                time.sleep(0.02)
            assert 0 <= second.samples[-1].cpu < 0.5
    assert not measured_command.family(os.getpid())
