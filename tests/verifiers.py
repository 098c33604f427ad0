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


def remote(verifier: Verifier, *, env: str = "calculator", **options: Any) -> RemoteEnvironment:
    return RemoteEnvironment("127.0.0.1", verifier.port, env=env, **options)
