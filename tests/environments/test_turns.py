"""Replies of tasks and results of tools, in reward workers that are replaced when they fail."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from real_programs import until
from user_modules import UserModules

from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.reward_functions import RewardFunction, outcome
from peralta_zmq.environments.reward_pool import LocalFunctions, RewardPool
from peralta_zmq.environments.turns import Turns, turns_of
from peralta_zmq.errors import RewardError, TaskError
from peralta_zmq.rollout import Message, Problem

PROBLEM = Problem("7", "mine", (Message("user", "a number?"),), "4")
TASK = """
import os, time
from peralta_zmq.rollout import Message
def reply(problem, messages):
    text = messages[-1].content
    if text == problem.answer: return None
    if text == "raise": raise ValueError("no such\\nmove")
    if text == "die": os._exit(9)
    if text == "hang": time.sleep(60)
    if text == "pid": return [Message("user", str(os.getpid()))]
    results = {"text": "higher", "empty": [], "dicts": [{"role": "user", "content": "higher"}],
               "surrogate": [Message("user", "\\ud800")], "name": [Message("tool", "1", "\\udcff")],
               "number": [Message("user", 5)], "assistant": [Message("assistant", "4")]}
    return results.get(text, [Message("user", f"{len(messages)} messages")])
async def answer(problem, messages):
    return [Message("user", "awaited")]
async def own_async(problem, messages, *, tool_seconds):
    return own_tools(problem, messages, tool_seconds)
def own_tools(problem, messages, tool_seconds):
    return [Message("tool", f"{tool_seconds} s", "own")]
class Text(str):
    def __reduce__(self): raise TypeError("cannot be pickled")
def own_text(problem, messages):
    return [Message("user", Text("x"))]
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
def hang() -> None:
    "Wait."
    open("started", "w").close()
    time.sleep(60)
def orphan() -> int:
    "Start a process whose parent ends."
    reader, writer = os.pipe()
    if os.fork() == 0:
        if (process := os.fork()) == 0:
            time.sleep(60)
        os.write(writer, str(process).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reader, 20))
