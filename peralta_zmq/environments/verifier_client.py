"""A task that lives elsewhere: problems and rewards of a `bin/verifier`, over HTTP.

Knows HTTP and what a verifier says; knows nothing of what an answer is worth. A verifier that is
away is waited for; its failure is an error, never a reward.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast
from urllib.parse import quote

from peralta_zmq.errors import RewardError, TaskError
from peralta_zmq.rollout import MAX_REWARD, Message, Problem

PATIENCE_SECONDS = 60.0  # for a verifier that does not answer
TIMEOUT_SECONDS = 30.0  # of one request
LONGEST_PAUSE = 2.0  # seconds between two tries
MAX_PROBLEMS, MAX_VERDICT = 64 << 20, 64 << 10  # bytes of an answer

logger = logging.getLogger(__name__)


class _AwayError(Exception):
    """The verifier may answer later."""


class Remote:
    """The environment `env` of the verifier at host and port; a task like any other."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        env: str,
        token: str | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._host, self._port, self._env = host, port, env
        self._where = f"http://{host}:{port}"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._patience = patience

    def problems(self, split: str, seed: int, **options: object) -> Iterator[Problem]:
        """The problems of 'train' or 'eval'; `answer` is the verifier's id of each; seed and
        options are the verifier's business.

        Raises TaskError when the verifier does not answer in time, or answers nonsense.
        """
        path = f"/problems?env={quote(self._env)}&split={quote(split)}"
        listed = self._ask("GET", path, None, limit=MAX_PROBLEMS)
        try:
            return iter([_problem_of(each, self._env) for each in listed["problems"]])
        except (KeyError, TypeError, ValueError) as error:
            raise self._nonsense(error) from None

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """What the verifier pays. Raises RewardError when it cannot say."""
        asked = {"env": self._env, "problem": problem.answer, "completion": completion_text}
        body = json.dumps(asked).encode()
        try:
            reward = self._ask("POST", "/verify_answer", body, limit=MAX_VERDICT).get("reward")
            if isinstance(reward, dict):
                parts = cast("dict[str, Any]", reward)
                return {name: self._number(part) for name, part in parts.items()}
            return self._number(reward)
        except TaskError as error:
            raise RewardError(str(error)) from None

    def close(self) -> None:
        """Nothing is held open between two requests."""

    def _number(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._nonsense(f"a reward of {value!r:.40}")
        if not abs(value) <= MAX_REWARD:  # NaN too
            raise self._nonsense(f"a reward of {value}")
        return float(value)

    def _ask(self, method: str, path: str, body: bytes | None, *, limit: int) -> dict[str, Any]:
        """The answer to a request, tried again while nobody answers."""
        started, pause, said = time.monotonic(), 0.05, False
        while True:
            try:
                answer = self._once(method, path, body, limit)
                break
            except (OSError, http.client.HTTPException, _AwayError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
            if time.monotonic() - started > self._patience:
                raise TaskError(
                    f"env.address {self._where} has not answered for {self._patience:.0f} s "
                    f"({reason}); start it: bin/verifier @ CONFIG"
                )
            if not said:
                logger.info("waiting for the verifier %s: %s", self._where, reason)
                said = True
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        if said:
            logger.info("the verifier %s answers again", self._where)
        return answer

    def _once(self, method: str, path: str, body: bytes | None, limit: int) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_SECONDS)
        with closing(connection):
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            content = response.read(limit + 1)
        if response.status >= http.client.INTERNAL_SERVER_ERROR:
            raise _AwayError(f"it answers {response.status}")
        if response.length:  # what should have come; read() with a limit does not raise
            raise _AwayError("the connection broke off")
        if len(content) > limit:
            raise self._nonsense(f"more than {limit} bytes")
        try:
            said = json.loads(content)
            _check_map(said)
        except ValueError as error:
            raise self._nonsense(error) from None
        if response.status != http.client.OK:
            raise TaskError(
                f"env.address {self._where} refuses {path.partition('?')[0]} with "
                f"{response.status}: {str(said.get('error'))[:200]}"
            )
        return cast("dict[str, Any]", said)

    def _nonsense(self, reason: object) -> TaskError:
        return TaskError(
            f"env.address {self._where} answers what no verifier says ({str(reason)[:80]}); "
            "check the address"
        )


def _check_map(said: object) -> None:
    """Raise ValueError for JSON that is no object."""
    if not isinstance(said, dict):
        raise ValueError(f"{type(said).__name__} is not an object")


def described(problem: Problem) -> dict[str, Any]:
    """A problem as a verifier tells of it: without its answer."""
    return {
        "id": problem.id,
        "messages": [[each.role, each.content] for each in problem.messages],
        "input_token_ids": list(problem.input_token_ids),
    }


def _problem_of(told: dict[str, Any], task: str) -> Problem:
    if not all(type(each) is str for message in told["messages"] for each in message):
        raise TypeError("a message that is no text")
    messages = tuple(Message(role, content) for role, content in told["messages"])
    tokens = tuple(told["input_token_ids"])
    strange = [each for each in tokens if type(each) is not int or each < 0]
    if strange or not (messages or tokens):
        raise ValueError("a problem without a prompt")
    return Problem(str(told["id"]), task, messages, answer=str(told["id"]), input_token_ids=tokens)
