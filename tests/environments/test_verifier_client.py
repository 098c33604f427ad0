"""The client waits for its verifier, and refuses responses that no verifier sends."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from verifiers import PROBLEM, remote

from peralta_zmq.environments import calculator
from peralta_zmq.environments.verifier_client import RemoteEnvironment
from peralta_zmq.environments.verifier_service import Verifier
from peralta_zmq.errors import RewardError, TaskError
from tools.link_proxy import free_ports

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize("reward", ["null", '"1"', "NaN", "1e9", '{"right": "1"}'])
def test_response_without_a_number_is_an_error(
    monkeypatch: pytest.MonkeyPatch, verifier: Verifier, reward: str
) -> None:
    monkeypatch.setattr(verifier, "reward", lambda *_: {"reward": json.loads(reward)})
    environment = remote(verifier)
    with pytest.raises(RewardError, match=r"unexpected response \(a reward of .*not a number"):
        environment.reward(next(environment.problems("train", 0)), "1")


def test_client_waits_for_killed_verifier_and_gets_true_rewards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_ports()
    command = [sys.executable, str(REPO / "bin/verifier"), "--verifier.port", str(port)]
    caplog.set_level("INFO")
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    environment = RemoteEnvironment("127.0.0.1", port, env="calculator", retry_seconds=50)
    start()
    try:
        far = list(environment.problems("train", 0))
        near = list(calculator.problems("train", 0))
        assert environment.reward(far[0], near[0].answer) == 1.0
        started[0].kill()
        started[0].wait()
        restart = threading.Timer(1.0, start)
        restart.start()
        rewards = [environment.reward(far[n], near[n].answer) for n in range(1, 60)]
        restart.join()
        assert rewards == [1.0] * 59
        lines = [line for line in caplog.messages if line.startswith("waiting for the verifier")]
        assert len(lines) == 2  # for the start, and for the restart
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_client_without_verifier_names_the_command() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        environment = RemoteEnvironment(
            "127.0.0.1", holder.getsockname()[1], env="x", retry_seconds=0.1
        )
        with pytest.raises(TaskError, match=r"env\.address http://.* bin/verifier @ CONFIG$") as no:
            environment.reward(PROBLEM, "2")
    assert "\n" not in str(no.value)


def test_client_of_another_http_server_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().split("port ")[1].split()[0])
            with pytest.raises(TaskError, match=r"unexpected response .* is this a verifier"):
                RemoteEnvironment("127.0.0.1", port, env="x", retry_seconds=1).problems("train", 0)
        finally:
            server.kill()
