"""An environment that lives elsewhere: it may go away, and its failures are never rewards.

.venv/bin/python -m pytest tests/test_verifier.py
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from peralta_zmq.build import open_environments
from peralta_zmq.config import Config, load_config
from peralta_zmq.environments import calculator
from peralta_zmq.environments.dataset import check_tokens, load_problems
from peralta_zmq.environments.verifier_client import Remote
from peralta_zmq.environments.verifier_service import MAX_REQUEST, Verifier
from peralta_zmq.errors import ConfigError, PeraltaError, TaskError
from peralta_zmq.rollout import Message, Problem
from tools.link_proxy import free_ports

REPO = Path(__file__).parents[2]
TOKEN = "0123456789abcdef"


def config_of(folder: Path, text: str, *arguments: str) -> Config:
    file = folder / "env.toml"
    file.write_text(text)
    return load_config("bin/x", ["@", str(file), *arguments])


@contextmanager
def serving(config: Config, *, port: int = 0, token: str | None = None) -> Iterator[Verifier]:
    """A verifier whose main thread is one of ours."""
    with closing(Verifier(config, host="127.0.0.1", port=port, token=token)) as opened:
        judge = threading.Thread(target=opened.judge_until_stopped)
        judge.start()
        yield opened
        opened.stop()
        judge.join()


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    """It judges for all tests that only ask."""
    with serving(load_config("bin/verifier", [])) as opened:
        yield opened


def remote(opened: Verifier, *, env: str = "calculator", **options: Any) -> Remote:
    return Remote("127.0.0.1", opened.port, env=env, **options)


def test_problems_come_without_their_answers(verifier: Verifier) -> None:
    told = load_problems(remote(verifier), "eval", seed=0, options={})
    here = load_problems(calculator, "eval", seed=0, options={})
    assert [each.messages for each in told] == [each.messages for each in here]
    assert not {each.answer for each in told} & {each.answer for each in here}


def test_an_answer_is_worth_the_same_here_and_there(verifier: Verifier) -> None:
    there = remote(verifier)
    told = next(there.problems("train", 0))
    here = next(calculator.problems("train", 0))
    for said in (here.answer, f"0 + {here.answer}", "7", "nonsense", ""):
        assert there.reward(told, said) == calculator.reward(here, said)
    assert there.reward(told, here.answer) == 1.0


def test_rows_of_tokens_pass_through(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"input_token_ids": [5, 0], "python_expression": "2"}\n')
    with serving(config_of(tmp_path, f'[data]\ntrain = "{tmp_path}/x.jsonl"\n')) as opened:
        (problem,) = remote(opened).problems("train", 0)
        assert (problem.input_token_ids, problem.messages) == ((5, 0), ())
        assert remote(opened).reward(problem, "1 + 1") == 1.0


def own_task(monkeypatch: pytest.MonkeyPatch, reward: Callable[[Problem, str], Any]) -> None:
    """A task of one problem under the name own.task."""
    module: Any = ModuleType("own_task")
    module.problems = lambda split, seed: iter([Problem("1", "x", (Message("user", "?"),), "!")])
    module.reward, module.REWARD_IS_BOUNDED = reward, True  # no name to find it by elsewhere
    monkeypatch.setitem(sys.modules, "own", ModuleType("own"))
    monkeypatch.setitem(sys.modules, "own.task", module)


def failing(problem: Problem, text: str) -> float:
    raise {"key": KeyError("lost"), "task": TaskError("no idea")}[text]


@pytest.mark.parametrize("text", ["key", "task"])
def test_a_reward_that_fails_is_an_error_and_no_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    own_task(monkeypatch, failing)
    with serving(config_of(tmp_path, '[[env]]\nname = "own"\ntask = "own.task"\n')) as opened:
        there = remote(opened, env="own", patience=0.2)
        problem = next(there.problems("train", 0))
        with pytest.raises(TaskError, match=r"refuses /verify_answer with 422.*(lost|no idea)"):
            there.reward(problem, text)


def test_named_parts_of_a_reward_pass_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own_task(monkeypatch, lambda problem, text: {"right": True, "short": 0.5} if text else object())
    with serving(config_of(tmp_path, '[[env]]\nname = "own"\ntask = "own.task"\n')) as opened:
        there = remote(opened, env="own")
        problem = next(there.problems("train", 0))
        assert there.reward(problem, "x") == {"right": 1.0, "short": 0.5}
        with pytest.raises(TaskError, match="no number"):
            there.reward(problem, "")


def test_a_verifier_that_comes_back_is_waited_for_and_no_answer_is_paid_wrongly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kill and restart the program in the middle of a loop that asks all the time."""
    port = free_ports()
    command = [sys.executable, str(REPO / "bin/verifier"), "--verifier.port", str(port)]
    caplog.set_level("INFO")

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    there = Remote("127.0.0.1", port, env="calculator", patience=50)
    first = start()
    try:
        told = list(there.problems("train", 0))
        here = list(calculator.problems("train", 0))
        assert there.reward(told[0], here[0].answer) == 1.0
        first.kill()
        first.wait()
        second = threading.Timer(1.0, lambda: started.append(start()))
        started: list[subprocess.Popen[bytes]] = []
        second.start()
        rewards = [there.reward(told[n], here[n].answer) for n in range(1, 60)]
        second.join()
        assert rewards == [1.0] * 59
        waited = [each for each in caplog.messages if each.startswith("waiting for the verifier")]
        assert len(waited) == 2  # for its start, and for its return
    finally:
        for each in [first, *started]:
            each.kill()
            each.wait()


def test_a_verifier_that_stays_away_is_one_line_with_the_remedy() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        nobody = Remote("127.0.0.1", holder.getsockname()[1], env="x", patience=0.1)
        with pytest.raises(TaskError, match=r"env\.address http://.* bin/verifier @ CONFIG$") as no:
            nobody.reward(Problem("1", "x", (), "1"), "2")
    assert "\n" not in str(no.value)


