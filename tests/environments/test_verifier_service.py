"""Verifier and client over HTTP: rewards, refused requests; the environments of a run."""

from __future__ import annotations

import http.client
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError
from user_modules import UserModules
from verifier_servers import PROBLEM, remote, reward_of, serving

from peralta_zmq.build import open_environments
from peralta_zmq.config import Config, load_config
from peralta_zmq.environments import calculator, verifier_client
from peralta_zmq.environments.dataset import labeled_problem, load_problems
from peralta_zmq.environments.verifier_client import RemoteEnvironment
from peralta_zmq.environments.verifier_service import Verifier
from peralta_zmq.errors import ConfigError, RewardError, TaskError
from peralta_zmq.rollout import Message, Problem, Score

TOKEN = "0123456789abcdef"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def config_of(folder: Path, text: str) -> Config:
    file = folder / "env.toml"
    file.write_text(text)
    return load_config("bin/x", ["@", str(file)])


def test_remote_problems_have_no_answers_but_equal_rewards(verifier: Verifier) -> None:
    environment = remote(verifier)
    far = load_problems(environment.problems, "eval", seed=0, options={})
    near = load_problems(calculator.problems, "eval", seed=0, options={})
    assert [problem.messages for problem in far] == [problem.messages for problem in near]
    assert not {problem.answer for problem in far} & {problem.answer for problem in near}
    for text in (near[0].answer, f"0 + {near[0].answer}", "7", "nonsense", ""):
        assert reward_of(environment, far[0], text) == calculator.reward(near[0], text)
    assert reward_of(environment, far[0], near[0].answer) == 1.0


TOLD = """
from peralta_zmq.rollout import Message, Problem, ToolCall
CALL = ToolCall("add", {"a": 1, "b": 2})
MESSAGES = (Message("user", "1 + 2?"), Message("assistant", "", tool_calls=(CALL,)),
            Message("tool", "3", "add"))
def problems(split, seed):
    yield Problem("1", "told", MESSAGES, "3")
def reward(problem, text):
    return 1.0
"""


def test_remote_problem_keeps_calls_and_results_of_tools(
    tmp_path: Path, user_modules: UserModules
) -> None:
    user_modules.write("told.task", TOLD)
    with serving(config_of(tmp_path, '[task]\nname = "told.task"\n')) as verifier:
        (problem,) = remote(verifier, env="told.task").problems("train", 0)
    assert problem.messages == importlib.import_module("told.task").MESSAGES


OWN = '[[env]]\nname = "own"\ntask = "own.task"\n'


@contextmanager
def own_task(
    monkeypatch: pytest.MonkeyPatch, folder: Path, reward: Callable[[Problem, str], Any]
) -> Iterator[tuple[RemoteEnvironment, Problem]]:
    """A client of a verifier with the environment own, which has one problem."""
    module: Any = ModuleType("own_task")
    module.problems = lambda split, seed: iter([PROBLEM])
    module.reward, module.REWARD_IS_BOUNDED = reward, True  # another process could not import it
    monkeypatch.setitem(sys.modules, "own", ModuleType("own"))
    monkeypatch.setitem(sys.modules, "own.task", module)
    with serving(config_of(folder, OWN)) as verifier:
        environment = remote(verifier, env="own", concurrency=2, retry_seconds=0.2)
        yield environment, next(environment.problems("train", 0))


def failing(problem: Problem, text: str) -> float:
    raise {"key": KeyError("lost"), "task": TaskError("no idea")}[text]


def test_failing_remote_reward_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with own_task(monkeypatch, tmp_path, failing) as (environment, problem):
        for text in ("key", "task"):
            with pytest.raises(TaskError, match=r"refuses /score with 422.*(lost|no idea)"):
                reward_of(environment, problem, text)


def test_remote_reward_keeps_named_terms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def terms(problem: Problem, text: str) -> Any:
        return {"right": True, "short": 0.5} if text else object()

    with own_task(monkeypatch, tmp_path, terms) as (environment, problem):
        (score,) = environment.score(problem, ["x"], [()]).result()
        assert score == Score(1.5, {"right": 1.0, "short": 0.5})
        with pytest.raises(TaskError, match="not a number"):
            reward_of(environment, problem, "")


def test_concurrent_requests_run_bounded_rewards_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcomes: list[str] = []
    both_started = threading.Barrier(2, timeout=0.3)

    def reward(problem: Problem, text: str) -> float:
        try:
            both_started.wait()  # succeeds only if two calls run at the same time
            outcomes.append("together")
        except threading.BrokenBarrierError:
            outcomes.append("alone")
            both_started.reset()
        return 1.0

    with own_task(monkeypatch, tmp_path, reward) as (environment, problem):
        futures = [environment.score(problem, ["x"], [()]) for _ in range(2)]
        assert [future.result() for future in futures] == [[Score(1.0)]] * 2
    assert outcomes == ["alone", "alone"]


