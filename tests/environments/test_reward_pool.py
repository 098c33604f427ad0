"""Reward functions that fail cause errors, never rewards; workers that hang are replaced."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from real_programs import has_ended, until
from user_modules import UserModules

from peralta_zmq.environments import calculator
from peralta_zmq.environments.reward_functions import RewardFunction
from peralta_zmq.environments.reward_pool import LocalFunctions, RewardPool
from peralta_zmq.errors import RewardError, TaskError
from peralta_zmq.rollout import Message, Problem, Score

PROBLEM = Problem("7", "mine", (Message("user", "say something"),), "4")
REWARD = """
import asyncio, math, os, pathlib, time
import numpy
HERE = pathlib.Path(__file__).parent
class TextlessError(Exception):
    def __str__(self): raise ValueError("no text")
def problems(split, seed): ...
def reward(problem, text):
    print("noise on standard output")
    if text == "raise": raise ValueError("no such\\nmove")
    if text == "leave": raise SystemExit(3)
    if text == "die": os._exit(9)
    if text == "hang":
        (HERE / "pid").write_text(str(os.getpid()))
        while True: time.sleep(0.01)
    if text == "parts": return {"right": 1, "short": 0.5}
    if text == "bad part": return {"right": 1, "short": None}
    if text == "array": return numpy.array([1.0, 2.0])
    if text == "textless": raise TextlessError
    if text == "surrogate": return {"\\ud800": 1}
    if text == "huge": return 10**400
    if text == "huger": return 10**5000
    if text == "no sum": return {"a": math.inf, "b": -math.inf}
    if text == "pid": return os.getpid() / 1e3
    return {"nan": math.nan, "inf": math.inf, "none": None, "word": "1", "true": True,
            "large": 2e6}.get(text, 0.25 * int(problem.answer))
def meet(problem, text):
    "Returns when as many calls as `text` says are running."
    (HERE / f"call-{os.getpid()}-{time.monotonic_ns()}").touch()
    while len(list(HERE.glob("call-*"))) < int(text): time.sleep(0.005)
    return 1
def wait_for_file(problem, text):
    (HERE / f"started-{text}").touch()
    while not (HERE / text).exists(): time.sleep(0.005)
    return float(len(text))
async def judge_group(prompts, completions, answer, bonus, **columns):
    assert prompts == [[{"role": "user", "content": "say something"}]] * 2
    assert completions == [[{"role": "assistant", "content": "4"}]] * 2
    assert answer == ["4", "4"] and columns["id"] == ["7", "7"]
    return [bonus, None]
def lengths(completion_ids):
    return numpy.array([len(ids) for ids in completion_ids])
async def judge(problem, text):
    if text == "block": time.sleep(60)
    if text == "hang":
        (HERE / "pid").write_text(str(os.getpid()))
        await asyncio.sleep(60)
    if text == "die": os._exit(9)
    if text == "textless": raise TextlessError
    if text.isdigit():
        (HERE / f"call-{time.monotonic_ns()}").touch()
        while len(list(HERE.glob("call-*"))) < int(text): await asyncio.sleep(0.005)
    return {"nan": math.nan, "none": None}.get(text, 1)
"""


@pytest.fixture
def task(user_modules: UserModules) -> ModuleType:
    user_modules.write("failing_task", REWARD)
    return importlib.import_module("failing_task")


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    with closing(pool_of()) as pool:
        yield pool


def pool_of(**options: Any) -> RewardPool:
    defaults = {"num_workers": 1, "concurrency": 4, "timeout_seconds": 20, "queue_limit": 4}
    return RewardPool(**{**defaults, **options})


def rewards_by(function: Any, pool: RewardPool, **options: Any) -> LocalFunctions:
    return LocalFunctions([RewardFunction(function, options)], pool)


def score(source: LocalFunctions, texts: Sequence[str]) -> Future[list[Score]]:
    return source.score(PROBLEM, texts, [()] * len(texts))


def rewards(future: Future[list[Score]]) -> list[float]:
    return [each.reward for each in future.result()]


def reward(source: LocalFunctions, text: str) -> float:
    (reward,) = rewards(score(source, [text]))
    return reward


def test_rewards_are_computed_in_another_process(task: ModuleType, pool: RewardPool) -> None:
    source = rewards_by(task.reward, pool)
    assert score(source, ["anything", "true", "parts"]).result() == [
        Score(1.0), Score(1.0), Score(1.5, {"right": 1.0, "short": 0.5}),
    ]  # fmt: skip
    assert reward(source, "pid") != os.getpid() / 1e3


FAILURES = {
    "raise": r"failing_task:reward raised ValueError: no such move \(.*\.py, line 10\)",
    "textless": r"failing_task:reward raised TextlessError: without text \(.*\.py, line 19\)",
    "surrogate": "returned a term whose name is no valid text: .* surrogates not allowed",
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


def test_failing_reward_is_named_and_the_next_call_succeeds(
    task: ModuleType, pool: RewardPool
) -> None:
    source = rewards_by(task.reward, pool)
    for text, message in FAILURES.items():
        with pytest.raises(RewardError, match=message) as caught:
            reward(source, text)
        assert "\n" not in str(caught.value)
        assert reward(source, "anything") == 1.0


def test_hanging_reward_is_killed_and_its_worker_replaced(task: ModuleType) -> None:
    with closing(pool_of(timeout_seconds=1)) as pool:
        source = rewards_by(task.reward, pool)
        with pytest.raises(RewardError, match=r"took longer than 1 s"):
            reward(source, "hang")
        assert has_ended(pid_of(task))
        assert reward(source, "anything") == 1.0


def test_worker_that_does_not_read_is_replaced_at_its_timeout(task: ModuleType) -> None:
    """The texts do not fit into the socket's buffers, so that a blocking write would hang."""
    long = "x" * 10_000_000
    earlier = set(psutil.Process().children())
    with closing(pool_of(timeout_seconds=3, grace_seconds=0.5)) as pool:
        source = rewards_by(task.judge, pool)
        assert reward(source, "x") == 1.0
        (worker,) = set(psutil.Process().children()) - earlier
        worker.suspend()
        with pytest.raises(RewardError, match=r"took longer than 3\.5 s"):
            score(source, [long] * 4).result()
        assert reward(source, long) == 1.0


