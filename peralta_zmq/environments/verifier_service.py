"""bin/verifier: problems and rewards of a config's environments, for generators elsewhere.

    GET  /health                              {"environments": {NAME: problems to train on}}
    GET  /problems?env=NAME&split=train|eval  {"problems": [{"id", "messages", "input_token_ids"}]}
    POST /verify_answer                       {"env", "problem", "completion"} -> {"reward"}

Knows HTTP, the config and the tasks; knows nothing of models or training. Threads answer, the
main thread judges, one answer at a time.
"""

from __future__ import annotations

import hmac
import json
import logging
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from peralta_zmq.atomic_files import read_private_token
from peralta_zmq.build import open_environments
from peralta_zmq.config import Config
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.verifier_client import described
from peralta_zmq.errors import ConfigError, PeraltaError
from peralta_zmq.rollout import Problem
from peralta_zmq.weights.http_backend import LOOPBACK

MAX_REQUEST = 1 << 20  # bytes of a question
MAX_WAITING = 1024  # answers to be judged
JUDGE_SECONDS = 25.0  # until a request is answered with 503; below the client's patience
SILENT_SECONDS = 60.0
logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Serve until a signal. Raises ConfigError or TaskError when there is nothing to serve."""
    chosen = config.verifier
    token = read_private_token(chosen.token_file, option="verifier.token_file")
    with closing(Verifier(config, host=chosen.host, port=chosen.port, token=token)) as opened:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: opened.stop())
        logger.info("verifier on http://%s:%d serves %s", chosen.host, opened.port, opened.names)
        opened.judge_until_stopped()


class _RefusedError(Exception):
    """A request that cannot be answered, and how to say so."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Case:
    """An answer to be judged."""

    judge: Callable[[Problem, str], Any]
    problem: Problem
    completion: str
    verdict: Future[Any]


class Verifier:
    """Owns the port and its threads; `judge_until_stopped` runs the rewards. Use with `closing`.

    Raises ConfigError when the port is taken, or strangers could reach it without a password.
    """

    def __init__(self, config: Config, *, host: str, port: int, token: str | None) -> None:
        if token is None and host not in LOOPBACK:
            raise ConfigError(
                f"verifier.host {host} would answer whoever reaches it; "
                "set verifier.token_file on every machine"
            )
        self._splits: dict[str, Environments] = {
            split: open_environments(config, split, local=True) for split in ("train", "eval")
        }
        self._known = {
            (each.task, each.id): (each, opened.reward_sources[each.task].reward)
            for opened in self._splits.values()
            for each in opened.problems
        }
        self._cases: queue.Queue[_Case | None] = queue.Queue(MAX_WAITING)
        self._stopped = threading.Event()
        service = self

        class Handler(_Handler):
            verifier, password = service, token

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"verifier.port {port} cannot be used ({error.strerror}); choose another"
            ) from None
        self._server.daemon_threads = True
        self._server.handle_error = _log_error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        self._thread.start()

    @property
    def names(self) -> str:
        """The environments served."""
        return ", ".join(self._splits["train"].sizes)

    def judge_until_stopped(self) -> None:
        """Run the reward functions, in the thread that calls."""
        while not self._stopped.is_set():
            with suppress(queue.Empty):
                case = self._cases.get(timeout=0.2)
                if case is not None and case.verdict.set_running_or_notify_cancel():
                    self._judge(case)

    def stop(self) -> None:
        """Make `judge_until_stopped` return."""
        self._stopped.set()

    def close(self) -> None:
        """Stop listening."""
        self.stop()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for opened in self._splits.values():
            opened.close()

    def health(self) -> dict[str, Any]:
        """What is served."""
        return {"environments": dict(self._splits["train"].sizes)}

    def problems(self, env: str, split: str) -> dict[str, Any]:
        """The problems of one environment. Raises _RefusedError for a name that is none."""
        if split not in self._splits:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"split {split!r:.40} is not train or eval")
        opened = self._splits[split]
        if env not in opened.sizes:
            menu = ", ".join(opened.sizes)
            raise _RefusedError(
                HTTPStatus.NOT_FOUND, f"no environment {env!r:.40}; there are {menu}"
            )
        return {"problems": [described(each) for each in opened.problems if each.task == env]}

    def verdict(self, env: str, problem_id: str, completion: str) -> dict[str, Any]:
        """What an answer is worth. Raises _RefusedError when that cannot be said."""
        if (env, problem_id) not in self._known:
            raise _RefusedError(
                HTTPStatus.NOT_FOUND, f"no problem {problem_id!r:.40} in {env!r:.40}"
            )
        problem, judge = self._known[env, problem_id]
        case = _Case(judge, problem, completion, Future())
        try:
            self._cases.put_nowait(case)
            return {"reward": case.verdict.result(JUDGE_SECONDS)}
        except (queue.Full, FutureTimeoutError):
            case.verdict.cancel()
            raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "busy") from None
        except PeraltaError as error:
            raise _RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None

    def _judge(self, case: _Case) -> None:
        try:
            case.verdict.set_result(case.judge(case.problem, case.completion))
        except PeraltaError as error:
            case.verdict.set_exception(error)


def _log_error(request: object, client_address: object) -> None:
    """A client that went away is no news."""
    logger.debug("request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENT_SECONDS
    verifier: Verifier
    password: str | None

    def do_GET(self) -> None:
        """Health and problems."""
        asked = urlsplit(self.path)
        chosen = {name: values[0] for name, values in parse_qs(asked.query).items()}

        def answer() -> dict[str, Any]:
            if asked.path == "/health":
                return self.verifier.health()
            if asked.path == "/problems":
                return self.verifier.problems(chosen.get("env", ""), chosen.get("split", "train"))
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there are /health and /problems")

        self._answer(answer)

    def do_POST(self) -> None:
        """Verdicts."""

        def answer() -> dict[str, Any]:
            if self.path != "/verify_answer":
                raise _RefusedError(HTTPStatus.NOT_FOUND, "there is /verify_answer")
            asked = self._body()
            return self.verifier.verdict(
                *(_text(asked, name) for name in ("env", "problem", "completion"))
            )

        self._answer(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Not one line per request."""

    def _answer(self, answer: Callable[[], dict[str, Any]]) -> None:
        try:
            if not self._may_enter():
                raise _RefusedError(
                    HTTPStatus.UNAUTHORIZED, "it wants the password in verifier.token_file"
                )
            status, said = HTTPStatus.OK, answer()
        except _RefusedError as refused:
            status, said = refused.status, {"error": str(refused)}
            self.close_connection = True  # what follows may be the rest of a body
        content = json.dumps(said).encode()
        with suppress(ConnectionError, TimeoutError):  # it comes again
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def _may_enter(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.password is None or hmac.compare_digest(
            given.encode("utf-8", "replace"), self.password.encode()
        )

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10):
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        if int(length) > MAX_REQUEST:
            raise _RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MAX_REQUEST} bytes"
            )
        try:
            asked = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "not JSON") from None
        if not isinstance(asked, dict):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "not a JSON object")
        return cast("dict[str, Any]", asked)


def _text(asked: dict[str, Any], name: str) -> str:
    if not isinstance(value := asked.get(name), str):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"{name} is missing, or no text")
    return value
