"""HTTP server in a thread: access control, and limits for each connection (starlette, uvicorn).

A server that other machines can reach must have a password (token), which clients send with each
request as a bearer token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from peralta_zmq.addresses import is_loopback, listen
from peralta_zmq.errors import ConfigError

Refuse: TypeAlias = Callable[[Request, HTTPException], Response]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server, so that no client can exhaust its memory or descriptors.

    A connection waits until its client has sent a whole request, or while the client does not read
    the response.
    """

    header_bytes: int = 16384  # all header lines of a request
    max_waiting: int = 64  # one more closes the connection that has waited longest
    header_seconds: float = 10.0  # time limit of the header of a request
    idle_seconds: float = 60.0  # time limit of a body, and of reading a part of a response


def plain_text(request: Request, error: HTTPException) -> Response:
    return PlainTextResponse(error.detail, error.status_code, error.headers)


class HttpServer:
    """Serves `routes` on a listening socket. Use with `closing`, after `start`.

    `token_setting` names the setting of the password `token` (None = no password is needed).
    `refuse` makes the response to a request that is refused or fails. With `has_login`, a browser
    can send the password once, as ?token=. `headers` are those of every response.
    """

    def __init__(
        self,
        name: str,
        routes: Sequence[BaseRoute],
        *,
        listening: socket.socket,
        token: str | None,
        token_setting: str,
        refuse: Refuse = plain_text,
        has_login: bool = False,
        headers: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self.port = int(listening.getsockname()[1])
        self._name = name
        self._socket = listening
        self._refuse = refuse
        self._logged = set[str]()  # types of exceptions
        app = Starlette(
            routes=routes,
            exception_handlers={HTTPException: self._refuse_request, Exception: self._fail},
        )
        config = uvicorn.Config(
            AccessControl(app, token, token_setting, refuse, has_login),
            # By default, uvicorn would use other packages, if installed, for `loop` and `ws`.
            loop="asyncio",
            http=type("LimitedConnection", (Connection,), {"limits": limits}),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # any client could fill the log with messages of lower levels
            # asyncio may accept this number at once, before connection_made can close any.
            backlog=64,
            headers=list((headers or {}).items()),
            timeout_graceful_shutdown=1,
            timeout_keep_alive=3600,  # `Connection` closes idle connections earlier
            h11_max_incomplete_event_size=limits.header_bytes,
        )
        self._server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Serve in a daemon thread; an exception is logged and ends only this thread."""
        self.thread.start()

    def run(self) -> None:
        self._server.run(sockets=[self._socket])

    def close(self) -> None:
        """Stop serving; requests in progress may end within a second."""
        self._server.should_exit = True
        if self.thread.is_alive():
            self.thread.join(2.0)
        self._socket.close()

    def _serve(self) -> None:
        try:
            if not self._server.should_exit:
                self.run()
        except Exception as error:  # noqa: BLE001 - must not affect the other threads
            logger.warning("%s stopped, this process continues (%.300r)", self._name, error)

    async def _refuse_request(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return self._refuse(request, error)

    async def _fail(self, request: Request, error: Exception) -> Response:
        """Log each type of exception once, because clients repeat requests."""
        kind = type(error).__name__
        if kind not in self._logged and not isinstance(error, ClientDisconnect):
            self._logged.add(kind)
            path = request.scope["path"]
            logger.warning("%s request failed at %.100s (%.300r)", self._name, path, error)
        reason = f"internal error; see the log of the {self._name} process"
        return self._refuse(request, HTTPException(500, reason))


@dataclass(frozen=True)
class AccessControl:
    """ASGI middleware: refuses requests without the token, or without one foreign Host headers."""

    app: ASGIApp
    token: str | None
    token_setting: str
    refuse: Refuse
    has_login: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await (self._response(Request(scope)) or self.app)(scope, receive, send)

    def _response(self, request: Request) -> Response | None:
        """The response if the application is not to be called."""
        cookie = ""
        reason = f"wrong or missing password; use the one in {self.token_setting}"
        if self.has_login and self.token:
            # Browsers send a cookie to all ports of a host, and each may have another server.
            name = f"peralta_token_{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"
            if _is_equal(request.query_params.get("token", ""), self.token):
                # The token leaves the address bar. "lax" also sends it from links on other sites.
                response = RedirectResponse(request.scope["path"], 303)
                response.set_cookie(name, self.token, httponly=True, samesite="lax")
                return response
            cookie = request.cookies.get(name, "")
            reason += "; a browser can open /?token=PASSWORD"
        if may_answer(request.headers, cookie, token=self.token):
            request.scope["is_authorized"] = True
            return None
        if self.token is None:
            reason = (
                "the Host header is not a name of this machine; use 127.0.0.1 or set a token_file"
            )
            return self.refuse(request, HTTPException(400, reason))
        return self.refuse(request, HTTPException(401, reason))


def may_answer(headers: Mapping[str, str], *passwords: str, token: str | None) -> bool:
    """Whether a request has the token, as a bearer token or in `passwords`.

    Without a token, Host must be a loopback name. This prevents DNS rebinding: a malicious web page
    could make its own domain name resolve to this machine, and then read the responses.
    """
    if token is None:
        host = headers.get("host", "")
        name = host.partition("]")[0] if "[" in host else host.partition(":")[0]
        return is_loopback(name.lower().removesuffix("."))
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent = (*passwords, bearer.strip() if scheme.lower() == "bearer" else scheme)
    return any(_is_equal(password, token) for password in sent)


def _is_equal(password: str, token: str) -> bool:
    return hmac.compare_digest(password.encode("utf-8", "replace"), token.encode())


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The body of a request. Raises HTTPException if it is longer, if possible before reading."""
    content = bytearray()
    if int(request.headers.get("content-length", 0)) <= max_bytes:
        async for part in request.stream():
            content += part
            if len(content) > max_bytes:
                break
        else:
            return bytes(content)
    raise HTTPException(413, f"the body is longer than {max_bytes} bytes")


class Connection(H11Protocol):
    """Connection that closes if its client is slow, or the slowest of too many."""

    limits = Limits()
    waits_since = math.inf  # seconds of the loop's clock; infinite while it does not wait
    _limit = 0.0  # seconds for which it may wait; 0 while it does not wait
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Override: limit the number of waiting connections."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that writing is paused until all is sent
        self._limit_wait()
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection) and connection.waits_since < math.inf
        ]
        if len(waiting) > self.limits.max_waiting:
            longest = min(waiting, key=attrgetter("waits_since"))
            self.connections.discard(longest)  # connection_lost is called later
            longest.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        self._limit_wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Override: the timer would keep the connection in memory."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _limit_wait(self) -> None:
        """Start the time limit of what the server now waits for, if it has changed."""
        limit = 0.0
        if self.flow.write_paused or self.conn.their_state is h11.SEND_BODY:
            limit = self.limits.idle_seconds
        elif self.conn.their_state is h11.IDLE:
            limit = self.limits.header_seconds
        if limit == self._limit:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._limit = limit
        self._timer = self.loop.call_later(limit, self.transport.abort) if limit else None
        # An authorized client that reads a long response does not make room for a new one.
        is_reading = self.flow.write_paused and bool((self.scope or {}).get("is_authorized"))
        self.waits_since = self.loop.time() if limit and not is_reading else math.inf


def open_port(
    host: str, port: int, *, token: str | None, settings: tuple[str, str], num_ports: int = 1
) -> socket.socket:
    """A listening socket on the first free one of `num_ports` ports.

    Raises ConfigError that names a setting of `settings`, (host, port), also if other machines can
    reach `host` without a password.
    """
    host_setting, port_setting = settings
    if token is None and not is_loopback(host):
        section = port_setting.partition(".")[0]
        owner = section if section in ("dashboard", "generator") else "security"
        raise ConfigError(
            f"{port_setting}: a server on {host} is open to other machines without a password; set "
            f"{owner}.token_file to a file of mode 0600 with one"
        )
    last = min(port + num_ports - 1, 65_535)
    for candidate in range(port, last + 1):
        with suppress(OSError):  # in use
            return listen(host, candidate, host_setting=host_setting)
    ports = f"{port} to {last}" if last > port else port
    raise ConfigError(f"{port_setting} {ports} cannot be used; choose a free one")
