"""Verifier: serves the problems and rewards of a config's environments over HTTP (`bin/verifier`).

    GET  /health                              {"environments": {NAME: number of train problems}}
    GET  /problems?env=NAME&split=train|eval  {"problems": [{"id", "messages", "input_token_ids"}]}
    POST /verify_answer                       {"env", "problem", "completion"} -> {"reward"}

The answers to the problems stay on this machine. Each connection is served by a thread of its own;
reward functions are called one at a time.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from peralta_zmq.atomic_files import read_private_token
from peralta_zmq.build import open_environments
from peralta_zmq.config import Config
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.verifier_client import problem_to_json
from peralta_zmq.errors import PeraltaError
from peralta_zmq.http_server import HttpServer, RequestHandler

MAX_REQUEST_BYTES = 1 << 20
# Maximum wait for other calls of reward functions, then the response is status 503 and the client
# retries; shorter than the client's request timeout.
LOCK_TIMEOUT_SECONDS = 25.0
logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises ConfigError or TaskError for environments that cannot be opened, and as Verifier does.
    """
    section = config.verifier
    token = read_private_token(section.token_file, option="verifier.token_file")
    with closing(Verifier(config, host=section.host, port=section.port, token=token)) as verifier:
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stopped.set())
        names = ", ".join(verifier.health()["environments"])
        logger.info("verifier on http://%s:%d serves %s", section.host, verifier.port, names)
        stopped.wait()


class _RequestError(Exception):
    """A request that is answered with an HTTP error status and a reason."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Verifier:
    """The HTTP server of the environments, in background threads. Use with `closing`.

    Clients must send `token` as a password; None requires no password. Raises ConfigError if the
    port is in use, or if it is reachable from other machines and `token` is None.
    """

    def __init__(self, config: Config, *, host: str, port: int, token: str | None) -> None:
        self._splits: dict[str, Environments] = {
            split: open_environments(config, split, local=True) for split in ("train", "eval")
        }
        self._problems = {
            (problem.task, problem.id): (problem, environments)
            for environments in self._splits.values()
            for problem in environments.problems
        }
        self._reward_lock, self._closed = threading.Lock(), False
        self._server = HttpServer(
            _Handler, host=host, port=port, token=token, port_setting="verifier.port", verifier=self
        )
        self.port = self._server.port

    def close(self) -> None:
        """Stop the server; waits until a running reward function returns."""
        self._server.close()
        with self._reward_lock:
            self._closed = True
            for environments in self._splits.values():
                environments.close()

    def health(self) -> dict[str, Any]:
        """The number of train problems of each environment, as a response."""
        return {"environments": dict(self._splits["train"].sizes)}

    def problems(self, env: str, split: str) -> dict[str, Any]:
        """The problems of an environment, as a response. Raises _RequestError for a wrong name."""
        if split not in self._splits:
            raise _RequestError(HTTPStatus.NOT_FOUND, f"split {split!r:.40} is not train or eval")
        environments = self._splits[split]
        if env not in environments.sizes:
            names = ", ".join(environments.sizes)
            raise _RequestError(
                HTTPStatus.NOT_FOUND, f"no environment {env!r:.40}; there are {names}"
            )
        problems = [problem for problem in environments.problems if problem.task == env]
        return {"problems": list(map(problem_to_json, problems))}

    def reward(self, env: str, problem_id: str, completion: str) -> dict[str, Any]:
        """The reward of a completion, as a response. Raises _RequestError if computing it fails."""
        if (env, problem_id) not in self._problems:
            raise _RequestError(
                HTTPStatus.NOT_FOUND, f"no problem {problem_id!r:.40} in {env!r:.40}"
            )
        problem, environments = self._problems[env, problem_id]
        if not self._reward_lock.acquire(timeout=LOCK_TIMEOUT_SECONDS):
            raise _RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "busy")
        try:
            if self._closed:
                raise _RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "stopped")
            return {"reward": environments.reward(problem, completion)}
        except PeraltaError as error:
            raise _RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None
        finally:
            self._reward_lock.release()


class _Handler(RequestHandler):
    """Serves one connection: checks the password, calls the verifier, responds with JSON."""

    verifier: Verifier  # set by HttpServer

    def do_GET(self) -> None:
        """Respond to a GET or POST request."""
        try:
            if not self.is_authorized():
                raise _RequestError(
                    HTTPStatus.UNAUTHORIZED, "set the password in verifier.token_file"
                )
            status, message = HTTPStatus.OK, self._result()
        except _RequestError as error:
            status, message = error.status, {"error": str(error)}
            self.close_connection = True  # a part of the body may be unread
        with suppress(ConnectionError, TimeoutError):  # the client retries
            self.respond(status, json.dumps(message).encode(), content_type="application/json")

    do_POST = do_GET

    def _result(self) -> dict[str, Any]:
        """The response to the current request. Raises _RequestError."""
        url = urlsplit(self.path)
        match self.command, url.path:
            case "GET", "/health":
                return self.verifier.health()
            case "GET", "/problems":
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                return self.verifier.problems(query.get("env", ""), query.get("split", "train"))
            case "POST", "/verify_answer":
                body = self._body()
                env, problem_id, completion = (
                    _text(body, name) for name in ("env", "problem", "completion")
                )
                return self.verifier.reward(env, problem_id, completion)
            case _:
                raise _RequestError(
                    HTTPStatus.NOT_FOUND,
                    "no such path; use GET /health, GET /problems or POST /verify_answer",
                )

    def _body(self) -> dict[str, Any]:
        """The JSON object in the body of the current request. Raises _RequestError."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10):
            raise _RequestError(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing or invalid")
        if int(length) > MAX_REQUEST_BYTES:
            raise _RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MAX_REQUEST_BYTES} bytes"
            )
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise _RequestError(HTTPStatus.BAD_REQUEST, "not JSON") from None
        if not isinstance(body, dict):
            raise _RequestError(HTTPStatus.BAD_REQUEST, "not a JSON object")
        return cast("dict[str, Any]", body)


def _text(body: dict[str, Any], name: str) -> str:
    if not isinstance(value := body.get(name), str):
        raise _RequestError(HTTPStatus.BAD_REQUEST, f"{name} is missing or not a string")
    return value