def test_unknown_environment_is_refused_with_the_choices(verifier: Verifier) -> None:
    with pytest.raises(TaskError, match=r"404: no environment 'chess'; there are calculator"):
        remote(verifier, env="chess").problems("train", 0)


# Several turns.

TURNS_TASK = """
from peralta_zmq.rollout import Message, Problem
def problems(split, seed):
    yield Problem("1", "turns", (Message("system", "s"), Message("user", "1 plus 2?")), "3")
def reward(problem, text): return float(text == problem.answer)
def contents(completions):
    return [float(sum(len(message["content"]) for message in each)) for each in completions]
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
tools = [add]
def reply(problem, messages):
    text = messages[-1].content
    if text == "raise": raise ValueError("no such move")
    return None if text == problem.answer else [Message("user", f"{len(messages)} messages")]
"""
TURNS = """
[[env]]
name = "game"
task = "turns_task:"
reward = ["task", "turns_task:contents"]
"""


def test_remote_task_with_turns_has_equal_replies_tools_and_rewards(
    tmp_path: Path, user_modules: UserModules
) -> None:
    user_modules.write("turns_task", TURNS_TASK)
    near_config = config_of(tmp_path, TURNS)
    with serving(near_config) as verifier:
        address = f'address = "http://127.0.0.1:{verifier.port}"\n'
        with (
            closing(open_environments(near_config, "train")) as near,
            closing(open_environments(config_of(tmp_path, TURNS + address), "train")) as far,
        ):
            (problem,) = far.problems
            assert far.has_turns(problem)
            assert problem.chat_template_kwargs == near.problems[0].chat_template_kwargs
            assert problem.chat_template_kwargs["tools"]
            for text, expected in (
                ("4", [Message("user", "3 messages")]),
                ("3", None),
                (CALL, [Message("tool", "3", "add")]),
            ):
                messages = [*problem.messages, Message("assistant", text)]
                assert far.reply(problem, messages).result() == expected
            with pytest.raises(RewardError, match=r"/reply with 422: .*ValueError: no such move"):
                far.reply(problem, [*problem.messages, Message("assistant", "raise")]).result()
            episode = (Message("assistant", "44"), Message("tool", "1", "add"))
            arguments = ["3"], [(5,)], [(*episode, Message("assistant", "3"))]
            (score,) = far.functions["game"].score(problem, *arguments).result()
            assert score == Score(5.0, {"task": 1.0, "contents": 4.0})


# Requests of other clients.


