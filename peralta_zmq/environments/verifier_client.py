"""Client of verifiers: an environment that other machines serve (bin/verifier).

Several verifiers with equal problems take turns; one that does not respond is left out for a while.
The client retries while none responds. A failure is an error, never a reward.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar, cast
from urllib.parse import quote

from pydantic import BaseModel, Field, GetCoreSchemaHandler

from peralta_zmq.addresses import with_port
from peralta_zmq.environments.reward_functions import checked_reward, num_completions
from peralta_zmq.environments.turns import REPLY_ROLES, Reply
from peralta_zmq.errors import RewardError, RewardUnavailableError, TaskError, program_name
from peralta_zmq.rollout import Message, Problem, Score

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class Form(BaseModel):
    """Refused at the first wrong item of a list: a list of all errors could be huge."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        todo: list[Any] = [schema]
        while todo:
            node = todo.pop()
            if isinstance(node, list):
                todo += node
            elif isinstance(node, dict):
                if node.get("type") == "definition-ref":  # such as Message
                    node = cast(Any, handler.resolve_ref_schema(cast(Any, node)))
                if node.get("type") in ("list", "tuple"):
                    node["fail_fast"] = True
                todo += node.values()
        return schema


class ProblemsResponse(Form):
    problems: list[Problem]  # with the id as answer: the answers stay on the verifier
    digest: str  # of the environment's problems, answers and rewards
    has_turns: bool
    tools: list[dict[str, Any]]  # schemas


class ReplyRequest(Form):
    env: str
    problem: str  # id on the verifier
    digest: str
    messages: list[Message] = Field(min_length=1)  # after the prompt


class ReplyResponse(Form):
    messages: list[Message] | None = Field(min_length=1)  # None ends the episode


class ScoreRequest(Form):
    env: str
    problem: str
    digest: str | None = None  # None: the client has not got the problems from a verifier
    completions: list[str] = Field(min_length=1)
    # One entry per completion, or none. The messages are those after the prompt.
    completion_ids: list[list[int]] = []
    completion_messages: list[list[Message]] = []


class ScoreFields(BaseModel):
    reward: Any  # `checked_reward` checks the numbers
    rewards: dict[str, Any] = {}
    turn_rewards: list[Any] = []


class ScoreResponse(Form):
    scores: list[ScoreFields]


class ErrorResponse(Form):
    error: str


