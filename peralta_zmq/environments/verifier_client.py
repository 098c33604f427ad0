"""Client of a verifier: an environment that another machine serves.

A verifier (`bin/verifier`, see verifier_service.py) serves the problems without their answers, and
computes rewards. The client sends HTTP requests and retries while the verifier does not respond. A
failure is an error, never a reward.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote

from peralta_zmq.environments.reward_runner import checked_reward
from peralta_zmq.errors import RewardError, TaskError, program_name
from peralta_zmq.rollout import Message, Problem

RETRY_SECONDS = 60.0  # time without a response after which the client raises an error
REQUEST_TIMEOUT_SECONDS = 30.0
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 2.0  # between two attempts; doubles each time
MAX_RESPONSE_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class _UnavailableError(Exception):
    """The request failed, but a retry may succeed."""


class RemoteEnvironment:
    """The environment `env` of a verifier, with the functions of a task as methods.

    `token` is the password in `verifier.token_file`; None if the verifier needs none.
    """

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
        """The problems of split 'train' or 'eval'.

        `seed` and `options` are unused: the verifier's config determines the problems. The `answer`
        of a problem is its id on the verifier. Raises TaskError if the verifier does not respond in
        time, or sends an unexpected response.
        """
        path = f"/problems?env={quote(self._env)}&split={quote(split)}"
        rows = self._request(path, field="problems")
        try:
            return iter([_problem_from_json(row, self._env) for row in rows])
        except (KeyError, TypeError, ValueError) as error:
            raise self._unexpected(error) from None

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """The reward of a completion, computed by the verifier. Raises RewardError."""
        # The `answer` of the problem is its id on the verifier: see `problems`.
        body = {"env": self._env, "problem": problem.answer, "completion": completion_text}
        try:
            return checked_reward(self._request("/verify_answer", body, field="reward"))
        except TaskError as error:
            raise RewardError(str(error)) from None
        except ValueError as error:
            raise RewardError(str(self._unexpected(f"a reward of {error}"))) from None

    def close(self) -> None:
        """Nothing to close: every request has its own connection."""

    def _request(self, path: str, body: Mapping[str, str] | None = None, *, field: str) -> Any:
        """Send a request and return one field of the JSON response.

        The request is a POST with `body` as JSON, or a GET without one. Retries while the verifier
        does not respond; raises TaskError after `retry_seconds`.
        """
        started, pause, waiting = time.monotonic(), MIN_PAUSE_SECONDS, False
        while True:
            try:
                value = self._request_once(path, body, field)
                break
            except (OSError, http.client.HTTPException, _UnavailableError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
            if time.monotonic() - started > self._retry_seconds:
                raise TaskError(
                    f"env.address {self._url} has not responded for {self._retry_seconds:.0f} s "
                    f"({reason}); start it: {program_name('verifier')} @ CONFIG"
                )
            if not waiting:
                logger.info("waiting for the verifier url=%s reason=%s", self._url, reason)
                waiting = True
            time.sleep(pause)
            pause = min(MAX_PAUSE_SECONDS, 2 * pause)
        if waiting:
            logger.info("the verifier responds again url=%s", self._url)
        return value

    def _request_once(self, path: str, body: Mapping[str, str] | None, field: str) -> Any:
        """Send a request once and return one field of the JSON response.

        Raises TaskError if a retry would not help, and other exceptions if it may.
        """
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=REQUEST_TIMEOUT_SECONDS
        )
        with closing(connection):
            content = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, content, self._headers)
            response = connection.getresponse()
            content = response.read(MAX_RESPONSE_BYTES + 1)
        if response.status >= http.client.INTERNAL_SERVER_ERROR:
            raise _UnavailableError(f"status {response.status}")
        if len(content) > MAX_RESPONSE_BYTES:
            raise self._unexpected(f"more than {MAX_RESPONSE_BYTES} bytes")
        if response.length:  # missing bytes; a read with a limit raises no IncompleteRead
            raise _UnavailableError("connection closed within the response")
        is_ok = response.status == http.client.OK
        try:
            value = json.loads(content)[field if is_ok else "error"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._unexpected(error) from None
        if not is_ok:
            raise TaskError(
                f"env.address {self._url} refuses {path.partition('?')[0]} with "
                f"{response.status}: {str(value)[:200]}"
            )
        return value

    def _unexpected(self, reason: object) -> TaskError:
        """The error for a response that no verifier sends."""
        return TaskError(
            f"env.address {self._url} returned an unexpected response ({str(reason)[:80]}); "
            "is this a verifier? Check the address"
        )


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """A problem without its answer, for a verifier's response."""
    return {
        "id": problem.id,
        "messages": [[message.role, message.content] for message in problem.messages],
        "input_token_ids": list(problem.input_token_ids),
    }


def _problem_from_json(row: dict[str, Any], task: str) -> Problem:
    """The problem in a verifier's response. Raises KeyError, TypeError or ValueError."""
    if not all(type(text) is str for message in row["messages"] for text in message):
        raise TypeError("a message is not text")
    messages = tuple(Message(role, content) for role, content in row["messages"])
    tokens = tuple(row["input_token_ids"])
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError("a token id is not a whole number")
    if not (messages or tokens):
        raise ValueError("a problem has no prompt")
    return Problem(str(row["id"]), task, messages, answer=str(row["id"]), input_token_ids=tokens)
