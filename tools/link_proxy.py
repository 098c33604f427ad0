"""A TCP link that can be cut, between a generator and its trainer.

Knows sockets and bytes; knows nothing of what passes.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Generator
from types import TracebackType

PIECE = 1 << 14  # bytes passed on at a time
NUM_PORTS = 4  # that a trainer listens on
# Below those that the kernel gives to whoever connects: a trainer that comes back finds its own
# ports free, and none of its generators, trying again and again, connected with itself.
PORTS = range(20_000, 32_000)
KERNEL_BUFFER = 16 << 10  # bytes; larger ones would hide the sender's backpressure


class Link:
    """Passes bytes from four local ports, `port` and the three after it, to `target` and those
    after that.

    While it is cut nothing passes and nobody is told, as with a cable pulled out; bytes already
    taken in are passed on when it is mended. Use with `with`.
    """

    def __init__(self, target: int) -> None:
        self._up = threading.Event()
        self._up.set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listening = listening_ports()
        self._accepting = [
            threading.Thread(target=self._accept, args=(listening, target + index), daemon=True)
            for index, listening in enumerate(self._listening)
        ]

    @property
    def port(self) -> int:
        """Where a generator connects instead of the trainer."""
        return int(self._listening[0].getsockname()[1])

    def cut(self) -> None:
        """Let nothing pass from now on."""
        self._up.clear()

    def mend(self) -> None:
        """Let everything pass again."""
        self._up.set()

    def reset(self) -> None:
        """Close every connection; new ones are taken at once, as by a router that restarts."""
        with self._lock:
            for each in self._open:
                _shut(each)

    def __enter__(self) -> Link:
        for each in self._accepting:
            each.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for listening in self._listening:
            _shut(listening)  # wakes its accept
        for each in self._accepting:
            each.join()
        for listening in self._listening:
            listening.close()
        self.mend()
        self.reset()

    def _accept(self, listening: socket.socket, target: int) -> None:
        with contextlib.suppress(OSError):  # shut: we are closing
            while True:
                near, _ = listening.accept()
                threading.Thread(target=self._connect, args=(near, target), daemon=True).start()

    def _connect(self, near: socket.socket, target: int) -> None:
        """Both directions of one connection, until either end closes it."""
        with near:
            self._up.wait()
            try:
                far = socket.create_connection(("127.0.0.1", target))
            except OSError:
                return  # nobody listens there just now: the caller sees a closed connection
            with far, self._counted(near, far):
                back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
                back.start()
                self._pass_on(near, far)
                back.join()

    @contextlib.contextmanager
    def _counted(self, *ends: socket.socket) -> Generator[None, None, None]:
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
        self._up.wait()  # an end is news too
        _shut(source)
        _shut(sink)


def listening_ports() -> list[socket.socket]:
    """Listening sockets on a free port and on the three after it."""
    while True:
        first, opened = random.choice(PORTS), list[socket.socket]()
        try:
            for port in range(first, first + NUM_PORTS):
                opened.append(socket.create_server(("127.0.0.1", port)))
            return opened
        except OSError:
            for each in opened:
                each.close()


def free_ports() -> int:
    """A port that is free just now together with the three after it."""
    opened = listening_ports()
    port = int(opened[0].getsockname()[1])
    for each in opened:
        each.close()
    return port


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
