"""The thread or the process that answers. The one door to uvicorn.

Knows ports and threads; knows nothing of runs. The libraries are imported where they are needed:
by a trainer only in the thread, beside its work.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from peralta_zmq.errors import ConfigError

if TYPE_CHECKING:
    from uvicorn import Server

NUM_PORTS = 20  # tried from the wanted one on
LAST_PORT = 65_535
EVERYWHERE = ("0.0.0.0", "::")  # to listen on; no browser elsewhere could open them
WAYS_ON = "pip install 'peralta_zmq[dashboard]'"
logger = logging.getLogger(__name__)


class Dashboard:
    """The page of `folders`, listening from the first moment. Use with `closing`.

    Raises ConfigError when its packages are missing, no port can be had, or strangers could reach
    it without a token.
    """

    def __init__(
        self, folders: Sequence[Path], *, host: str, port: int, token: str | None = None,
        live: bool = False,
    ) -> None:  # fmt: skip
        if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
            raise ConfigError(f"the page needs starlette and uvicorn; {WAYS_ON}")
        self._is_open = not is_loopback(host)  # to other machines
        if self._is_open and token is None:
            raise ConfigError(
                f"dashboard.host {host} would show this run to whoever reaches it; set "
                "dashboard.token_file (--token-file) to a file of mode 0600 with a password"
            )
        self._folders, self._host, self._token, self._live = folders, host, token, live
        self._socket = _listening(host, port)
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wanted, self.port = port, int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """Where a browser finds the page: the machine's name when it listens everywhere."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        if self._host in EVERYWHERE:
            host = socket.gethostname()
        return f"http://{host}:{self.port}"

    @property
    def greeting(self) -> list[str]:
        """Where the page is, and what is to be known about that; lines for a person."""
        moved = self._wanted not in (0, self.port)
        lines = [f"page: {self.address}{f' (port {self._wanted} is taken)' if moved else ''}"]
        if self._is_open:
            lines.append(
                "warning: other machines reach the page, without encryption, by the token: "
                f"{self.address}/?token=..."
            )
        return lines

    def start(self) -> None:
        """Answer in a daemon thread; what goes wrong there is logged and ends there."""
        thread = threading.Thread(target=self._answer, name="dashboard", daemon=True)
        thread.start()
        self._thread = thread  # one that could not start is none

    def run(self) -> None:
        """Answer in this thread, until a signal."""
        self._made().run(sockets=[self._socket])

    def close(self) -> None:
        """Stop answering; does not wait for those who still ask."""
        self._closed = True
        if self._server:
            self._server.should_exit = True
        if self._thread:
            self._thread.join(1.0)
        self._socket.close()

    def _answer(self) -> None:
        try:
            server = self._made()
            if not self._closed:
                server.run(sockets=[self._socket])
        except Exception as error:  # noqa: BLE001 - the trainer beside us goes on, whatever it is
            logger.warning("the page is gone (%.300r); training goes on", error)

    def _made(self) -> Server:
        import uvicorn

        from peralta_zmq.observe.dashboard.app import make_app
        from peralta_zmq.observe.dashboard.run_files import open_runs

        runs = open_runs(self._folders, live=self._live)
        config = uvicorn.Config(
            make_app(runs, host=self._host, token=self._token),
            loop="asyncio", http="h11", ws="none", lifespan="off",
            log_config=None, log_level="critical",  # anyone could fill a console with the rest
            access_log=False, server_header=False, date_header=False,
            limit_concurrency=64, timeout_keep_alive=5, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        return self._server


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _listening(host: str, port: int) -> socket.socket:
    """A socket on `port`, or on the next one that is free."""
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"port {port} of the page is none; choose one from 1 to {LAST_PORT}")
    last = min(port + NUM_PORTS - 1, LAST_PORT)
    for candidate in range(port, last + 1) if port else [0]:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = socket.socket(kind, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, candidate))
            found.listen(64)
            return found
        except (OSError, UnicodeError) as error:
            found.close()
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                raise ConfigError(
                    f"dashboard.host {host}, port {candidate} cannot be used ({error}); "
                    "choose another"
                ) from None
    raise ConfigError(f"dashboard.port {port} to {last} are all taken; choose another")
