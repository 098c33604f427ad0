"""Reward functions that fail cause errors, never rewards; a hanging process is replaced."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
from real_programs import has_ended, until

from peralta_zmq.environments import calculator
from peralta_zmq.environments.reward_runner import RewardRunner
from peralta_zmq.errors import RewardError, TaskError
from peralta_zmq.rollout import Message, Problem

PROBLEM = Problem("7", "mine", (Message("user", "say something"),), "4")
REWARD = """
import math, os, pathlib, time
import numpy
def problems(split, seed): ...
def reward(problem, text):
    print("noise on standard output")
    if text == "raise": raise ValueError("no such\\nmove")
    if text == "leave": raise SystemExit(3)
    if text == "die": os._exit(9)
    if text == "hang":
        pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
        while True: time.sleep(0.01)
    if text == "parts": return {"right": 1, "short": 0.5}
    if text == "bad part": return {"right": 1, "short": None}
    if text == "array": return numpy.array([1.0, 2.0])
    if text == "huge": return 10**400
    if text == "huger": return 10**5000
    if text == "no sum": return {"a": math.inf, "b": -math.inf}
    return {"nan": math.nan, "inf": math.inf, "none": None, "word": "1", "true": True,
            "large": 2e6}.get(text, 0.25 * int(problem.answer))
def with_bonus(problem, text, *, bonus): return 1 + bonus
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "failing_task.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("failing_task")
    del sys.modules["failing_task"]


@pytest.fixture
def runner(task: ModuleType) -> Iterator[RewardRunner]:
    with closing(RewardRunner(task.reward, timeout_seconds=20)) as runner:
        yield runner


def test_reward_is_computed_in_another_process(runner: RewardRunner) -> None:
    assert runner.reward(PROBLEM, "anything") == 1.0
    assert runner.reward(PROBLEM, "true") == 1.0
    assert runner.reward(PROBLEM, "parts") == {"right": 1.0, "short": 0.5}
    assert runner._process is not None and runner._process.pid != os.getpid()


FAILURES = {
    "raise": r"failing_task:reward raised ValueError: no such move \(.*\.py, line 7\)",
    "leave": "exited with code",
    "die": "exited with code 9",
    "nan": "returned nan, which is not a number from",
    "inf": "returned inf, which is not a number from",
    "large": "returned 2000000.0, which is not a number from",
    "none": "returned None, which is not a number",
    "word": "returned '1', which is not a number",
    "bad part": "returned {'right': 1, 'short': None}, which is not a number",
    "array": r"returned array\(\[1\., 2\.\]\), which is not a number",
    "huge": r"returned 10{79}, which is not a number",
    "huger": "returned .*, which is not a number",
    "no sum": "returned {'a': inf, 'b': -inf}, which is not a number",
}


def test_failing_reward_is_named_and_the_next_call_succeeds(runner: RewardRunner) -> None:
    for text, message in FAILURES.items():
        with pytest.raises(RewardError, match=message) as caught:
            runner.reward(PROBLEM, text)
        assert "\n" not in str(caught.value)
        assert runner.reward(PROBLEM, "anything") == 1.0


def test_hanging_reward_is_killed_and_its_process_replaced(task: ModuleType) -> None:
    with closing(RewardRunner(task.reward, timeout_seconds=1)) as runner:
        with pytest.raises(RewardError, match=r"took longer than 1 s"):
            runner.reward(PROBLEM, "hang")
        assert has_ended(pid_of(task))
        assert runner.reward(PROBLEM, "anything") == 1.0


def test_reward_process_exits_with_its_parent(task: ModuleType, tmp_path: Path) -> None:
    script = (
        "import failing_task as task\n"
        "from peralta_zmq.rollout import Problem\n"
        "from peralta_zmq.environments.reward_runner import RewardRunner\n"
        "runner = RewardRunner(task.reward, timeout_seconds=60)\n"
        "runner.reward(Problem('7', 'mine', (), '4'), 'hang')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        assert not has_ended(pid_of(task))
    finally:
        parent.kill()
        parent.wait()
    until(lambda: has_ended(pid_of(task)))


def test_bounded_reward_runs_in_this_process() -> None:
    problem = Problem("1", "calculator", (), "2 + 3")
    with closing(RewardRunner(calculator.reward, timeout_seconds=1, bounded=True)) as runner:
        assert [runner.reward(problem, text) for text in ("3 + 2", "7")] == [1.0, 0.0]
        with pytest.raises(RewardError, match="two"):
            runner.reward(Problem("1", "calculator", (), "two"), "2")
        assert runner._process is None


def test_reward_that_cannot_be_imported_is_named(task: ModuleType) -> None:
    task.reward.__module__ = "no_such_task_at_all"
    with (
        closing(RewardRunner(task.reward, timeout_seconds=1)) as runner,
        pytest.raises(TaskError, match="_at_all:reward did not start: its process exited"),
    ):
        runner.reward(PROBLEM, "anything")


def test_options_are_passed_to_the_reward(task: ModuleType) -> None:
    with closing(RewardRunner(task.with_bonus, timeout_seconds=20, options={"bonus": 2})) as runner:
        assert runner.reward(PROBLEM, "anything") == 3.0
    with closing(
        RewardRunner(task.with_bonus, timeout_seconds=20, options={"bonus": 5}, bounded=True)
    ) as runner:
        assert runner.reward(PROBLEM, "anything") == 6.0


def pid_of(task: ModuleType) -> int:
    assert task.__file__ is not None
    return int(Path(task.__file__).with_name("pid").read_text())
