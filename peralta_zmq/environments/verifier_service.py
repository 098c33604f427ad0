"""HTTP service for the problems and rewards of environments (`bin/verifier`).

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
from typing import Any
from urllib.parse import parse_qs, urlsplit

from peralta_zmq.build import open_environments
from peralta_zmq.config import Config
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.verifier_client import problem_to_json
from peralta_zmq.errors import PeraltaError
from peralta_zmq.http_server import HttpServer, RequestHandler, read_private_token

MAX_REQUEST_BYTES = 1 << 20
# Maximum wait while another reward function runs. Then the response is status 503, and the client
# retries. The wait is shorter than the timeout of the client's request.
LOCK_TIMEOUT_SECONDS = 25.0
ANSWER_FIELDS = ("env", "problem", "completion")  # of the body of /verify_answer
logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises ConfigError or TaskError for environments that cannot be opened, and ConfigError for a
    port that cannot be used.
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
        """Stop the server, after waiting for a running reward function."""
        self._server.close()
        with self._reward_lock:
            self._closed = True
            for environments in self._splits.values():
                environments.close()

    def health(self) -> dict[str, Any]:
        """The response with the number of train problems of each environment."""
        return {"environments": dict(self._splits["train"].sizes)}

    def problems(self, env: str, split: str) -> dict[str, Any]:
        """The response with all problems. Raises _RequestError for an unknown name."""
        if split not in self._splits:
            raise _RequestError(404, f"split {split!r:.40} is not train or eval")
        environments = self._splits[split]
        if env not in environments.sizes:
            names = ", ".join(environments.sizes)
            raise _RequestError(404, f"no environment {env!r:.40}; there are {names}")
        problems = [problem for problem in environments.problems if problem.task == env]
        return {"problems": list(map(problem_to_json, problems))}

    def reward(self, env: str, problem_id: str, completion: str) -> dict[str, Any]:
        """The response with the reward of a completion; _RequestError on failure."""
        if (env, problem_id) not in self._problems:
            raise _RequestError(404, f"no problem {problem_id!r:.40} in {env!r:.40}")
        problem, environments = self._problems[env, problem_id]
        if not self._reward_lock.acquire(timeout=LOCK_TIMEOUT_SECONDS):
            raise _RequestError(503, "busy")
        try:
            if self._closed:
                raise _RequestError(503, "stopped")
            return {"reward": environments.reward(problem, completion)}
        except PeraltaError as error:
            raise _RequestError(422, str(error)) from None
        finally:
            self._reward_lock.release()


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
        url = urlsplit(self.path)
        match self.command, url.path:
            case "GET", "/health":
                return self.verifier.health()
            case "GET", "/problems":
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                return self.verifier.problems(query.get("env", ""), query.get("split", "train"))
            case "POST", "/verify_answer":
                return self.verifier.reward(*self._body())
            case _:
                choices = "GET /health, GET /problems or POST /verify_answer"
                raise _RequestError(404, f"no such path; use {choices}")

    def _body(self) -> list[str]:
        """The values of ANSWER_FIELDS in the request body. Raises _RequestError."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10):
            raise _RequestError(411, "Content-Length is missing or invalid")
        if int(length) > MAX_REQUEST_BYTES:
            raise _RequestError(413, f"more than {MAX_REQUEST_BYTES} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
            texts = [body[name] for name in ANSWER_FIELDS]
        except (ValueError, RecursionError, TypeError, KeyError):
            texts = []
        if not texts or not all(isinstance(text, str) for text in texts):
            fields = ", ".join(ANSWER_FIELDS)
            raise _RequestError(400, f"the body is not a JSON object with the text fields {fields}")
        return texts
