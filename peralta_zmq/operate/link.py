"""A TCP link that can be cut: between a generator and its trainer, for tests of what follows.

Knows sockets and bytes; knows nothing of what passes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

PIECE = 1 << 14  # bytes passed on at a time
KERNEL_BUFFER = 16 << 10  # bytes; larger ones would hide the sender's backpressure


class Link:
    """Passes bytes from a free local port to `port` of this machine. Use with `with`.

    While it is cut nothing passes and nobody is told, as with a cable pulled out; bytes already
    taken in are passed on when it is mended. `break_connections` is a router that restarts.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._up = threading.Event()
        self._up.set()
        self._closing = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    @property
    def port(self) -> int:
        """Where to connect instead."""
        return int(self._listening.getsockname()[1])

    def cut(self) -> None:
        """Let nothing pass from now on."""
        self._up.clear()

    def mend(self) -> None:
        """Let everything pass again."""
        self._up.set()

    def break_connections(self) -> None:
        """Reset every connection; new ones are taken at once."""
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Link:
        self._accepting.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing = True
        self.mend()
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the accept
        self.break_connections()
        self._accepting.join()
        self._listening.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        """Both directions of one connection, until either end closes it."""
        with near:
            self._up.wait()
            try:
                far = socket.create_connection(self._target)
            except OSError:
                return  # nobody listens there just now: the caller sees a closed connection
            with far, self._counted(near, far):
                back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
                back.start()
                self._pass_on(near, far)
                back.join()

    @contextlib.contextmanager
    def _counted(self, *ends: socket.socket):
        for each in ends:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BUFFER)
        with self._lock:
            self._open.update(ends)
        try:
            yield
        finally:
            with self._lock:
                self._open.difference_update(ends)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                self._up.wait()
                sink.sendall(piece)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