tools = [add, hang]
twice = [add, add]
"""


@pytest.fixture
def task(user_modules: UserModules) -> ModuleType:
    user_modules.write("replying_task", TASK)
    return importlib.import_module("replying_task")


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    pool = RewardPool(num_workers=1, concurrency=1, timeout_seconds=1, queue_limit=4)
    with closing(pool):
        yield pool


def turns_with(task: ModuleType, *names: str) -> Turns:
    turns = turns_of(SimpleNamespace(**{name: getattr(task, name) for name in names}))
    assert turns is not None
    return turns


def reply(pool: RewardPool, turns: Turns, text: str) -> list[Message] | None:
    messages = [*PROBLEM.messages, Message("assistant", text)]
    return LocalFunctions([], pool, turns).reply(PROBLEM, messages).result()


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_reply_continues_or_ends_the_episode(task: ModuleType, pool: RewardPool) -> None:
    turns = turns_with(task, "reply")
    assert reply(pool, turns, "5") == [Message("user", "2 messages")]
    assert reply(pool, turns, "4") is None
    (message,) = reply(pool, turns, "pid") or [PROBLEM.messages[0]]
    assert message.content != str(os.getpid())
    assert reply(pool, turns, call_of("add", a=1, b=2)) == [Message("user", "2 messages")]
    awaited = SimpleNamespace(reply=task.answer)
    assert reply(pool, turns_of(awaited) or turns, "5") == [Message("user", "awaited")]
    own = turns_of(SimpleNamespace(reply=task.own_text))
    assert reply(pool, own or turns, "5") == [Message("user", "x")]


FAILURES = {
    "raise": r"replying_task:reply raised ValueError: no such move \(.*, line 7\)",
    "die": "exited with code 9, for a completion of problem 7; fix the function",
    "hang": r"took longer than 1 s, .* \(its timeout is task\.reward_timeout\)",
    "text": "returned 'higher', which is neither a list of messages nor None",
    "empty": r"returned \[\], which is neither a list of messages nor None",
    "dicts": "returned a list with {'role': 'user', 'content': 'higher'}, which is not a Message",
    "number": r"returned a list with Message\(.*, which is not a Message with text",
    "assistant": "returned a message with the role 'assistant'; choose one of system, user, tool",
    "surrogate": "returned a message that is no valid text: .* surrogates not allowed, for a compl",
    "name": "returned a message that is no valid text: .* surrogates not allowed, for a completion",
}


def test_failing_reply_is_named_and_the_next_call_succeeds(
    task: ModuleType, pool: RewardPool
) -> None:
    turns = turns_with(task, "reply")
    for text, message in FAILURES.items():
        with pytest.raises(RewardError, match=message):
            reply(pool, turns, text)
        assert reply(pool, turns, "5") == [Message("user", "2 messages")]
    assert pool.num_waiting == 0


def test_waiting_replies_leave_no_room_for_a_bounded_reward(
    task: ModuleType, pool: RewardPool
) -> None:
    reward = RewardFunction(lambda problem, text: 1.0, {}, True)
    functions = LocalFunctions([reward], pool, turns_with(task, "reply"))
    environments = Environments({"mine": 1}, (PROBLEM,), {"mine": functions}, pool)
    messages = [*PROBLEM.messages, Message("assistant", "hang")]
    assert environments.has_room
    for _ in range(5):  # one in the worker and four in the queue
        environments.reply(PROBLEM, messages)
    assert not environments.has_room


def test_tools_are_called_before_reply(task: ModuleType, pool: RewardPool) -> None:
    turns = turns_with(task, "reply", "tools")
    assert [schema["function"]["name"] for schema in turns.schemas] == ["add", "hang"]
    assert reply(pool, turns, call_of("add", a=1, b=2)) == [Message("tool", "3", "add")]
    assert reply(pool, turns, "3") == [Message("user", "2 messages")]
    (message,) = reply(pool, turns, "<tool_call>add(1, 2)</tool_call>") or [PROBLEM.messages[0]]
    assert message.role == "tool" and "the tool call is not valid JSON" in message.content
    deep = call_of("add", a=1, b=2).replace("2", "[" * 500 + "]" * 500)  # pickle would fail
    (message,) = reply(pool, turns, deep) or [PROBLEM.messages[0]]
    assert "more than 100 levels of arrays and objects" in message.content
    assert reply(pool, turns_with(task, "tools"), "3") is None


def test_task_with_schemas_instead_of_tools_executes_the_calls_itself(
    task: ModuleType, pool: RewardPool
) -> None:
    schema = {"type": "function", "function": {"name": "own"}}
    for function in (task.own_tools, task.own_async):
        turns = turns_of(SimpleNamespace(reply=function, tool_schemas=[schema]))
        assert turns is not None and turns.schemas == (schema,)
        assert reply(pool, turns, call_of("own")) == [Message("tool", "1 s", "own")]


@pytest.mark.parametrize(("names", "schemas", "message"), [
    ((), ["own"], r"executes the calls itself; define reply\(problem, messages, \*, tool_seconds"),
    (("reply",), ["own"], r"executes the calls itself; define reply"),
    (("reply", "tools"), ["own"], "has tools and tool_schemas; remove one of them"),
    (("own_tools",), ["own", "own"], "two tools of the task have the name own; rename one"),
    (("twice",), [], "two tools of the task have the name add; rename one"),
])  # fmt: skip
def test_contradictory_tools_are_refused(
    task: ModuleType, names: tuple[str, ...], schemas: list[str], message: str
) -> None:
    fields = {{"own_tools": "reply", "twice": "tools"}.get(each, each): getattr(task, each)
              for each in names}  # fmt: skip
    own = [{"type": "function", "function": {"name": name}} for name in schemas]
    with pytest.raises(TaskError, match=message):
        turns_of(SimpleNamespace(**fields, tool_schemas=own))


def test_tool_that_hangs_ends_without_its_worker(task: ModuleType, pool: RewardPool) -> None:
    turns = turns_with(task, "reply", "tools")
    before = reply(pool, turns, "pid")
    assert reply(pool, turns, call_of("hang")) == [
        Message("tool", "error: the tools took longer than 1 s", "hang")
    ]
    assert reply(pool, turns, "pid") == before


@pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="the limit of processes applies"
)
def test_orphans_of_a_tool_end_with_the_call(task: ModuleType, pool: RewardPool) -> None:
    turns = turns_of(SimpleNamespace(tools=[task.orphan], reply=task.reply))
    assert turns is not None
    before = reply(pool, turns, "pid")
    (message,) = reply(pool, turns, call_of("orphan")) or [PROBLEM.messages[0]]
    assert not psutil.pid_exists(int(message.content))
    assert reply(pool, turns, "pid") == before


HANGING_TOOL = """
import sys, types, replying_task as task
from peralta_zmq.environments.reward_pool import LocalFunctions, RewardPool
from peralta_zmq.environments.turns import turns_of
from peralta_zmq.rollout import Message, Problem
pool = RewardPool(num_workers=1, concurrency=1, timeout_seconds=60, queue_limit=4)
turns = turns_of(types.SimpleNamespace(tools=[task.hang]))
message = Message("assistant", '<tool_call>{"name": "hang"}</tool_call>')
LocalFunctions([], pool, turns).reply(Problem("7", "mine", (), ""), [message])
sys.stdin.read()
pool.close()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_stopped_tool_leaves_no_folder(task: ModuleType, tmp_path: Path, is_killed: bool) -> None:
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-c", HANGING_TOOL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        until(lambda: list(tmp_path.glob("peralta-tool-*/started")))
        if is_killed:
            process.kill()
    until(lambda: not list(tmp_path.glob("peralta-tool-*")))


def test_tools_without_a_folder_are_a_failed_reward(
    task: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = turns_with(task, "tools")
    messages = [*PROBLEM.messages, Message("assistant", call_of("add", a=1, b=2))]
    call = turns.call(PROBLEM, messages, tool_seconds=5)
    assert call is not None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    failure = outcome(call, task.add, task.hang)
    with pytest.raises(RewardError, match=r"problem 7 cannot be executed: .* No such file .*/miss"):
        call.result_of(failure)


def test_functions_that_workers_cannot_import_are_refused() -> None:
    def local(problem: Problem, messages: list[Message]) -> None: ...

    with pytest.raises(TaskError, match=r"make `reply` and each of `tools` a function of a module"):
        turns_of(SimpleNamespace(reply=local))
    assert turns_of(SimpleNamespace()) is None
