"""A slow TCP link between a weight server and its clients, simulated by a proxy in threads."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from typing import cast


class Link(socketserver.ThreadingTCPServer):
    """A TCP proxy with a rate, a delay in seconds, and connections that break after some bytes."""

    daemon_threads = True

    def __init__(
        self, target: int, *, mbit_per_s: float = 1e6, delay: float = 0.0, breaks_after: int = 0
    ) -> None:
        self.target, self.delay = target, delay
        self.bytes_per_second, self.breaks_after = mbit_per_s * 1e6 / 8, breaks_after
        super().__init__(("127.0.0.1", 0), _Forward)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Forward(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # no server at the target port
            self._forward(cast(Link, self.server))

    def _forward(self, link: Link) -> None:
        sent = 0
        with socket.create_connection(("127.0.0.1", link.target)) as upstream:
            upstream.sendall(self.request.recv(1 << 16))
            time.sleep(link.delay)  # one round trip
            started = time.monotonic()
            while chunk := upstream.recv(1 << 14):
                try:
                    self.request.sendall(chunk)
                except OSError:
                    return
                sent += len(chunk)
                if link.breaks_after and sent >= link.breaks_after:
                    self.request.shutdown(socket.SHUT_RDWR)
                    return
                ahead = started + sent / link.bytes_per_second - time.monotonic()
                time.sleep(max(0.0, ahead))
