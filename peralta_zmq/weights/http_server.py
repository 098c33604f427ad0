"""The trainer's weights folder over HTTP, read-only, for machines that share no folder.

Knows files and HTTP; knows nothing of weights. What it serves is checked by its hashes, so no
encryption is needed for integrity; a password keeps strangers out.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import shutil
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from peralta_zmq.atomic_files import CHUNK, PLAIN_NAME
from peralta_zmq.errors import ConfigError
from peralta_zmq.weights.local_backend import LocalBackend
from peralta_zmq.weights.version import IDENTITY, NAME

logger = logging.getLogger(__name__)
RANGE = re.compile(r"bytes=(\d{1,18})-")
SILENT_SECONDS = 60.0  # a client that neither asks nor takes for so long is dropped
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class WeightServer:
    """Owns the port and the threads. Use with `closing`.

    Raises ConfigError when the port is taken, or strangers could reach it without a password.
    """

    def __init__(self, folder: Path, *, host: str, port: int, token: str | None) -> None:
        if token is None and host not in LOOPBACK:
            raise ConfigError(
                f"weights.serve_port {port} would show the weights to whoever reaches {host}; "
                "set weights.token_file on every machine"
            )
        served = LocalBackend(folder)

        class Handler(_Handler):
            place, password = served, token

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"weights.serve_port {port} cannot be used ({error.strerror}); choose another"
            ) from None
        self._server.daemon_threads = True
        self._server.handle_error = _log_error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; transfers under way break off."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _log_error(request: object, client_address: object) -> None:
    """A reader that went away is no news for the trainer's terminal."""
    logger.debug("request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENT_SECONDS
    place: LocalBackend
    password: str | None

    def do_GET(self) -> None:
        """/ lists the versions; /RUN.json and /step_N/FILE are files, from a byte on if asked."""
        if not self._may_enter():
            self._answer(HTTPStatus.UNAUTHORIZED)
            return
        parts = self.path.strip("/").split("/")
        try:
            if parts == [""]:
                names = sorted(name for name in self.place.names() if NAME.fullmatch(name))
                self._answer(HTTPStatus.OK, json.dumps(names).encode())
            elif parts == [IDENTITY]:
                self._send_file(self.place.folder / IDENTITY)
            elif len(parts) == 2 and NAME.fullmatch(parts[0]) and PLAIN_NAME.fullmatch(parts[1]):
                with self.place.reading(parts[0]):
                    self._send_file(self.place.folder / parts[0] / parts[1])
            else:
                self._answer(HTTPStatus.NOT_FOUND)
        except FileNotFoundError:
            self._answer(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: Any) -> None:
        """Not one line per request."""

    def _may_enter(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.password is None or hmac.compare_digest(
            given.encode("utf-8", "replace"), self.password.encode()
        )

    def _send_file(self, path: Path) -> None:
        asked = RANGE.fullmatch(self.headers.get("Range", ""))
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = min(int(asked[1]), size) if asked else 0
            self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{max(start, size - 1)}/{size}")
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            file.seek(start)
            try:
                shutil.copyfileobj(file, self.wfile, CHUNK)
            except (ConnectionError, TimeoutError):  # the reader comes again
                self.close_connection = True

    def _answer(self, status: HTTPStatus, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
