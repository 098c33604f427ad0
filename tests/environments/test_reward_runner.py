"""A reward that fails is told as a failure, and never as a number."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from peralta_zmq.environments import calculator, reward_runner
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
def paid(problem, text, *, bonus): return 1 + bonus
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "my_task_that_fails.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("my_task_that_fails")
    del sys.modules["my_task_that_fails"]


@pytest.fixture
def asked(task: ModuleType) -> Iterator[RewardRunner]:
    with RewardRunner(task.reward, timeout_seconds=20) as opened:
        yield opened


def test_rewards_come_from_a_process_of_their_own(asked: RewardRunner) -> None:
    assert asked.reward(PROBLEM, "anything") == 1.0
    assert asked.reward(PROBLEM, "true") == 1.0
    assert asked.reward(PROBLEM, "parts") == {"right": 1.0, "short": 0.5}
    assert asked._worker is not None and asked._worker._process.pid != os.getpid()


FAILURES = {
    "raise": r"my_task_that_fails:reward raised ValueError: no such move \(.*\.py, line 7\)",
    "leave": "ended its process with code",
    "die": "ended its process with code 9",
    "nan": "gave nan, which is no number between",
    "inf": "gave inf, which is no number between",
    "large": "gave 2000000.0, which is no number between",
    "none": "gave None, which is no number",
    "word": "gave '1', which is no number",
    "bad part": "gave None, which is no number",
    "array": r"gave array\(\[1\., 2\.\]\), which is no number",
    "huge": r"gave 10{79}, which is no number",
    "huger": "gave .*, which is no number",
    "no sum": "gave {'a': inf, 'b': -inf}, which is no number",
}


def test_a_reward_that_fails_is_an_error_with_its_name_and_the_next_is_given(
    asked: RewardRunner,
) -> None:
    for number, (text, words) in enumerate(FAILURES.items(), start=1):
        with pytest.raises(RewardError, match=words) as caught:
            asked.reward(PROBLEM, text)
        assert "\n" not in str(caught.value)
        assert asked.num_failed == number
        assert asked.reward(PROBLEM, "anything") == 1.0


def test_a_reward_that_hangs_is_ended_in_time_and_its_process_replaced(task: ModuleType) -> None:
    with RewardRunner(task.reward, timeout_seconds=1) as asked:
        with pytest.raises(RewardError, match=r"took longer than 1 s"):
            asked.reward(PROBLEM, "hang")
        assert not is_alive(pid_of(task))
        assert asked.reward(PROBLEM, "anything") == 1.0


def test_rewards_that_always_fail_end_the_program(
    asked: RewardRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_runner, "MAX_IN_A_ROW", 3)
    for text in ("nan", "none", "anything", "nan", "none"):
        if text == "anything":
            asked.reward(PROBLEM, text)
            continue
        with pytest.raises(RewardError):
            asked.reward(PROBLEM, text)
    with pytest.raises(
        TaskError, match=r"3 answers in a row got no reward, the last: .* raised"
    ) as e:
        asked.reward(PROBLEM, "raise")
    assert not isinstance(e.value, RewardError)


def test_a_hanging_reward_does_not_outlive_who_asked(task: ModuleType, tmp_path: Path) -> None:
    script = (
        "import my_task_that_fails as task\n"
        "from peralta_zmq.rollout import Problem\n"
        "from peralta_zmq.environments.reward_runner import RewardRunner\n"
        "runner = RewardRunner(task.reward, timeout_seconds=60)\n"
        "runner.reward(Problem('7', 'mine', (), '4'), 'hang')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    asking = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        assert is_alive(pid_of(task))
    finally:
        asking.kill()
        asking.wait()
    until(lambda: not is_alive(pid_of(task)))


def test_a_bounded_reward_needs_no_process() -> None:
    problem = Problem("1", "calculator", (), "2 + 3")
    with RewardRunner(calculator.reward, timeout_seconds=1, bounded=True) as asked:
        assert [asked.reward(problem, text) for text in ("3 + 2", "7")] == [1.0, 0.0]
        assert asked._worker is None


def test_a_bounded_reward_that_fails_is_an_error_too() -> None:
    broken = Problem("1", "calculator", (), "two")
    with (
        RewardRunner(calculator.reward, timeout_seconds=1, bounded=True) as asked,
        pytest.raises(RewardError, match="two"),
    ):
        asked.reward(broken, "2")


def test_a_reward_that_cannot_start_is_named(task: ModuleType) -> None:
    task.reward.__module__ = "no_such_task_at_all"
    with (
        RewardRunner(task.reward, timeout_seconds=1) as asked,
        pytest.raises(TaskError, match="reward no_such_task_at_all:reward does not start: ended"),
    ):
        asked.reward(PROBLEM, "anything")


def test_options_reach_the_reward(task: ModuleType) -> None:
    with RewardRunner(task.paid, timeout_seconds=20, options={"bonus": 2}) as asked:
        assert asked.reward(PROBLEM, "anything") == 3.0
    with RewardRunner(task.paid, timeout_seconds=20, options={"bonus": 5}, bounded=True) as asked:
        assert asked.reward(PROBLEM, "anything") == 6.0


def pid_of(task: ModuleType) -> int:
    assert task.__file__ is not None
    return int(Path(task.__file__).with_name("pid").read_text())


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
