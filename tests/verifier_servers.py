"""A verifier on a free port of this machine, and its client."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from peralta_zmq.config import Config
from peralta_zmq.environments.verifier_client import RemoteEnvironment
from peralta_zmq.environments.verifier_service import Verifier
from peralta_zmq.rollout import Message, Problem

PROBLEM = Problem("1", "x", (Message("user", "?"),), "1")


def serving(config: Config, *, token: str | None = None) -> closing[Verifier]:
    return closing(Verifier(config, host="127.0.0.1", port=0, token=token))


def remote(*verifiers: Verifier, env: str = "calculator", **options: Any) -> RemoteEnvironment:
    return remote_at(*(verifier.port for verifier in verifiers), env=env, **options)


def remote_at(*ports: int, env: str = "calculator", **options: Any) -> RemoteEnvironment:
    return RemoteEnvironment([("127.0.0.1", port) for port in ports], env=env, **options)


def reward_of(environment: RemoteEnvironment, problem: Problem, text: str) -> Any:
    (score,) = environment.score(problem, [text], [()]).result()
    return score.reward
