"""Base of two HTTP servers, the trainer's weight server and the verifier; and what all share.

Generators on other machines fetch published weights from the weight server, and problems and
rewards from the verifier. A server that other machines can reach must have a password (token),
which clients send in each request as a bearer token. Each connection has a daemon thread.
Connections without an authorized request in progress are limited in number and time, so that no
client can exhaust threads or memory. The base of the others is observe/asgi_server.py.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import re
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
from urllib.parse import urlsplit

from peralta_zmq.errors import NO_MODES, ConfigError

IDLE_TIMEOUT_SECONDS = 60.0  # for a further request, for a body, or until a response is read
MAX_UNAUTHORIZED = 64  # connections without an authorized request; one more closes the oldest
FIRST_REQUEST_SECONDS = 10.0  # for the first authorized request of a connection
MAX_HEADER_BYTES = 16384  # all header lines of a request
MIN_TOKEN = 16  # characters of a password
HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
STOP_POLL_SECONDS = 0.1  # between two checks for `close` and for connections past their deadline
FOREIGN_HOST = "the Host header is not a name of this machine; use 127.0.0.1 or set a token_file"
logger = logging.getLogger(__name__)


class RequestHandler(BaseHTTPRequestHandler):
    """Base class of request handlers; subclasses implement do_GET or do_POST.

    Subclasses must call `is_authorized` before they answer; otherwise the connection is closed
    after FIRST_REQUEST_SECONDS.
    """

    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_SECONDS
    token: str | None = None  # set by HttpServer; None = no password is needed
    server: Any  # a _Server

    def handle_one_request(self) -> None:
        """Override: limit the wait for a request after an authorized one."""
        deadline = time.monotonic() + IDLE_TIMEOUT_SECONDS
        self.server.unauthorized.setdefault(self.request, deadline)
        super().handle_one_request()

    def is_authorized(self) -> bool:
        """Whether the request may be answered (see `may_answer`)."""
        is_authorized = may_answer(self.headers, token=self.token)
        if is_authorized:
            self.server.unauthorized.pop(self.request, None)
        return is_authorized

    def read_body(self, num_bytes: int) -> bytes:
        """The body of an authorized request; incomplete if the client sends it too slowly."""
        self.server.unauthorized[self.request] = time.monotonic() + IDLE_TIMEOUT_SECONDS
        body = self.rfile.read(num_bytes)
        self.server.unauthorized.pop(self.request, None)
        return body

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

    `settings` are the names of the settings for host and port, such as "verifier.host" and
    "verifier.port"; error messages name them, and token_file of the port's section. `attributes`
    become class attributes of the handler. Raises ConfigError if `host` is no address of this
    machine or the port is in use, or if other machines can reach it and `token` is None.
    """

    def __init__(
        self,
        handler: type[RequestHandler],
        *,
        host: str,
        port: int,
        token: str | None,
        settings: tuple[str, str],
        **attributes: object,
    ) -> None:
        host_setting, port_setting = settings
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"{port_setting} {port} on {host} is open to other machines without a password; "
                f"set {port_setting.partition('.')[0]}.token_file on every machine"
            )
        configured_handler = type("Handler", (handler,), {**attributes, "token": token})
        try:
            listening = listen(host, port, host_setting=host_setting)
        except OSError as error:
            raise ConfigError(
                f"{port_setting} {port} cannot be used ({error.strerror}); choose another"
            ) from None
        self._server = _Server(listening, configured_handler)
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

    `unauthorized` has the connections without an authorized request in progress, with their
    deadlines in monotonic seconds, in the order in which they began to wait.
    """

    def __init__(self, listening: socket.socket, handler: type[RequestHandler]) -> None:
        self.unauthorized: dict[Any, float] = {}
        super().__init__(listening.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening

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


def may_answer(headers: Any, *passwords: str, token: str | None) -> bool:
    """Whether a request with these headers may be answered.

    With a token, the request must have it, as a bearer token or in `passwords`. Without one, Host
    must be a loopback name. This prevents DNS rebinding: a malicious web page in the user's browser
    could make its own domain name resolve to this machine, and then read the responses. It cannot
    know a token, so that with one any name is allowed: of a router, a VPN, a container or a proxy.
    """
    if token is None:
        host = str(headers.get("Host", ""))
        name = host.partition("]")[0] if "[" in host else host.partition(":")[0]
        return is_loopback(name.lower().removesuffix("."))
    scheme, _, bearer = str(headers.get("Authorization", "")).partition(" ")
    sent = (*passwords, bearer.strip() if scheme.lower() == "bearer" else scheme)
    return any(
        hmac.compare_digest(each.encode("utf-8", "replace"), token.encode()) for each in sent
    )


def listen(host: str, port: int, *, host_setting: str) -> socket.socket:
    """A listening socket on an address (IPv4 or IPv6) or name of this machine.

    Raises OSError if the port is in use, and ConfigError that names `host_setting` otherwise.
    """
    name = host.strip("[]")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    dualstack = ":" in name and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((name, port), family=family, dualstack_ipv6=dualstack)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"{host_setting} {host}, port {port} cannot be used ({error}); choose another"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether a server on `host` is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a host name, a network interface, or *
        return False


def host_of(text: str) -> str:
    """A host name or IP address, without the brackets of IPv6. Raises ValueError if it is none."""
    host = "0.0.0.0" if text == "*" else re.sub(r"^\[(.*)\]$", r"\1", text)
    with suppress(ValueError):
        return f"{ipaddress.ip_address(host)}"
    if not HOST_NAME.fullmatch(host):
        raise ValueError("should be only the name (in ASCII) or the IP address of a machine")
    return host


def with_port(host: str, port: int) -> str:
    """HOST:PORT of a URL, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str, *, option: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of http://HOST:PORT; HOST of IPv6 is [::1].

    Raises ConfigError for another form. `option` is the name of the setting, for the error message.
    """
    with suppress(ValueError):
        parts = urlsplit(address)
        host, port = host_of(parts.hostname or ""), parts.port or default_port
        if parts.scheme == "http" and port and not (parts.path.strip("/") or parts.query):
            return host, port
    raise ConfigError(f"{option} '{address}' is not of the form http://HOST:PORT")


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
        raise ConfigError(f"{option} {path} may be read by others; chmod 600 {path}, {NO_MODES}")
    if len(token) < MIN_TOKEN or not token.isascii():
        raise ConfigError(
            f"{option} {path} holds a weak password; make one: openssl rand -hex 32 > {path}"
        )
    return token