def test_worker_that_dies_with_waiting_calls_fails_only_its_own(task: ModuleType) -> None:
    with closing(pool_of(num_workers=2)) as pool:
        source = rewards_by(task.reward, pool)
        texts = ["die", "anything", "die", *["anything"] * 20]
        futures = [score(source, [text]) for text in texts]
        outcomes = [future.exception() is None for future in futures]
        assert outcomes == [text == "anything" for text in texts]


def test_rewards_of_a_group_are_computed_at_the_same_time_and_in_order(task: ModuleType) -> None:
    with closing(pool_of(num_workers=3)) as pool:
        assert rewards(score(rewards_by(task.meet, pool), ["3"] * 3)) == [1.0] * 3
        source = rewards_by(task.wait_for_file, pool)
        future = score(source, ["a", "bb", "ccc"])
        assert task.__file__ is not None
        folder = Path(task.__file__).parent
        for name in ("ccc", "bb", "a"):  # the last call ends first
            until(lambda name=name: (folder / f"started-{name}").exists())
            (folder / name).touch()
        assert rewards(future) == [1.0, 2.0, 3.0]


def test_full_queue_has_no_room_until_calls_end(task: ModuleType, pool: RewardPool) -> None:
    source, other = rewards_by(task.wait_for_file, pool), rewards_by(task.judge, pool)
    future = score(source, ["x"] * 4)
    until(lambda: pool.num_waiting == 3)  # one runs
    assert source.has_room
    second = score(source, ["x"])
    assert not source.has_room and pool.num_waiting == 4
    assert other.has_room  # coroutine functions have a queue of their own
    second.cancel()
    assert source.has_room
    for _ in range(9):  # most are cancelled before they start
        score(source, ["x"]).cancel()
    assert source.has_room
    assert task.__file__ is not None
    Path(task.__file__).with_name("x").touch()
    assert rewards(future) == [1.0] * 4
    assert pool.num_waiting == 0


def test_coroutine_functions_are_awaited_at_the_same_time(
    task: ModuleType, pool: RewardPool
) -> None:
    source = rewards_by(task.judge, pool)
    futures = [score(source, ["4", "4"]) for _ in range(2)]  # return when all 4 run
    assert [rewards(future) for future in futures] == [[1.0, 1.0]] * 2
    assert rewards(score(source, ["again"] * 9)) == [1.0] * 9  # more than `concurrency`


@pytest.mark.parametrize(("text", "message"), [
    ("nan", "returned nan"), ("none", "returned None"), ("die", "exited with code 9"),
    ("hang", "took longer than 1 s"), ("textless", "raised TextlessError: without text"),
])  # fmt: skip
def test_failing_coroutine_function_is_an_error(task: ModuleType, text: str, message: str) -> None:
    with closing(pool_of(timeout_seconds=1)) as pool:
        source = rewards_by(task.judge, pool)
        with pytest.raises(RewardError, match=message):
            reward(source, text)
        assert reward(source, "anything") == 1.0


def test_coroutine_function_that_blocks_its_loop_ends_all_calls(
    task: ModuleType,
) -> None:
    with closing(pool_of(timeout_seconds=1, grace_seconds=0.1)) as pool:
        source = rewards_by(task.judge, pool)
        futures = [score(source, [text]) for text in ("hang", "block")]
        messages = [str(future.exception()) for future in futures]
        assert all("took longer than 1.1 s" in message for message in messages)
        assert reward(source, "anything") == 1.0


