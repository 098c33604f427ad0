"""Client of `bin/verifier`: an environment on another machine, over HTTP.

The client retries while the verifier does not respond. A failure is an error, never a reward.
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

RETRY_SECONDS = 60.0  # until a verifier that does not respond is an error
REQUEST_TIMEOUT_SECONDS = 30.0
MAX_PAUSE_SECONDS = 2.0  # between two attempts
MAX_PROBLEMS_BYTES, MAX_REWARD_BYTES = 64 << 20, 64 << 10  # of a response

logger = logging.getLogger(__name__)


class _UnavailableError(Exception):
    """The request may succeed later."""


class RemoteEnvironment:
    """The environment `env` of the verifier at host and port, with the methods of a task."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        env: str,
        token: str | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._host, self._port, self._env = host, port, env
        self._url = f"http://{host}:{port}"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._retry_seconds = retry_seconds

    def problems(self, split: str, seed: int, **options: object) -> Iterator[Problem]:
        """The problems of 'train' or 'eval'; the verifier's config sets seed and options.

        `answer` is the id of the problem on the verifier, which keeps the answers. Raises TaskError
        for a verifier that does not respond in time, or sends an unexpected response.
        """
        path = f"/problems?env={quote(self._env)}&split={quote(split)}"
        response = self._request("GET", path, None, max_bytes=MAX_PROBLEMS_BYTES)
        try:
            return iter([_problem_from_json(row, self._env) for row in response["problems"]])
        except (KeyError, TypeError, ValueError) as error:
            raise self._unexpected(error) from None

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """The verifier's reward. Raises RewardError if there is none."""
        body = {"env": self._env, "problem": problem.answer, "completion": completion_text}
        try:
            response = self._request(
                "POST", "/verify_answer", json.dumps(body).encode(), max_bytes=MAX_REWARD_BYTES
            )
            reward = response.get("reward")
            if isinstance(reward, dict):
                parts = cast("dict[str, Any]", reward)
                return {name: self._number(part) for name, part in parts.items()}
            return self._number(reward)
        except TaskError as error:
            raise RewardError(str(error)) from None

    def close(self) -> None:
        """Nothing to close: every request has its own connection."""

    def _number(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._unexpected(f"a reward of {value!r:.40}")
        if not abs(value) <= MAX_REWARD:  # also true for NaN
            raise self._unexpected(f"a reward of {value}")
        return float(value)

    def _request(
        self, method: str, path: str, body: bytes | None, *, max_bytes: int
    ) -> dict[str, Any]:
        """The response to a request, with retries while the verifier does not respond."""
        started, pause, waiting = time.monotonic(), 0.05, False
        while True:
            try:
                response = self._request_once(method, path, body, max_bytes)
                break
            except (OSError, http.client.HTTPException, _UnavailableError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
            if time.monotonic() - started > self._retry_seconds:
                raise TaskError(
                    f"env.address {self._url} has not responded for {self._retry_seconds:.0f} s "
                    f"({reason}); start it: bin/verifier @ CONFIG"
                )
            if not waiting:
                logger.info("waiting for the verifier url=%s reason=%s", self._url, reason)
                waiting = True
            time.sleep(pause)
            pause = min(MAX_PAUSE_SECONDS, 2 * pause)
        if waiting:
            logger.info("the verifier responds again url=%s", self._url)
        return response

    def _request_once(
        self, method: str, path: str, body: bytes | None, max_bytes: int
    ) -> dict[str, Any]:
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=REQUEST_TIMEOUT_SECONDS
        )
        with closing(connection):
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            content = response.read(max_bytes + 1)
        if response.status >= http.client.INTERNAL_SERVER_ERROR:
            raise _UnavailableError(f"status {response.status}")
        if response.length:  # bytes that are missing; read() with a limit does not raise
            raise _UnavailableError("connection closed within the response")
        if len(content) > max_bytes:
            raise self._unexpected(f"more than {max_bytes} bytes")
        try:
            message = json.loads(content)
        except ValueError as error:
            raise self._unexpected(error) from None
        if not isinstance(message, dict):
            raise self._unexpected(f"{type(message).__name__} is not an object")
        message = cast("dict[str, Any]", message)
        if response.status != http.client.OK:
            raise TaskError(
                f"env.address {self._url} refuses {path.partition('?')[0]} with "
                f"{response.status}: {str(message.get('error'))[:200]}"
            )
        return message

    def _unexpected(self, reason: object) -> TaskError:
        return TaskError(
            f"env.address {self._url} returned an unexpected response ({str(reason)[:80]}); "
            "is this a verifier? Check the address"
        )


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """A problem without its answer, for a response of the verifier."""
    return {
        "id": problem.id,
        "messages": [[message.role, message.content] for message in problem.messages],
        "input_token_ids": list(problem.input_token_ids),
    }


def _problem_from_json(row: dict[str, Any], task: str) -> Problem:
    if not all(type(text) is str for message in row["messages"] for text in message):
        raise TypeError("a message is not text")
    messages = tuple(Message(role, content) for role, content in row["messages"])
    tokens = tuple(row["input_token_ids"])
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError("a token id is not a whole number")
    if not (messages or tokens):
        raise ValueError("a problem has no prompt")
    return Problem(str(row["id"]), task, messages, answer=str(row["id"]), input_token_ids=tokens)
