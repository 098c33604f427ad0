"""HTTP servers of ASGI applications: uvicorn with limits for each connection.

The dashboard and the chat server of a generator use it. It needs the packages of the extra
"dashboard".
"""

from __future__ import annotations

import asyncio
import math
from operator import attrgetter
from typing import cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from peralta_zmq.http_server import IDLE_TIMEOUT_SECONDS

MAX_CONNECTIONS = 64  # each needs a file descriptor; a process has a limited number
FIRST_REQUEST_SECONDS = 5.0  # for the header of a request, the first one or a further one


class Connection(H11Protocol):
    """Connection that closes if its client is slow, or the slowest of too many.

    The server waits for the client until a request is complete, and while a response is not read.
    """

    waits_since = math.inf  # seconds of the loop's clock; infinite while it does not wait
    _limit = 0.0  # seconds for which it may wait; 0 while it does not wait
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Override: limit the number of connections."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that writing is paused until all is sent
        self._limit_wait()
        if len(self.connections) > MAX_CONNECTIONS:
            longest = min(cast("set[Connection]", self.connections), key=attrgetter("waits_since"))
            self.connections.discard(longest)  # connection_lost is called later
            longest.transport.abort()

    def handle_events(self) -> None:
        """Override: called with each received part, and after a response."""
        super().handle_events()
        self._limit_wait()

    def pause_writing(self) -> None:
        """Override: called when a part of a response waits for the client."""
        super().pause_writing()
        self._limit_wait()

    def resume_writing(self) -> None:
        """Override: called when the client has been sent all parts."""
        super().resume_writing()
        self._limit_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Override: a timer would keep the connection, with what it has received, in memory."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _limit_wait(self) -> None:
        """Close the connection later if the server now waits for another thing than before."""
        limit = 0.0
        if self.flow.write_paused or self.conn.their_state is h11.SEND_BODY:
            limit = IDLE_TIMEOUT_SECONDS
        elif self.conn.their_state is h11.IDLE:
            limit = FIRST_REQUEST_SECONDS
        if limit == self._limit:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._limit = limit
        self.waits_since = self.loop.time() if limit else math.inf
        self._timer = self.loop.call_later(limit, self.transport.abort) if limit else None


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
