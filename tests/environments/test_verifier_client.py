"""The client waits for its verifier, and refuses responses that no verifier sends."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path

import pytest
from verifier_servers import PROBLEM, FixedResponse, remote, remote_at, reward_of, serving

from peralta_zmq.config import load_config
from peralta_zmq.environments import calculator
from peralta_zmq.environments.reward_pool import LocalFunctions
from peralta_zmq.environments.verifier_service import Verifier
from peralta_zmq.errors import RewardError, RewardUnavailableError, TaskError
from peralta_zmq.rollout import Message
from tools.link_proxy import free_ports


@pytest.mark.parametrize("reward", ["null", '"1"', "NaN", "1e9", '{"right": "1"}'])
def test_response_without_a_number_is_an_error(reward: str) -> None:
    content = f'{{"scores": [{{"reward": {reward}, "rewards": {{}}}}]}}'.encode()
    unexpected = pytest.raises(RewardError, match=r"unexpected response \(")
    with FixedResponse(content) as server, unexpected:
        reward_of(remote_at(server.port), PROBLEM, "1")


@pytest.mark.parametrize("reply", [
    "[]", '"x"', '[["user", "x"]]', '[{"role": "user"}]',
    '[{"role": "assistant", "content": "x"}]', '[{"role": "user", "content": "\\ud800"}]',
    '[{"role": "tool", "content": "1", "name": "\\udcff"}]', "[" * 500 + "]" * 500,
])  # fmt: skip
def test_response_without_messages_is_an_error(reply: str) -> None:
    messages = [*PROBLEM.messages, Message("assistant", "x")]
    unexpected = pytest.raises(RewardError, match=r"unexpected response \(")
    with FixedResponse(f'{{"messages": {reply}}}'.encode()) as server, unexpected:
        remote_at(server.port).reply(PROBLEM, messages).result()


# Several verifiers.


def test_verifier_that_is_down_is_replaced_by_the_other(verifier: Verifier) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        environment = remote_at(holder.getsockname()[1], verifier.port, retry_seconds=20)
        far, near = list(environment.problems("train", 0)), list(calculator.problems("train", 0))
        for index in range(20):
            assert reward_of(environment, far[index], near[index].answer) == 1.0


def test_verifier_with_other_problems_ends_the_client_also_if_it_was_down_first(
    tmp_path: Path, verifier: Verifier
) -> None:
    (tmp_path / "x.csv").write_text("python_expression,natural_language\n2,two\n")
    port = free_ports()
    environment = remote_at(port, verifier.port, avoid_seconds=0)
    problem = next(environment.problems("train", 0))
    assert reward_of(environment, problem, "no sum") == 0.0
    other = load_config(
        "bin/verifier", ["--task.name=calculator", f"--data.train={tmp_path}/x.csv"]
    )
    with (
        closing(Verifier(other, host="127.0.0.1", port=port, token=None)),
        pytest.raises(TaskError, match=f"{port} refuses /score with 409: other problems") as no,
    ):
        for _ in range(2):  # each verifier has its turn
            reward_of(environment, problem, "no sum")
    assert not isinstance(no.value, RewardError)


def test_verifier_with_another_reward_function_is_refused(verifier: Verifier) -> None:
    reward = "--task.reward=peralta_zmq.environments.countdown:reward"
    with serving(load_config("bin/verifier", [reward])) as other:
        environment = remote(verifier, other)
        problem = next(environment.problems("train", 0))
        with pytest.raises(TaskError, match="409: other problems, answers or rewards"):
            for _ in range(2):
                reward_of(environment, problem, "2")


def test_slow_verifier_is_replaced_by_the_other(
    monkeypatch: pytest.MonkeyPatch, verifier: Verifier
) -> None:
    ended = threading.Event()
    with serving(load_config("bin/verifier", [])) as slow:
        monkeypatch.setattr(
            slow, "score", lambda *_: [{"reward": float(ended.wait(20)), "rewards": {}}]
        )
        environment = remote(slow, verifier, retry_seconds=20, request_timeout=0.3)
        problem = next(environment.problems("train", 0))
        rewards = [reward_of(environment, problem, "no sum") for _ in range(2)]
        ended.set()
    assert rewards == [0.0, 0.0]


def test_busy_verifier_is_asked_again(monkeypatch: pytest.MonkeyPatch, verifier: Verifier) -> None:
    full = iter([False, False, True])
    environment = remote(verifier)
    problem = next(environment.problems("train", 0))
    monkeypatch.setattr(LocalFunctions, "has_room", property(lambda _: next(full)))
    assert reward_of(environment, problem, "no sum") == 0.0


def test_closed_client_cancels_waiting_requests() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        environment = remote_at(holder.getsockname()[1], retry_seconds=50, concurrency=1)
        futures = [environment.score(PROBLEM, ["2"], [()]) for _ in range(3)]
        assert not environment.has_room
        holder.accept()[0].close()
        environment.close()
        assert isinstance(futures[0].exception(), RewardUnavailableError)
        for future in futures[1:]:
            with pytest.raises(CancelledError):
                future.result()


def test_client_without_verifier_names_the_command() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        environment = remote_at(holder.getsockname()[1], retry_seconds=0.1)
        with pytest.raises(TaskError, match=r"env\.address http://.* bin/verifier @ CONFIG$") as no:
            reward_of(environment, PROBLEM, "2")
    assert "\n" not in str(no.value)


@pytest.mark.parametrize("content", ["", "[" * 200_000, '{"a":' * 990 + "1" + "}" * 990])
def test_client_of_another_http_server_is_refused(tmp_path: Path, content: str) -> None:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split("port ")[1].split()[0])
            (tmp_path / "problems").write_text(content)
            with pytest.raises(TaskError, match=r"unexpected response .* is this a verifier"):
                remote_at(port, retry_seconds=1).problems("train", 0)
        finally:
            server.kill()
