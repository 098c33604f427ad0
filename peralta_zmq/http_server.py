"""Base of two HTTP servers: the trainer's weight server and the verifier.

Generators on other machines fetch published weights from the weight server, and problems and
rewards from the verifier. A server that other machines can reach must have a password (token),
which clients send in each request as a bearer token. Each connection has a daemon thread, which
closes the connection when it is idle for IDLE_TIMEOUT_SECONDS. Connections without an authorized
request are limited in number and time, so that a client without the password cannot exhaust
threads or memory.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from peralta_zmq.errors import ConfigError

IDLE_TIMEOUT_SECONDS = 60.0  # without a request, or while the client does not read the response
MAX_UNAUTHORIZED = 64  # connections without an authorized request; one more closes the oldest
FIRST_REQUEST_SECONDS = 10.0  # a connection without an authorized request is closed after this time
MAX_HEADER_BYTES = 16384  # all header lines of a request
MIN_TOKEN = 16  # characters of a password
STOP_POLL_SECONDS = 0.1  # between two checks for `close` and for connections past their deadline
logger = logging.getLogger(__name__)


class RequestHandler(BaseHTTPRequestHandler):
    """Base class of request handlers; subclasses implement do_GET or do_POST.

    Subclasses must call `is_authorized` before they answer; otherwise the connection is closed
    after FIRST_REQUEST_SECONDS.
    """

    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_SECONDS
    token: str | None = None  # set by HttpServer; None = no password is needed

    def is_authorized(self) -> bool:
        """Whether the request has the password, or no password is needed."""
        sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
        is_authorized = self.token is None or hmac.compare_digest(
            sent.encode("utf-8", "replace"), self.token.encode()
        )
        if is_authorized:
            assert isinstance(self.server, _Server)
            self.server.unauthorized.pop(self.request, None)
        return is_authorized

    def parse_request(self) -> bool:
        """Override: read at most MAX_HEADER_BYTES of header lines."""
        stream = self.rfile
        self.rfile = _HeaderReader(stream)
        try:
            return super().parse_request()
        finally:
            self.rfile = stream

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

    `port_setting` is the name of the setting for the port, such as "weights.serve_port"; error
    messages name it, and the setting token_file of its section. `attributes` become class
    attributes of the handler. Raises ConfigError if the port is in use, or if other machines can
    reach it and `token` is None.
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
            self._server = _Server((host, port), configured_handler)
        except OSError as error:
            raise ConfigError(
                f"{port_setting} {port} cannot be used ({error.strerror}); choose another"
            ) from None
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


class _Server(ThreadingHTTPServer):
    """Closes connections that send no authorized request in time, and the oldest of too many.

    `unauthorized` has these connections, oldest first, with their deadlines in monotonic seconds.
    """

    def __init__(self, address: tuple[str, int], handler: type[RequestHandler]) -> None:
        self.unauthorized: dict[Any, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Override: called for a new connection."""
        self.unauthorized[request] = time.monotonic() + FIRST_REQUEST_SECONDS
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Override: called after each new connection, and every STOP_POLL_SECONDS."""
        unauthorized, now = self.unauthorized.copy(), time.monotonic()
        num_excess = len(unauthorized) - MAX_UNAUTHORIZED
        for index, (request, end) in enumerate(unauthorized.items()):
            if index < num_excess or end < now:
                with suppress(OSError):  # closed meanwhile
                    request.shutdown(socket.SHUT_RDWR)  # ends its thread

    def shutdown_request(self, request: Any) -> None:
        """Override: called at the end of a connection."""
        self.unauthorized.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Override: log at debug level only, because clients may disconnect at any time."""
        logger.debug("request failed client=%s", client_address, exc_info=True)


class _HeaderReader(BufferedIOBase):
    """Reads the header lines of a request from a stream."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream, self._num_left = stream, MAX_HEADER_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line. Raises HTTPException above MAX_HEADER_BYTES in total."""
        line = self._stream.readline(self._num_left + 1)
        self._num_left -= len(line)
        if self._num_left < 0:
            raise HTTPException(f"more than {MAX_HEADER_BYTES} bytes")
        return line


def is_loopback(host: str) -> bool:
    """Whether a server on `host` is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a host name, a network interface, or *
        return False


def read_private_token(file: str | None, *, option: str = "weights.token_file") -> str | None:
    """The password in `file`; None without a file. `option` is the setting that names the file.

    Raises ConfigError if other users may read the file, or the password is shorter than MIN_TOKEN.
    """
    if file is None:
        return None
    path = Path(file).expanduser()
    try:
        mode, token = path.stat().st_mode & 0o777, path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} cannot be read ({error})") from None
    if mode & 0o077:
        raise ConfigError(f"{option} {path} may be read by others; chmod 600 {path}")
    if len(token) < MIN_TOKEN or not token.isascii():
        raise ConfigError(
            f"{option} {path} holds a weak password; make one: openssl rand -hex 32 > {path}"
        )
    return token
