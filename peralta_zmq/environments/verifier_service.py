"""HTTP service for the problems and rewards of environments (`bin/verifier`).

    GET  /healthz        {"environments": {NAME: number of train problems}, "waiting", "workers"}
    GET  /problems?env=NAME&split=train|eval
                         {"problems": [{"id", "messages", "input_token_ids"}], "digest",
                          "has_turns", "tools": schemas}
    POST /score          {"env", "problem", "digest", "completions", "completion_ids",
                          "completion_messages": with several turns, those after the prompt}
                         -> {"scores": [{"reward", "rewards", "turn_rewards"}]}
    POST /reply          {"env", "problem", "digest", "messages": those after the prompt}
                         -> {"messages": those to insert; null ends the episode}
    POST /verify_answer  {"env", "problem", "completion"} -> {"reward", "rewards", "turn_rewards"}

A message is a list of role, content and name of the tool. The answers to the problems stay on this
machine. The digest identifies the problems of an environment with their answers, rewards and
replies, so that a client does not get rewards of other problems.
Each connection is served by a thread of its own; functions are called by a pool of workers, bounded
reward functions one at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Any, TypeVar, cast
from urllib.parse import parse_qs

from peralta_zmq.atomic_files import parse_json
from peralta_zmq.build import dry_run, fitted_settings, open_environments
from peralta_zmq.config import Config
from peralta_zmq.environments.dataset import Environments, ReplySource, RewardSource
from peralta_zmq.environments.verifier_client import (
    messages_from_json,
    messages_to_json,
    problem_to_json,
    url_of,
)
from peralta_zmq.errors import ConfigError, PeraltaError
from peralta_zmq.http_server import HttpServer, RequestHandler, read_private_token
from peralta_zmq.rollout import Message, Problem

MAX_REQUEST_BYTES = 64 << 20
# A request for scores may take this time plus task.reward_timeout for each completion, one for a
# reply this time plus task.reward_timeout. After that the response is status 503, and the client,
# whose own timeout is longer, retries.
MAX_WAIT_SECONDS = 20.0
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises ConfigError or TaskError for environments that cannot be opened, and ConfigError for a
    port that cannot be used.
    """
    with suppress(ConfigError):  # without the model the defaults stay
        config = fitted_settings.fit_settings(config, local=True).config
    section = config.verifier
    token = read_private_token(section.token_file, option="verifier.token_file")
    with closing(Verifier(config, host=section.host, port=section.port, token=token)) as verifier:
        verifier.log_dry_run(config)
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stopped.set())
        names = ", ".join(verifier.health()["environments"])
        logger.info("verifier on %s serves %s", url_of((section.host, verifier.port)), names)
        stopped.wait()