def test_error_of_a_cancelled_call_is_not_logged(
    task: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(pool_of(timeout_seconds=1)) as pool:
        source = rewards_by(task.reward, pool)
        future = score(source, ["hang"])
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        future.cancel()
        assert reward(source, "anything") == 1.0  # in the same worker, after the timeout
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_close_cancels_calls_and_ends_their_process(task: ModuleType) -> None:
    assert task.__file__ is not None
    pool = pool_of()
    future = score(rewards_by(task.reward, pool), ["hang", "anything"])
    file = Path(task.__file__).with_name("pid")
    until(lambda: file.exists() and file.read_text())
    pool.close()
    assert has_ended(pid_of(task))
    with pytest.raises(CancelledError):
        future.result()
    assert not [each for each in threading.enumerate() if "run_forever" in each.name]
    pool.close()


SCORING = """
import sys
sys.path.remove("")
from peralta_zmq.imports import import_object
from peralta_zmq.rollout import Problem
from peralta_zmq.environments.reward_functions import RewardFunction
from peralta_zmq.environments.reward_pool import LocalFunctions, RewardPool
pool = RewardPool(num_workers=1, concurrency=1, timeout_seconds=60, queue_limit=1)
source = LocalFunctions([RewardFunction(import_object(sys.argv[1]))], pool)
future = source.score(Problem("7", "mine", (), "4"), [sys.argv[2]], [()])
print(future.result(), flush=True)
sys.stdin.read()
pool.close()
"""


@pytest.mark.parametrize(("name", "is_stopped"), [
    ("reward", False), ("judge", False), ("reward", True),
])  # fmt: skip
def test_worker_ends_with_its_parent(
    task: ModuleType, tmp_path: Path, name: str, is_stopped: bool
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    command = [sys.executable, "-c", SCORING, f"failing_task:{name}", "hang"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as parent:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        assert not has_ended(pid_of(task))
        if is_stopped:  # as the pool does before it ends a worker
            os.kill(pid_of(task), signal.SIGSTOP)
        parent.kill()
        assert parent.communicate()[1] == b""  # both have ended
    until(lambda: has_ended(pid_of(task)))


def test_bounded_reward_runs_in_this_process(pool: RewardPool) -> None:
    problem = Problem("1", "calculator", (), "2 + 3")
    source = LocalFunctions([RewardFunction(calculator.reward, is_bounded=True)], pool)
    future = source.score(problem, ["3 + 2", "7"], [(), ()])
    assert future.done() and rewards(future) == [1.0, 0.0]
    with pytest.raises(RewardError, match="two"):
        source.score(Problem("1", "calculator", (), "two"), ["2"], [()]).result()


def test_reward_that_cannot_be_imported_is_named(task: ModuleType, pool: RewardPool) -> None:
    task.reward.__module__ = "no_such_task_at_all"
    with pytest.raises(
        TaskError, match="_at_all:reward did not start: its worker cannot import it: ModuleNotFound"
    ):
        reward(rewards_by(task.reward, pool), "anything")


def test_problem_that_cannot_be_sent_to_a_worker_is_a_failed_reward(
    task: ModuleType, pool: RewardPool
) -> None:
    info: dict[str, Any] = {}
    for _ in range(2000):
        info = {"a": info}
    future = rewards_by(task.reward, pool).score(replace(PROBLEM, info=info), ["4"], [()])
    with pytest.raises(RewardError, match="failing_task:reward cannot get its arguments: Recurs"):
        future.result()
    assert reward(rewards_by(task.reward, pool), "4") == 1.0


def test_files_of_the_start_folder_hide_no_module_of_python(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('hidden')")
    (tmp_path / "own_task.py").write_text("def reward(problem, text): return 2")
    done = subprocess.run(
        [sys.executable, "-c", SCORING, "own_task:reward", "4"], cwd=tmp_path, text=True, input="",
        env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True,
    )  # fmt: skip
    assert done.stdout == "[Score(reward=2.0, rewards={}, turn_rewards=())]\n", done.stderr


def test_functions_of_all_kinds_are_combined(task: ModuleType, pool: RewardPool) -> None:
    """Bounded, in a worker, and awaited; of one completion, and of the group."""
    functions = [
        RewardFunction(calculator.reward, is_bounded=True, label="own"),
        RewardFunction(task.wait_for_file, label="waits", weight=0.5),
        RewardFunction(task.judge_group, {"bonus": 1}, takes_group=True, label="judge", weight=2),
        RewardFunction(task.lengths, takes_group=True, label="length", weight=-1),
    ]
    assert task.__file__ is not None
    Path(task.__file__).with_name("4").touch()
    future = LocalFunctions(functions, pool).score(PROBLEM, ["4", "4"], [(5, 6), (7,)])
    assert future.result() == [
        Score(1 + 0.5 + 2 * 1 - 2, {"own": 1, "waits": 1, "judge": 1, "length": 2}),
        Score(1 + 0.5 - 1, {"own": 1, "waits": 1, "length": 1}),
    ]


def pid_of(task: ModuleType) -> int:
    assert task.__file__ is not None
    return int(Path(task.__file__).with_name("pid").read_text())
