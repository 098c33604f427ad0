"""Client of verifiers: an environment that other machines serve.

A verifier (`bin/verifier`, see verifier_service.py) serves the problems without their answers, and
computes rewards. Several verifiers with equal problems take turns; one that does not respond is
left out for a while. The client retries while no verifier responds. A failure is an error, never
a reward.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeAlias, cast
from urllib.parse import quote

from peralta_zmq.environments.reward_functions import checked_reward
from peralta_zmq.errors import RewardError, RewardUnavailableError, TaskError, program_name
from peralta_zmq.rollout import Message, Problem, Score

RETRY_SECONDS = 60.0  # time without a response after which the client raises an error
REQUEST_TIMEOUT_SECONDS = 30.0  # of a request; for scores, `reward_timeout` is added
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 2.0  # between two attempts; doubles each time
AVOID_SECONDS = 2.0  # in which a verifier that did not respond is left out if there are others
MAX_RESPONSE_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class _UnavailableError(Exception):
    """The request failed, but a retry may succeed."""


class _NoResponseError(TaskError):
    """No verifier has responded for RETRY_SECONDS."""


class _OtherProblemsError(TaskError):
    """The verifier serves other problems than those that the client has."""


class RemoteEnvironment:
    """The environment `env` of one or more verifiers, with the functions of a task as methods.

    `addresses` are hosts and ports. `token` is the password in `verifier.token_file`; None if the
    verifiers need none. At most `concurrency` requests are sent at a time; the response to each may
    take `reward_timeout` seconds per completion longer than other responses.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        env: str,
        token: str | None = None,
        concurrency: int = 1,
        reward_timeout: float = 0.0,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._addresses, self._env = tuple(addresses), env
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._reward_timeout, self._retry_seconds = reward_timeout, retry_seconds
        self._digest = ""  # of the environment's problems and answers, as its verifier computed it
        self._failed_at: dict[tuple[str, int], float] = {}  # monotonic seconds
        self._turns = count()
        self._concurrency, self._num_unscored = concurrency, 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        # Not a ThreadPoolExecutor: at exit it would wait for requests without a response.
        self._threads: list[threading.Thread] = []
        self._unsent: SimpleQueue[_Unsent | None] = SimpleQueue()

    def problems(self, split: str, seed: int, **options: object) -> Iterator[Problem]:
        """The problems of split 'train' or 'eval'.

        `seed` and `options` are unused: the verifier's config determines the problems. The `answer`
        of a problem is its id on the verifier. Raises TaskError if no verifier responds in time, or
        one sends an unexpected response.
        """
        path = f"/problems?env={quote(self._env)}&split={quote(split)}"
        address, response = self._request(path)
        try:
            self._digest = str(response["digest"])
            return iter([_problem_from_json(row, self._env) for row in response["problems"]])
        except (KeyError, TypeError, ValueError) as error:
            raise _unexpected(address, error) from None

    @property
    def identity(self) -> str:
        """Name of the environment and addresses of its verifiers."""
        return f"{self._env} {self._addresses}"

    @property
    def has_room(self) -> bool:
        """Whether fewer groups wait for their rewards than are requested at the same time."""
        return self._num_unscored < 2 * self._concurrency

    def score(
        self,
        problem: Problem,
        texts: Sequence[str],
        token_ids: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message]] = (),  # unused: verifiers serve one turn
    ) -> Future[list[Score]]:
        """The scores of completions, computed by a verifier, or a RewardError."""
        while len(self._threads) < self._concurrency:
            self._threads.append(threading.Thread(target=self._send_requests, daemon=True))
            self._threads[-1].start()
        with self._lock:
            self._num_unscored += 1
        future: Future[list[Score]] = Future()
        future.add_done_callback(self._count_scored)
        # The `answer` of the problem is its id on the verifier: see `problems`.
        body = {"env": self._env, "problem": problem.answer, "completions": list(texts)}
        body |= {"completion_ids": list(map(list, token_ids)), "digest": self._digest}
        self._unsent.put((future, body))
        return future

    def close(self) -> None:
        """Cancel all requests that wait; those that are sent end in the background."""
        self._closed.set()
        for _ in self._threads:
            self._unsent.put(None)

    def _send_requests(self) -> None:
        """Send one request after the other, in a thread."""
        while (unsent := self._unsent.get()) is not None:
            future, body = unsent
            if self._closed.is_set():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._score(body))
            except Exception as error:  # noqa: BLE001  the caller gets it from the future
                future.set_exception(error)

    def _count_scored(self, future: Future[list[Score]]) -> None:
        with self._lock:
            self._num_unscored -= 1

    def _score(self, body: Mapping[str, Any]) -> list[Score]:
        """Request scores. Raises RewardError, or TaskError for a verifier with other problems."""
        try:
            address, response = self._request("/score", body)
        except _OtherProblemsError:
            raise  # every further reward would fail, too
        except _NoResponseError as error:
            raise RewardUnavailableError(str(error)) from None
        except TaskError as error:
            raise RewardError(str(error)) from None
        try:
            scores, count = response["scores"], len(body["completions"])
            if not isinstance(scores, list) or len(scores) != count:
                raise TypeError(f"not {count} scores")
            return list(map(_score_from_json, scores))
        except (KeyError, TypeError, ValueError) as error:
            raise RewardError(str(_unexpected(address, error))) from None

    def _request(
        self, path: str, body: Mapping[str, object] | None = None
    ) -> tuple[tuple[str, int], Any]:
        """Send a request; return the address that responded, and the JSON response.

        The request is a POST with `body` as JSON, or a GET without one. Retries while no verifier
        responds; raises TaskError after `retry_seconds`.
        """
        started, pause, waiting = time.monotonic(), MIN_PAUSE_SECONDS, False
        while True:
            address = self._choose_address()
            try:
                value = self._request_once(address, path, body)
                break
            except (OSError, http.client.HTTPException, _UnavailableError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
            self._failed_at[address] = time.monotonic()
            if time.monotonic() - started > self._retry_seconds or self._closed.is_set():
                raise _NoResponseError(
                    f"env.address {_url(address)} has not responded for "
                    f"{self._retry_seconds:.0f} s ({reason}); "
                    f"start it: {program_name('verifier')} @ CONFIG"
                )
            if not waiting:
                logger.info("waiting for the verifier url=%s reason=%s", _url(address), reason)
                waiting = True
            if not self._available():
                self._closed.wait(pause)
                pause = min(MAX_PAUSE_SECONDS, 2 * pause)
        self._failed_at.pop(address, None)
        if waiting:
            logger.info("the verifier responds again url=%s", _url(address))
        return address, value

    def _available(self) -> list[tuple[str, int]]:
        """The addresses that have not failed in the last AVOID_SECONDS."""
        start = time.monotonic() - AVOID_SECONDS
        return [each for each in self._addresses if self._failed_at.get(each, start) <= start]

    def _choose_address(self) -> tuple[str, int]:
        """The next address in turn, if possible one that has not failed just now."""
        addresses = self._available() or self._addresses
        return addresses[next(self._turns) % len(addresses)]

    def _request_once(
        self, address: tuple[str, int], path: str, body: Mapping[str, object] | None
    ) -> Any:
        """Send a request once and return the JSON response.

        Raises TaskError if a retry would not help, and other exceptions if it may.
        """
        timeout = REQUEST_TIMEOUT_SECONDS
        if body is not None:  # for one worker that computes all rewards
            timeout += self._reward_timeout * len(cast("list[str]", body["completions"]))
        with closing(http.client.HTTPConnection(*address, timeout=timeout)) as connection:
            content = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, content, self._headers)
            response = connection.getresponse()
            content = response.read(MAX_RESPONSE_BYTES + 1)
        if response.status >= http.client.INTERNAL_SERVER_ERROR:
            raise _UnavailableError(f"status {response.status}")
        if len(content) > MAX_RESPONSE_BYTES:
            raise _unexpected(address, f"more than {MAX_RESPONSE_BYTES} bytes")
        if response.length:  # missing bytes; a read with a limit raises no IncompleteRead
            raise _UnavailableError("connection closed within the response")
        try:
            value = json.loads(content)
            if response.status == http.client.OK:
                return value
            reason = str(value["error"])[:200]
        except (KeyError, TypeError, ValueError) as error:
            raise _unexpected(address, error) from None
        kind = _OtherProblemsError if response.status == http.client.CONFLICT else TaskError
        raise kind(
            f"env.address {_url(address)} refuses {path.partition('?')[0]} with "
            f"{response.status}: {reason}"
        )


_Unsent: TypeAlias = "tuple[Future[list[Score]], dict[str, Any]]"


def _url(address: tuple[str, int]) -> str:
    return f"http://{address[0]}:{address[1]}"


def _unexpected(address: tuple[str, int], reason: object) -> TaskError:
    """The error for a response that no verifier sends."""
    return TaskError(
        f"env.address {_url(address)} returned an unexpected response ({str(reason)[:80]}); "
        "is this a verifier? Check the address"
    )


def _score_from_json(row: dict[str, Any]) -> Score:
    """A score in a verifier's response. Raises KeyError, TypeError or ValueError."""
    try:
        reward, rewards = checked_reward(row["reward"]), checked_reward(row["rewards"])
    except ValueError as error:
        raise ValueError(f"a reward of {error}") from None
    if isinstance(reward, dict) or not isinstance(rewards, dict):
        raise TypeError("a reward that is not a number, or named rewards that are not an object")
    return Score(reward, rewards)


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
