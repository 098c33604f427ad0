"""HTTP servers of ASGI applications: uvicorn with limits, and a check of the Host header.

The dashboard and the chat server of a generator use it. It needs the packages of the extra
"dashboard".
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from peralta_zmq.http_server import is_loopback

MAX_CONNECTIONS = 64  # each needs a file descriptor; a process has a limited number
FIRST_REQUEST_SECONDS = 5.0  # a connection without a request is closed after this time


class Connection(H11Protocol):
    """Connection that closes if too many are open or its first request is late."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Override: limit the number of connections and the wait for the first request."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self.loop.call_later(FIRST_REQUEST_SECONDS, self._close_without_request)

    def _close_without_request(self) -> None:
        if not self.cycle:  # None before the first request
            self.transport.abort()


def make_server(app: ASGIApp) -> uvicorn.Server:
    """A server of `app`, to be run with listening sockets."""
    config = uvicorn.Config(
        app,
        # By default, uvicorn would use other packages, if installed, for `loop` and `ws`.
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # any client could fill the log with messages of lower levels
        # asyncio may accept this number at once, before connection_made can close any.
        backlog=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def names_this_machine(header: str, *, bound: str, has_token: bool) -> bool:
    """True if `header`, a Host header, names this machine, not a domain of a web page.

    Checking it prevents DNS rebinding: a malicious web page in the user's browser could make its
    own domain name resolve to this machine, and then read the responses. If the server is reachable
    from other machines, through the address `bound` and with a token, any IP address is allowed,
    because DNS rebinding needs a domain name.
    """
    name = header.partition("]")[0].strip("[") if "[" in header else header.partition(":")[0]
    name = name.lower().removesuffix(".")
    if is_loopback(bound) or not has_token:
        return is_loopback(name)
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        hostname = socket.gethostname().lower()
        return name in {"localhost", bound.lower(), hostname, f"{hostname}.local"}