def request(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def score_body(**changes: Any) -> bytes:
    body = {"env": "calculator", "problem": "x", "completions": ["x"], "completion_ids": [[5]],
            "completion_messages": [[]], "digest": "another"}  # fmt: skip
    return json.dumps({**body, **changes}).encode()


@pytest.mark.parametrize(("path", "body", "status"), [
    ("/score", b"", 400),
    ("/score", b"[]", 400),
    ("/score", b"[" * 10_000, 400),
    ("/score", b'{"env": "calculator"}', 400),
    ("/score", score_body(env=1), 400),
    ("/score", score_body(digest=None), 404),
    ("/score", score_body(completions="x"), 400),
    ("/score", score_body(completions=[], completion_ids=[]), 400),
    ("/score", score_body(completion_ids=[[5], [6]]), 400),
    ("/score", score_body(completion_ids=[["a"]]), 400),
    ("/score", score_body(completion_messages=[[], []]), 400),
    ("/score", score_body(completion_messages=[[["user", "x"]]]), 400),
    ("/score", score_body(), 409),
    ("/reply", score_body(), 400),
    ("/reply", score_body(messages=[]), 400),
    ("/reply", score_body(messages=[{"role": "model", "content": "x"}]), 400),
    ("/reply", score_body(messages=[{"role": "assistant", "content": 1}]), 400),
    ("/reply", score_body(messages=[{"role": "assistant", "content": "x"}]), 409),
    ("/elsewhere", b"{}", 404),
])  # fmt: skip
def test_invalid_request_is_refused(
    verifier: Verifier, path: str, body: bytes, status: int
) -> None:
    answered, message = request(verifier.port, "POST", path, body)
    assert (answered, list(message)) == (status, ["error"])


FIELDS = b'"env": "", "problem": "", "digest": "", "role": "user", "content": ""'
WRONG = b"[" + b"1," * 100_000 + b"1]"
WRONG_CALLS = b'[{%s, "tool_calls": %s}]' % (FIELDS, WRONG)


@pytest.mark.parametrize(("form", "field", "value"), [
    (verifier_client.ScoreRequest, b"completions", WRONG),
    (verifier_client.ScoreRequest, b'completions": ["x"], "completion_ids', WRONG),
    (verifier_client.ScoreRequest, b'completions": ["x"], "completion_ids', b'[["x"], %s]' % WRONG),
    (verifier_client.ScoreRequest, b'completions": ["x"], "completion_messages',
     b"[%s]" % WRONG_CALLS),
    (verifier_client.ReplyRequest, b"messages", WRONG),
    (verifier_client.ReplyRequest, b"messages", WRONG_CALLS),
    (verifier_client.ReplyResponse, b"messages", WRONG),
    (verifier_client.ScoreResponse, b"scores", WRONG),
    (verifier_client.ProblemsResponse, b'has_turns": true, "tools": [], "problems', WRONG),
    (verifier_client.ProblemsResponse, b'has_turns": true, "problems": [], "tools', WRONG),
])  # fmt: skip
def test_form_is_refused_at_its_first_error(form: Any, field: bytes, value: bytes) -> None:
    """All errors of a body of 64 MiB would take about 50 GB of memory."""
    with pytest.raises(ValidationError) as caught:
        form.model_validate_json(b'{%s, "%s": %s}' % (FIELDS, field, value), strict=True)
    assert caught.value.error_count() == 1


def test_completion_is_scored_without_digest_and_tokens(verifier: Verifier) -> None:
    problem = next(remote(verifier).problems("eval", 0))
    body = {"env": "calculator", "problem": problem.answer, "completions": ["no sum"]}
    response = request(verifier.port, "POST", "/score", json.dumps(body).encode())
    assert response == (200, {"scores": [{"reward": 0.0, "rewards": {}, "turn_rewards": []}]})


def test_health_lists_environments_and_queue(verifier: Verifier) -> None:
    status, health = request(verifier.port, "GET", "/healthz")
    assert status == 200 and health.pop("workers") >= 2
    assert health == {"environments": {"calculator": 1000}, "waiting": 0}


def test_request_without_password_is_refused() -> None:
    with serving(load_config("bin/verifier", []), token=TOKEN) as verifier:
        assert request(verifier.port, "GET", "/healthz")[0] == 401
        with pytest.raises(TaskError, match=r"401.*security\.token_file"):
            remote(verifier).problems("train", 0)
        assert len(list(remote(verifier, token=TOKEN).problems("eval", 0))) == 250


def test_public_address_without_password_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"verifier\.port: .* 0\.0\.0\.0 .*security\.token_file"):
        Verifier(load_config("bin/verifier", []), host="0.0.0.0", port=0, token=None)


# All environments of a run.

MIXED = """
[[env]]
task = "calculator"
[[env]]
name = "words"
task = "reverse_text"
"""


def test_environments_are_concatenated_with_names_and_limits(tmp_path: Path) -> None:
    limited = open_environments(config_of(tmp_path, MIXED), "eval", limit=3)
    assert dict(limited.sizes) == {"calculator": 3, "words": 3}
    environments = open_environments(config_of(tmp_path, MIXED), "train")
    assert dict(environments.sizes) == {"calculator": 1000, "words": 1000}
    assert [environments.problems[n].task for n in (0, 999, 1000, 1999)] == [
        *("calculator", "calculator"),
        *("words", "words"),
    ]
    for problem in (environments.problems[0], environments.problems[1500]):
        assert environments.reward(problem, problem.answer) == 1.0


def test_environment_with_address_uses_its_verifier(tmp_path: Path) -> None:
    with serving(config_of(tmp_path, MIXED)) as verifier:
        text = MIXED + f'address = "http://127.0.0.1:{verifier.port}"\n'
        far = open_environments(config_of(tmp_path, text), "train")
        near = open_environments(config_of(tmp_path, MIXED), "train")
        assert [problem.id for problem in far.problems] == [problem.id for problem in near.problems]
        assert far.digest == near.digest
        assert [each.row for each in far.problems] == [each.row for each in near.problems]
        assert far.reward(far.problems[1000], near.problems[1000].answer) == 1.0
        assert far.reward(far.problems[1000], "") == 0.0


@pytest.mark.parametrize(("first", "second", "num_ids"), [
    (("2", {}), ("2", {}), 1),
    (("2", {"row": 1}), ("2", {"row": 2}), 1),  # one problem, listed twice
    (("2", {}), ("3", {}), 2),
    (("", {"n": 1}), ("", {"n": 1}), 1),
    (("", {"n": 1}), ("", {"n": 2}), 2),
])  # fmt: skip
def test_problems_are_equal_if_prompt_and_answer_are(
    first: tuple[str, dict[str, int]], second: tuple[str, dict[str, int]], num_ids: int
) -> None:
    """A verifier would compute rewards with the answer of another problem."""
    problems = [replace(PROBLEM, answer=answer, info=info) for answer, info in (first, second)]
    assert len({labeled_problem(problem, "g").id for problem in problems}) == num_ids