class _RequestError(Exception):
    """A request that is answered with an HTTP error status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = HTTPStatus(status)


class Verifier:
    """HTTP server of the environments, in background threads. Use with `closing`.

    Clients must send `token` as a password; None = no password. Raises ConfigError if the port is
    in use, or if the port is reachable from other machines and `token` is None.
    """

    def __init__(self, config: Config, *, host: str, port: int, token: str | None) -> None:
        self._splits: dict[str, Environments] = {
            split: open_environments(config, split, local=True) for split in dry_run.SPLITS
        }
        self._problems = {
            (split, problem.task, problem.id): problem
            for split, environments in self._splits.items()
            for problem in environments.problems
        }
        self._digests = {
            (env, split): self._digest(env, split)
            for split, environments in self._splits.items()
            for env in environments.sizes
        }
        self._reward_timeout = config.task.reward_timeout
        self._reward_lock, self._closed = threading.Lock(), False
        settings = ("verifier.host", "verifier.port")
        self._server = HttpServer(
            _Handler, host=host, port=port, token=token, settings=settings, verifier=self
        )
        self.port = self._server.port

    def log_dry_run(self, config: Config) -> None:
        """Log what a trainer reports about the prompts, if `model.name` is on this machine."""
        with suppress(ConfigError):
            reader = dry_run.PromptReader.of(config)
            for split in dry_run.SPLITS:
                dry_run.log(dry_run.check_prompts(config, self._splits[split], split, reader)[1])

    def close(self) -> None:
        """Stop the server and the reward workers."""
        self._server.close()
        with self._reward_lock:
            self._closed = True
        for environments in self._splits.values():
            environments.close()

    def health(self) -> dict[str, Any]:
        """The response with the number of train problems, and the state of the reward pools."""
        pools = [environments.pool for environments in self._splits.values()]
        return {
            "environments": dict(self._splits["train"].sizes),
            "waiting": sum(pool.num_waiting for pool in pools),
            "workers": sum(pool.num_workers for pool in pools),
        }

    def problems(self, env: str, split: str) -> dict[str, Any]:
        """The response with all problems. Raises _RequestError for an unknown name."""
        if split not in self._splits:
            raise _RequestError(404, f"split {split!r:.40} is not train or eval")
        environments = self._splits[split]
        if env not in environments.sizes:
            names = ", ".join(environments.sizes)
            raise _RequestError(404, f"no environment {env!r:.40}; there are {names}")
        problems = [problem for problem in environments.problems if problem.task == env]
        replies = environments.reply_sources.get(env)
        return {
            "problems": list(map(problem_to_json, problems)),
            "digest": self._digests[env, split],
            "has_turns": replies is not None,
            "tools": list(replies.schemas) if replies else [],
        }

    def score(
        self,
        env: str,
        problem_id: str,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message]] = (),
        digest: str | None = None,
    ) -> list[dict[str, Any]]:
        """The scores of completions, each as an object. Raises _RequestError on failure.

        `digest` is that of the client's problems; None = do not compare.
        """
        environments, problem = self._find(env, problem_id, digest)
        source = environments.reward_sources[env]
        scores = self._result(
            source,
            lambda: source.score(problem, completions, completion_ids, messages),
            num_calls=len(completions),
        )
        return [score._asdict() for score in scores]

    def reply(
        self, env: str, problem_id: str, messages: Sequence[Message], digest: str
    ) -> dict[str, Any]:
        """The response with the messages that follow a completion, the last of `messages`.

        Raises _RequestError on failure.
        """
        environments, problem = self._find(env, problem_id, digest)
        source = environments.reply_sources.get(env)
        if source is None:
            raise _RequestError(404, f"{env!r:.40} has only one turn")
        reply = self._result(source, lambda: source.reply(problem, [*problem.messages, *messages]))
        return {"messages": None if reply is None else messages_to_json(reply)}

    def _find(self, env: str, problem_id: str, digest: str | None) -> tuple[Environments, Problem]:
        """The problem of a request, and the environments of its split. Raises _RequestError."""
        splits = [split for split in self._splits if (env, split) in self._digests]
        chosen = [each for each in splits if digest in (None, self._digests[env, each])]
        if splits and not chosen:
            raise _RequestError(
                409,
                f"other problems, answers or rewards in {env!r:.40} than another verifier, or "
                "than before a restart; use the same config and data files for all verifiers",
            )
        chosen = [each for each in chosen if (each, env, problem_id) in self._problems]
        if not chosen:
            raise _RequestError(404, f"no problem {problem_id!r:.40} in {env!r:.40}")
        return self._splits[chosen[0]], self._problems[chosen[0], env, problem_id]

    def _result(
        self,
        source: RewardSource | ReplySource,
        start: Callable[[], Future[Result]],
        *,
        num_calls: int = 1,
    ) -> Result:
        """The result of the future of `start`, a call of `source`. Raises _RequestError."""
        with self._reward_lock:
            if self._closed:
                raise _RequestError(503, "stopped")
            if not source.has_room:
                raise _RequestError(503, "busy")
            future = start()
        try:
            return future.result(timeout=self._reward_timeout * num_calls + MAX_WAIT_SECONDS)
        except FutureTimeout:
            future.cancel()
            raise _RequestError(503, "busy") from None
        except CancelledError:
            raise _RequestError(503, "stopped") from None
        except PeraltaError as error:
            raise _RequestError(422, str(error)) from None

    def _digest(self, env: str, split: str) -> str:
        """Identifies the problems of an environment, with their answers and reward function."""
        environments = self._splits[split]
        problems = [problem for problem in environments.problems if problem.task == env]
        sources: list[RewardSource | ReplySource] = [environments.reward_sources[env]]
        if env in environments.reply_sources:
            sources.append(environments.reply_sources[env])
        identity = repr((problems, [source.identity for source in sources]))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]


class _Handler(RequestHandler):
    """Handles one connection: checks the password, calls the verifier, responds."""

    verifier: Verifier  # set by HttpServer

    def do_GET(self) -> None:
        """Respond to a GET or POST request."""
        try:
            if not self.is_authorized():
                raise _RequestError(401, "set the password in verifier.token_file")
            status, message = HTTPStatus.OK, self._result()
        except _RequestError as error:
            status, message = error.status, {"error": str(error)}
            self.close_connection = True  # the unread body would be read as the next request
        with suppress(ConnectionError, TimeoutError):  # the client retries
            self.respond(status, json.dumps(message).encode(), content_type="application/json")

    do_POST = do_GET

    def _result(self) -> dict[str, Any]:
        """The response to the current request. Raises _RequestError."""
        path, _, query = self.path.partition("?")
        match self.command, path:
            case "GET", "/healthz":
                return self.verifier.health()
            case "GET", "/problems":
                chosen = {name: values[0] for name, values in parse_qs(query).items()}
                return self.verifier.problems(chosen.get("env", ""), chosen.get("split", "train"))
            case "POST", "/verify_answer":
                env, problem, completion = self._body("completion")
                return self.verifier.score(env, problem, [completion], [()])[0]
            case "POST", "/score":
                env, problem, texts, ids, messages, digest = self._body(
                    "completions", "completion_ids", "completion_messages", "digest"
                )
                episodes = [*map(messages_from_json, messages)] if any(messages) else ()
                return {"scores": self.verifier.score(env, problem, texts, ids, episodes, digest)}
            case "POST", "/reply":
                env, problem, messages, digest = self._body("messages", "digest")
                return self.verifier.reply(env, problem, messages_from_json(messages), digest)
            case _:
                choices = (
                    "GET /healthz, GET /problems, POST /score, POST /reply or POST /verify_answer"
                )
                raise _RequestError(404, f"no such path; use {choices}")

    def _body(self, *fields: str) -> list[Any]:
        """The values of env, problem and `fields` in the request body. Raises _RequestError."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10):
            raise _RequestError(411, "Content-Length is missing or invalid")
        if int(length) > MAX_REQUEST_BYTES:
            raise _RequestError(413, f"more than {MAX_REQUEST_BYTES} bytes")
        fields = ("env", "problem", *fields)
        try:
            body = parse_json(self.read_body(int(length)))
            values = [body[name] for name in fields]
        except (ValueError, TypeError, KeyError):
            values = []
        if not values or not all(map(_is_valid, fields, values)) or not _equal_lengths(values):
            names = ", ".join(fields)
            raise _RequestError(400, f"the body is not a JSON object with the fields {names}")
        return values


def _is_valid(field: str, value: object) -> bool:
    """Whether a field of a request has the right type: a list for completions, else text."""
    if field == "messages":
        return _are_messages(value)
    if field == "completion_messages":
        return isinstance(value, list) and all(map(_are_messages, cast("list[Any]", value)))
    if field == "completions":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if field == "completion_ids":
        rows = cast("list[Any]", value) if isinstance(value, list) else [None]
        return all(isinstance(row, list) and all(type(each) is int for each in row) for row in rows)
    return isinstance(value, str)


def _are_messages(value: object) -> bool:
    try:
        messages_from_json(value)
    except (TypeError, ValueError):
        return False
    return True


def _equal_lengths(values: Sequence[object]) -> bool:
    """Whether all lists have the same length above 0."""
    lengths = {len(value) for value in values if isinstance(value, list)}
    return len(lengths) < 2 and 0 not in lengths