def test_what_answers_but_is_no_verifier_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path, text=True
    ) as stranger:
        try:
            assert stranger.stdout is not None
            port = int(stranger.stdout.readline().split("port ")[1].split()[0])
            with pytest.raises(TaskError, match="answers what no verifier says"):
                Remote("127.0.0.1", port, env="x", patience=1).problems("train", 0)
        finally:
            stranger.kill()


def test_an_unknown_environment_is_answered_with_the_menu(verifier: Verifier) -> None:
    with pytest.raises(TaskError, match=r"404: no environment 'chess'; there are calculator"):
        remote(verifier, env="chess").problems("train", 0)


# Strangers.


def asked(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/verify_answer", b"", 400),
        ("/verify_answer", b"[]", 400),
        ("/verify_answer", b"[" * 10_000, 400),
        ("/verify_answer", b'{"env": "calculator"}', 400),
        ("/verify_answer", b'{"env": 1, "problem": "x", "completion": "x"}', 400),
        ("/verify_answer", b'{"env": "calculator", "problem": "x", "completion": "x"}', 404),
        ("/elsewhere", b"{}", 404),
    ],
)
def test_a_strange_question_is_refused(
    verifier: Verifier, path: str, body: bytes, status: int
) -> None:
    found, said = asked(verifier.port, "POST", path, body)
    assert (found, list(said)) == (status, ["error"])


def test_a_question_that_is_too_large_is_refused_unread(verifier: Verifier) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", verifier.port, timeout=10)) as connection:
        connection.putrequest("POST", "/verify_answer")
        connection.putheader("Content-Length", str(MAX_REQUEST + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413


def test_health_says_what_is_served(verifier: Verifier) -> None:
    assert asked(verifier.port, "GET", "/health") == (200, {"environments": {"calculator": 1000}})


def test_a_password_keeps_strangers_out() -> None:
    with serving(load_config("bin/verifier", []), token=TOKEN) as opened:
        assert asked(opened.port, "GET", "/health")[0] == 401
        with pytest.raises(TaskError, match=r"401.*verifier\.token_file"):
            remote(opened).problems("train", 0)
        assert len(list(remote(opened, token=TOKEN).problems("eval", 0))) == 250


def test_listening_beyond_this_machine_needs_a_password() -> None:
    with pytest.raises(ConfigError, match=r"verifier\.host 0\.0\.0\.0 .*verifier\.token_file"):
        Verifier(load_config("bin/verifier", []), host="0.0.0.0", port=0, token=None)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(ConfigError, match=r"verifier\.port \d+ cannot be used"):
            Verifier(
                load_config("bin/verifier", []),
                host="127.0.0.1", port=holder.getsockname()[1], token=None,
            )  # fmt: skip


# All environments as one set.

MIXED = """
[[env]]
task = "calculator"
[[env]]
name = "words"
task = "reverse_text"
"""


def test_environments_stand_one_after_the_other_under_their_names(tmp_path: Path) -> None:
    opened = open_environments(config_of(tmp_path, MIXED), "train")
    assert dict(opened.sizes) == {"calculator": 1000, "words": 1000}
    assert [opened.problems[n].task for n in (0, 999, 1000, 1999)] == [
        "calculator", "calculator", "words", "words",
    ]  # fmt: skip
    for problem in (opened.problems[0], opened.problems[1500]):
        assert opened.reward(problem, problem.answer) == 1.0


def test_one_with_an_address_is_judged_there(tmp_path: Path) -> None:
    with serving(config_of(tmp_path, MIXED)) as there:
        text = MIXED + f'address = "http://127.0.0.1:{there.port}"\n'
        far = open_environments(config_of(tmp_path, text), "train")
        near = open_environments(config_of(tmp_path, MIXED), "train")
        assert [each.id for each in far.problems] == [each.id for each in near.problems]
        assert far.digest == near.digest
        assert far.reward(far.problems[1000], near.problems[1000].answer) == 1.0
        assert far.reward(far.problems[1000], "") == 0.0


def test_held_out_examples_are_limited_in_each_environment(tmp_path: Path) -> None:
    opened = open_environments(config_of(tmp_path, MIXED), "eval", limit=3)
    assert dict(opened.sizes) == {"calculator": 3, "words": 3}


@pytest.mark.parametrize(
    ("keys", "equal"), [("task,prompt", True), ("prompt", True), ("prompt,answer", False)]
)
def test_hash_keys_say_which_problems_are_the_same(tmp_path: Path, keys: str, equal: bool) -> None:
    file = tmp_path / "x.csv"
    file.write_text("python_expression,natural_language\n2,two\n3,two\n")
    config = config_of(tmp_path, f'[data]\ntrain = "{file}"\n[curriculum]\nhash_keys = "{keys}"\n')
    first, second = open_environments(config, "train").problems
    assert (first.id == second.id) is equal


def test_the_identity_of_a_calculator_problem_is_the_task_s_own() -> None:
    opened = open_environments(load_config("bin/x", []), "train")
    assert [each.id for each in opened.problems] == [
        each.id for each in calculator.problems("train", 0)
    ]


def test_tokens_that_the_model_lacks_are_refused() -> None:
    problem = replace(Problem("1", "x", (), "1"), input_token_ids=(5, 63))
    check_tokens([problem], 64)
    with pytest.raises(
        TaskError, match="has the token 63 in input_token_ids, but the model has 63"
    ):
        check_tokens([problem], 63)


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeraltaError, match="unknown task 'chess'"):
        open_environments(config_of(tmp_path, '[[env]]\ntask = "chess"\n'), "train")
