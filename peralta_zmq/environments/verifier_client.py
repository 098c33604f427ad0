"""Client of verifiers: an environment that other machines serve (bin/verifier).

Several verifiers with equal problems take turns; one that does not respond is left out for a while.
The client retries while none responds. A failure is an error, never a reward.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import quote

from peralta_zmq.addresses import with_port
from peralta_zmq.atomic_files import MALFORMED, parse_json
from peralta_zmq.environments.reward_functions import checked_reward, num_completions
from peralta_zmq.environments.turns import REPLY_ROLES, Reply
from peralta_zmq.errors import RewardError, RewardUnavailableError, TaskError, program_name
from peralta_zmq.rollout import Message, Problem, Score, ToolCall

MIN_PAUSE_SECONDS = 0.05  # pause between two attempts, which doubles each time
MAX_PAUSE_SECONDS = 2.0
MAX_RESPONSE_BYTES = 64 << 20

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class _UnavailableError(Exception):
    """The request failed, but a retry may succeed."""


class _NoResponseError(TaskError):
    """No verifier has responded for `retry_seconds`."""


class _OtherProblemsError(TaskError):
    """The verifier serves other problems than those that the client has."""


class RemoteEnvironment:
    """The environment `env` of one or more verifiers, with the functions of a task as methods.

    `token` is the password in `security.token_file`. At most `concurrency` requests are sent at a
    time; each may take `request_timeout`, and `reward_timeout` more per completion. After
    `retry_seconds` without a response, an error is raised. A verifier that did not respond is left
    out for `avoid_seconds` if there are others.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        env: str,
        token: str | None = None,
        concurrency: int = 16,
        reward_timeout: float = 0.0,
        retry_seconds: float = 60.0,
        request_timeout: float = 30.0,
        avoid_seconds: float = 2.0,
    ) -> None:
        self._addresses = tuple(addresses)
        self._env = env
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._reward_timeout = reward_timeout
        self._retry_seconds = retry_seconds
        self._request_timeout = request_timeout
        self._avoid_seconds = avoid_seconds
        self._digest = ""  # of the environment's problems and answers, as its verifier computed it
        self.has_turns = False  # whether the task has several turns; set by `problems`
        self.schemas: Sequence[Mapping[str, Any]] = ()  # of its tools; set by `problems`
        self._failed_at: dict[tuple[str, int], float] = {}  # monotonic seconds
        self._turns = count()
        self._concurrency = concurrency
        self._num_unfinished = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # Not a ThreadPoolExecutor: at exit it would wait for requests without a response.
        self._threads: list[threading.Thread] = []
        self._unsent: SimpleQueue[_Unsent | None] = SimpleQueue()

    def problems(self, split: str, seed: int, **options: object) -> Iterator[Problem]:
        """The problems of split 'train' or 'eval', with their ids on the verifier as answers.

        The verifier's config determines the problems: `seed` and `options` are unused. Raises
        TaskError if no verifier responds in time, or one sends an unexpected response.
        """
        path = f"/problems?env={quote(self._env)}&split={quote(split)}"
        return iter(self._request(path, None, self._problems_from_json))

    def _problems_from_json(self, response: Any, body: None) -> list[Problem]:
        self._digest = str(response["digest"])
        self.has_turns = bool(response["has_turns"])
        self.schemas = list(response["tools"])
        if not all(isinstance(schema, dict) for schema in self.schemas):
            raise TypeError("a tool without a schema")
        return [_problem_from_json(row, self._env) for row in response["problems"]]

    @property
    def identity(self) -> str:
        return f"{self._env} {self._addresses}"

    @property
    def has_room(self) -> bool:
        """Whether fewer groups and replies wait than are requested at the same time."""
        return self._num_unfinished < 2 * self._concurrency

    def score(
        self,
        problem: Problem,
        texts: Sequence[str],
        token_ids: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message]] = (),
    ) -> Future[list[Score]]:
        body = {
            "completions": list(texts),
            "completion_ids": list(map(list, token_ids)),
            "completion_messages": [
                messages_to_json(each) for each in messages or [()] * len(texts)
            ],
        }
        return self._send("/score", problem, body, _scores_from_json)

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[Reply]:
        # The verifier has the messages of the problem.
        body = {"messages": messages_to_json(messages[len(problem.messages) :])}
        return self._send("/reply", problem, body, _reply_from_json)

    def _send(
        self,
        path: str,
        problem: Problem,
        body: Mapping[str, Any],
        parse: Callable[[Any, Mapping[str, Any]], Result],
    ) -> Future[Result]:
        while len(self._threads) < self._concurrency:
            self._threads.append(threading.Thread(target=self._send_requests, daemon=True))
            self._threads[-1].start()
        with self._lock:
            self._num_unfinished += 1

        def count_finished(_: Future[Result]) -> None:
            with self._lock:
                self._num_unfinished -= 1

        future: Future[Result] = Future()
        future.add_done_callback(count_finished)
        # The `answer` of the problem is its id on the verifier: see `problems`.
        body = {"env": self._env, "problem": problem.answer, "digest": self._digest, **body}
        self._unsent.put((future, path, body, parse))
        return future

    def close(self) -> None:
        """Cancel all requests that wait; those that are sent end in the background."""
        self._closed.set()
        for _ in self._threads:
            self._unsent.put(None)

    def _send_requests(self) -> None:
        while (unsent := self._unsent.get()) is not None:
            future, path, body, parse = unsent
            if self._closed.is_set():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._result(path, body, parse))
            except Exception as error:  # noqa: BLE001  the caller gets it from the future
                future.set_exception(error)

    def _result(
        self,
        path: str,
        body: Mapping[str, Any],
        parse: Callable[[Any, Mapping[str, Any]], Result],
    ) -> Result:
        try:
            return self._request(path, body, parse)
        except _OtherProblemsError:
            raise  # every further reward would fail, too
        except _NoResponseError as error:
            raise RewardUnavailableError(str(error)) from None
        except TaskError as error:
            raise RewardError(str(error)) from None

    def _request(self, path: str, body: Any, parse: Callable[[Any, Any], Result]) -> Result:
        """What `parse` makes of the JSON response to a POST with `body`, or to a GET without one.

        Retries while no verifier responds; raises TaskError after `retry_seconds`.
        """
        started = time.monotonic()
        pause = MIN_PAUSE_SECONDS
        waiting = False
        while True:
            addresses = self._available() or self._addresses
            address = addresses[next(self._turns) % len(addresses)]
            try:
                result = self._request_once(address, path, body, parse)
                break
            except (OSError, ValueError, http.client.HTTPException, _UnavailableError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
            self._failed_at[address] = time.monotonic()
            if time.monotonic() - started > self._retry_seconds or self._closed.is_set():
                raise _NoResponseError(
                    f"env.address {url_of(address)} has not responded for "
                    f"{self._retry_seconds:.0f} s ({reason}); "
                    f"start it: {program_name('verifier')} @ CONFIG"
                )
            if not waiting:
                logger.info("waiting for the verifier url=%s reason=%s", url_of(address), reason)
                waiting = True
            if not self._available():
                self._closed.wait(pause)
                pause = min(MAX_PAUSE_SECONDS, 2 * pause)
        self._failed_at.pop(address, None)
        if waiting:
            logger.info("the verifier responds again url=%s", url_of(address))
        return result

    def _available(self) -> list[tuple[str, int]]:
        start = time.monotonic() - self._avoid_seconds
        return [each for each in self._addresses if self._failed_at.get(each, start) <= start]

    def _request_once(
        self, address: tuple[str, int], path: str, body: Any, parse: Callable[[Any, Any], Result]
    ) -> Result:
        """Send a request once; TaskError if a retry would not help, another exception if it may."""
        timeout = self._request_timeout
        if body is not None:  # for one worker that computes all rewards, or a reply
            timeout += self._reward_timeout * len(cast("list[str]", body.get("completions", [""])))
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
            value = parse_json(content)
            json.dumps(value, ensure_ascii=False).encode()  # raises for an unpaired surrogate
            if response.status == http.client.OK:
                return parse(value, body)
            reason = str(value["error"])[:200]
        except MALFORMED as error:
            raise _unexpected(address, error) from None
        kind = _OtherProblemsError if response.status == http.client.CONFLICT else TaskError
        raise kind(
            f"env.address {url_of(address)} refuses {path.partition('?')[0]} with "
            f"{response.status}: {reason}"
        )


_Unsent: TypeAlias = "tuple[Future[Any], str, dict[str, Any], Callable[..., Any]]"


def url_of(address: tuple[str, int]) -> str:
    return f"http://{with_port(*address)}"


def _unexpected(address: tuple[str, int], reason: object) -> TaskError:
    return TaskError(
        f"env.address {url_of(address)} returned an unexpected response ({str(reason)[:80]}); "
        "is this a verifier? Check the address"
    )


def _scores_from_json(response: Any, body: Mapping[str, Any]) -> list[Score]:
    scores = response["scores"]
    count = len(body["completions"])
    if not isinstance(scores, list) or len(scores) != count:
        raise TypeError(f"not {count} scores")
    episodes = map(messages_from_json, body["completion_messages"])
    return list(map(_score_from_json, scores, map(num_completions, episodes)))


def _score_from_json(row: dict[str, Any], num_turns: int) -> Score:
    score = Score(row["reward"], row["rewards"], row.get("turn_rewards", ()))
    try:
        return cast(Score, checked_reward(score, num_turns=num_turns or 1))
    except ValueError as error:
        raise ValueError(f"a reward of {error}") from None


def _reply_from_json(response: Any, body: Mapping[str, Any]) -> Reply:
    rows = response["messages"]
    if rows is None:
        return None
    messages = messages_from_json(rows)
    if not messages or any(message.role not in REPLY_ROLES for message in messages):
        raise ValueError(f"a reply without messages, or with other roles than {REPLY_ROLES}")
    return messages


def messages_to_json(messages: Sequence[Message]) -> list[list[str]]:
    return [[message.role, message.content, message.name] for message in messages]


def messages_from_json(rows: Any) -> list[Message]:
    """The messages in a request or response. Raises TypeError or ValueError."""
    if not isinstance(rows, list):
        raise TypeError("messages that are not a list")
    messages: list[Message] = []
    for row in cast("list[Any]", rows):
        role, content, name = row
        if role not in ("assistant", *REPLY_ROLES) or not type(content) is type(name) is str:
            raise ValueError(f"{row!r:.40} is no message")
        messages.append(Message(role, content, name))
    return messages


def problem_to_json(problem: Problem) -> dict[str, Any]:
    return {
        "id": problem.id,
        "messages": [
            [each.role, each.content, each.name, [[t.name, t.arguments] for t in each.tool_calls]]
            for each in problem.messages
        ],
        "input_token_ids": list(problem.input_token_ids),
        "row": problem.row,
    }


def _prompt_message_from_json(row: Any) -> Message:
    role, content, name, calls = row
    tool_calls = tuple(ToolCall(tool, arguments) for tool, arguments in calls)
    if not all(type(text) is str for text in (role, content, name, *(t.name for t in tool_calls))):
        raise TypeError("a message is not text")
    return Message(role, content, name, tool_calls)


def _problem_from_json(row: dict[str, Any], task: str) -> Problem:
    messages = tuple(map(_prompt_message_from_json, row["messages"]))
    tokens = tuple(row["input_token_ids"])
    if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise ValueError("a token id is not a whole number of 31 bits")
    if not (messages or tokens):
        raise ValueError("a problem has no prompt")
    return Problem(
        str(row["id"]),
        task,
        messages,
        answer=str(row["id"]),
        input_token_ids=tokens,
        row=int(row.get("row", 0)),
    )
