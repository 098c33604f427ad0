"""A verifier on a free port of this machine, and its client."""

from __future__ import annotations

import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from peralta_zmq.config import Config
from peralta_zmq.environments.verifier_client import RemoteEnvironment
from peralta_zmq.environments.verifier_service import Verifier
from peralta_zmq.rollout import Message, Problem

PROBLEM = Problem("1", "x", (Message("user", "?"),), "1")


def serving(config: Config, *, token: str | None = None) -> closing[Verifier]:
    return closing(Verifier(config, host="127.0.0.1", port=0, token=token))


class FixedResponse:
    """A server that responds to all requests with `content`. Use with `with`.

    Content that begins with HTTP/ is the whole response.
    """

    def __init__(self, content: bytes) -> None:
        self.num_requests = 0
        this = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                this.num_requests += 1
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if not content.startswith(b"HTTP/"):
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> FixedResponse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def remote(*verifiers: Verifier, env: str = "calculator", **options: Any) -> RemoteEnvironment:
    return remote_at(*(verifier.port for verifier in verifiers), env=env, **options)


def remote_at(*ports: int, env: str = "calculator", **options: Any) -> RemoteEnvironment:
    return RemoteEnvironment([("127.0.0.1", port) for port in ports], env=env, **options)


def reward_of(environment: RemoteEnvironment, problem: Problem, text: str) -> Any:
    (score,) = environment.score(problem, [text], [()]).result()
    return score.reward