class _UnavailableError(Exception):
    """The request failed, but a retry may succeed."""


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
        max_response_bytes: int = 64 << 20,
    ) -> None:
        self._addresses = tuple(addresses)
        self._env = env
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._reward_timeout = reward_timeout
        self._retry_seconds = retry_seconds
        self._request_timeout = request_timeout
        self._avoid_seconds = avoid_seconds
        self._max_response_bytes = max_response_bytes
        self._digest = ""  # set by `problems`, as the next two
        self.has_turns = False
        self.schemas: Sequence[Mapping[str, Any]] = ()  # of the tools
        self._failed_at: dict[tuple[str, int], float] = {}  # monotonic seconds
        self._turns = count()
        self._max_unfinished = 2 * concurrency
        self._num_unfinished = 0
        self._lock = threading.Lock()
        self._may_send = threading.Semaphore(concurrency)
        self._closed = threading.Event()

    def problems(self, split: str, seed: int, **options: object) -> Iterator[Problem]:
        """The problems of split 'train' or 'eval', with their ids on the verifier as answers.

        The verifier's config determines the problems: `seed` and `options` are unused. Raises
        TaskError if no verifier responds in time, or one sends an unexpected response.
        """

        def parse(content: bytes) -> list[Problem]:
            response = ProblemsResponse.model_validate_json(content, strict=True)
            for problem in response.problems:
                if not (problem.messages or problem.input_token_ids):
                    raise ValueError("a problem has no prompt")
                if not all(0 <= token < 2**31 for token in problem.input_token_ids):
                    raise ValueError("a token id has more than 31 bits")
            self._digest = response.digest
            self.has_turns = response.has_turns
            self.schemas = response.tools
            return [replace(problem, task=self._env) for problem in response.problems]

        path = f"/problems?env={quote(self._env)}&split={quote(split)}"
        return iter(self._request(path, None, parse))

    @property
    def identity(self) -> str:
        return f"{self._env} {self._addresses}"

    @property
    def has_room(self) -> bool:
        """Whether fewer groups and replies wait than are requested at the same time."""
        return self._num_unfinished < self._max_unfinished

    def score(
        self,
        problem: Problem,
        texts: Sequence[str],
        token_ids: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message]] = (),
    ) -> Future[list[Score]]:
        episodes = [list(each) for each in messages or [()] * len(texts)]
        all_turns = [num_completions(episode) or 1 for episode in episodes]

        def parse(content: bytes) -> list[Score]:
            scores = ScoreResponse.model_validate_json(content, strict=True).scores
            return [
                cast(Score, checked_reward(Score(**vars(score)), num_turns=num_turns))
                for score, num_turns in zip(scores, all_turns, strict=True)
            ]

        request = ScoreRequest(
            env=self._env,
            problem=problem.answer,
            digest=self._digest,
            completions=list(texts),
            completion_ids=list(map(list, token_ids)),
            completion_messages=episodes,
        )
        return self._send("/score", request, parse, num_calls=len(texts))

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[Reply]:
        def parse(content: bytes) -> Reply:
            reply = ReplyResponse.model_validate_json(content, strict=True).messages
            if any(message.role not in REPLY_ROLES for message in reply or ()):
                raise ValueError(f"a reply with other roles than {REPLY_ROLES}")
            return reply

        request = ReplyRequest(
            env=self._env,
            problem=problem.answer,
            digest=self._digest,
            messages=list(messages[len(problem.messages) :]),
        )
        return self._send("/reply", request, parse)

    def _send(
        self,
        path: str,
        request: BaseModel,
        parse: Callable[[bytes], Result],
        *,
        num_calls: int = 1,
    ) -> Future[Result]:
        future: Future[Result] = Future()
        timeout = self._request_timeout + self._reward_timeout * num_calls
        content = request.model_dump_json().encode()

        def send() -> None:
            with self._may_send:
                if self._closed.is_set():
                    future.cancel()
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(self._request(path, content, parse, timeout))
                except Exception as error:  # noqa: BLE001  the caller gets it from the future
                    future.set_exception(error)

        def count_finished(_: Future[Result]) -> None:
            with self._lock:
                self._num_unfinished -= 1

        with self._lock:
            self._num_unfinished += 1
        future.add_done_callback(count_finished)
        # Not a ThreadPoolExecutor: at exit it would wait for requests without a response.
        threading.Thread(target=send, daemon=True).start()
        return future

    def close(self) -> None:
        """Cancel all requests that wait; those that are sent end in the background."""
        self._closed.set()

    def _request(
        self,
        path: str,
        content: bytes | None,
        parse: Callable[[bytes], Result],
        timeout: float | None = None,
    ) -> Result:
        """What `parse` returns for the response to a POST of `content`, or to a GET without it.

        Retries while no verifier responds; raises RewardUnavailableError after `retry_seconds`.
        """
        started = time.monotonic()
        pause = 0.05  # seconds between two attempts
        waiting = False
        while True:
            addresses = self._available() or self._addresses
            address = addresses[next(self._turns) % len(addresses)]
            try:
                result = self._request_once(address, path, content, parse, timeout)
                break
            except (OSError, ValueError, http.client.HTTPException, _UnavailableError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
            self._failed_at[address] = time.monotonic()
            if time.monotonic() - started > self._retry_seconds or self._closed.is_set():
                raise RewardUnavailableError(
                    f"env.address {url_of(address)} has not responded for "
                    f"{self._retry_seconds:.0f} s ({reason}); "
                    f"start it: {program_name('verifier')} @ CONFIG"
                )
            if not waiting:
                logger.info("waiting for the verifier url=%s reason=%s", url_of(address), reason)
                waiting = True
            if not self._available():
                self._closed.wait(pause)
                pause = min(2.0, 2 * pause)
        self._failed_at.pop(address, None)
        if waiting:
            logger.info("the verifier responds again url=%s", url_of(address))
        return result

    def _available(self) -> list[tuple[str, int]]:
        start = time.monotonic() - self._avoid_seconds
        return [each for each in self._addresses if self._failed_at.get(each, start) <= start]

    def _request_once(
        self,
        address: tuple[str, int],
        path: str,
        content: bytes | None,
        parse: Callable[[bytes], Result],
        timeout: float | None,
    ) -> Result:
        """Send a request once. Raises RewardError if a retry would not help, TaskError if every
        further request would fail, too, and another exception if a retry may help.
        """
        timeout = timeout or self._request_timeout
        with closing(http.client.HTTPConnection(*address, timeout=timeout)) as connection:
            connection.request("GET" if content is None else "POST", path, content, self._headers)
            response = connection.getresponse()
            received = response.read(self._max_response_bytes + 1)
        if response.status >= http.client.INTERNAL_SERVER_ERROR:
            raise _UnavailableError(f"status {response.status}")
        if len(received) > self._max_response_bytes:
            raise _unexpected(address, f"more than {self._max_response_bytes} bytes")
        if response.length:  # missing bytes; a read with a limit raises no IncompleteRead
            raise _UnavailableError("connection closed within the response")
        try:
            if response.status == http.client.OK:
                return parse(received)
            reason = ErrorResponse.model_validate_json(received).error
        except ValueError as error:
            raise _unexpected(address, error) from None
        # With other problems than those of the client, no reward would be right.
        kind = TaskError if response.status == http.client.CONFLICT else RewardError
        raise kind(
            f"env.address {url_of(address)} refuses {path.partition('?')[0]} with "
            f"{response.status}: {reason[:200]}"
        )


def url_of(address: tuple[str, int]) -> str:
    return f"http://{with_port(*address)}"


def _unexpected(address: tuple[str, int], reason: object) -> RewardError:
    text = " ".join(str(reason).split())
    return RewardError(
        f"env.address {url_of(address)} returned an unexpected response ({text[:120]}); is this a "
        "verifier? Check the address"
    )
