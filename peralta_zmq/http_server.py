"""HTTP server base of the trainer's weight server and of the verifier.

Generators on other machines fetch published weights from the weight server, and problems and
rewards from the verifier. Each connection has a daemon thread, which closes the connection when it
is idle for IDLE_TIMEOUT_SECONDS. A server that other machines can reach must have a password, the
token, which clients send in each request as a bearer token.
"""

from __future__ import annotations

import hmac
import logging
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from peralta_zmq.atomic_files import is_loopback
from peralta_zmq.errors import ConfigError

IDLE_TIMEOUT_SECONDS = 60.0  # without a request, or while the client does not read the response
STOP_POLL_SECONDS = 0.1  # between two checks whether `close` was called
logger = logging.getLogger(__name__)


class RequestHandler(BaseHTTPRequestHandler):
    """Base class of request handlers; subclasses implement do_GET or do_POST.

    Subclasses must call `is_authorized` before they answer.
    """

    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_SECONDS
    token: str | None = None  # set by HttpServer; None = no password is needed

    def is_authorized(self) -> bool:
        """Whether the request has the password, or no password is needed."""
        sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.token is None or hmac.compare_digest(
            sent.encode("utf-8", "replace"), self.token.encode()
        )

    def respond(
        self, status: HTTPStatus, content: bytes = b"", *, content_type: str = "text/plain"
    ) -> None:
        """Send a complete response."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Override: do not print a line for every request."""


class HttpServer:
    """Serves requests in background threads. Use with `contextlib.closing`.

    `port_setting` is the setting of `port`, as SECTION.NAME; error messages name it and the setting
    SECTION.token_file. `attributes` become class attributes of the handler.
    Raises ConfigError if the port is in use, or if other machines can reach it and `token` is None.
    """

    def __init__(
        self,
        handler: type[RequestHandler],
        *,
        host: str,
        port: int,
        token: str | None,
        port_setting: str,
        **attributes: object,
    ) -> None:
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"{port_setting} {port} on {host} is open to other machines without a password; "
                f"set {port_setting.partition('.')[0]}.token_file on every machine"
            )
        configured_handler = type("Handler", (handler,), {**attributes, "token": token})
        try:
            self._server = ThreadingHTTPServer((host, port), configured_handler)
        except OSError as error:
            raise ConfigError(
                f"{port_setting} {port} cannot be used ({error.strerror}); choose another"
            ) from None
        self._server.handle_error = _log_error
        self.port = int(self._server.server_address[1])  # the assigned port if `port` is 0
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_SECONDS,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the daemon threads of open connections end with the process."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _log_error(request: object, client_address: object) -> None:
    """Log an exception of a handler, at debug level only: clients may disconnect at any time."""
    logger.debug("request failed client=%s", client_address, exc_info=True)
