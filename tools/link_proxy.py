"""A TCP proxy between a generator and its trainer that can be cut, reset, or flip a bit."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Generator

CHUNK = 1 << 14  # bytes per read
NUM_PORTS = 4  # a trainer listens on them
# Below the ephemeral range of the kernel: a restarted trainer finds its ports free, and no
# generator that reconnects in a loop is connected to itself.
PORTS = range(20_000, 32_000)
KERNEL_BUFFER = 16 << 10  # bytes; larger ones are faster, but hide the sender's backpressure


class LinkProxy:
    """Forwards local ports, from `port` on, to as many ports from `target` on.

    While the link is cut no byte passes and no connection is closed, as with a cable pulled out;
    bytes already received are forwarded after `restore`. New connections go to the current value of
    `target`. `damage` gets all bytes and returns those to forward; it may wait, and closes a
    connection by an OSError. Use with `with`.
    """

    def __init__(
        self, target: int, *, num_ports: int = NUM_PORTS, kernel_buffer: int = KERNEL_BUFFER
    ) -> None:
        self.target, self._kernel_buffer = target, kernel_buffer
        self.damage: Callable[[bytes], bytes] = lambda chunk: chunk
        self.num_connections = 0
        self._to_target = threading.Event()  # set: bytes pass
        self._from_target = threading.Event()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._flips: dict[int, int] = {}  # by port, from 0: number of bits before the flipped one
        self._listening = listening_ports(num_ports)
        self._threads = [
            threading.Thread(target=self._accept, args=(listening, port), daemon=True)
            for port, listening in enumerate(self._listening)
        ]
        self.restore()

    @property
    def port(self) -> int:
        """The port to which a generator connects instead of the trainer's."""
        return int(self._listening[0].getsockname()[1])

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self, *, half_open: bool = False) -> None:
        """Hold all bytes back; `half_open`: only those to the target."""
        self._to_target.clear()
        if not half_open:
            self._from_target.clear()

    def restore(self) -> None:
        self._to_target.set()
        self._from_target.set()

    def reset(self) -> None:
        """Close every connection; new ones are accepted at once, as by a restarted router."""
        with self._lock:
            for connection in self._connections:
                _shut(connection)

    def flip(self, port: int, bit: int) -> None:
        """Flip one bit that a port (0 to 3) forwards from now on, after `bit` others.

        Counts the bits of all connections of the port, in both directions.
        """
        with self._lock:
            self._flips[port] = bit

    def cancel_flip(self, port: int) -> bool:
        """Forward all bytes of a port unchanged again; False if the bit was flipped before."""
        with self._lock:
            return self._flips.pop(port, None) is not None

    def __enter__(self) -> LinkProxy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for listening in self._listening:
            _shut(listening)  # wakes its accept
        for thread in self._threads:
            thread.join()
        for listening in self._listening:
            listening.close()
        self.restore()
        self.reset()

    def _accept(self, listening: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):  # the proxy is closing
            while True:
                client, _ = listening.accept()
                arguments = client, port
                threading.Thread(target=self._connect, args=arguments, daemon=True).start()

    def _connect(self, client: socket.socket, port: int) -> None:
        """Forward both directions of one connection until either end closes it."""
        with client:
            self._to_target.wait()
            try:
                server = socket.create_connection(("127.0.0.1", self.target + port))
            except OSError:
                return  # no program listens there: the client's connection is closed
            self.num_connections += 1
            with server, self._registered(client, server):
                arguments = server, client, port, self._from_target
                back = threading.Thread(target=self._forward, args=arguments, daemon=True)
                back.start()
                self._forward(client, server, port, self._to_target)
                back.join()

    @contextlib.contextmanager
    def _registered(self, *sockets: socket.socket) -> Generator[None, None, None]:
        for connection in sockets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._kernel_buffer)
        with self._lock:
            self._connections.update(sockets)
        try:
            yield
        finally:
            with self._lock:
                self._connections.difference_update(sockets)

    def _forward(
        self, source: socket.socket, sink: socket.socket, port: int, passes: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(CHUNK):
                passes.wait()
                sink.sendall(self.damage(self._with_flip(chunk, port)))
        passes.wait()  # a cut link does not pass the end of a connection either
        _shut(source)
        _shut(sink)

    def _with_flip(self, chunk: bytes, port: int) -> bytes:
        """The bytes to forward, with a bit flipped if it is due on this port."""
        with self._lock:
            bit = self._flips.pop(port, None)
            if bit is None:
                return chunk
            if bit >= 8 * len(chunk):
                self._flips[port] = bit - 8 * len(chunk)
                return chunk
        flipped = chunk[bit // 8] ^ (1 << bit % 8)
        return chunk[: bit // 8] + bytes([flipped]) + chunk[bit // 8 + 1 :]


def listening_ports(count: int = NUM_PORTS) -> list[socket.socket]:
    while True:
        first, opened = random.choice(PORTS), list[socket.socket]()
        try:
            for port in range(first, first + count):
                opened.append(socket.create_server(("127.0.0.1", port)))
            return opened
        except OSError:
            for listening in opened:
                listening.close()


def free_ports() -> int:
    """A port that is free, like the three after it."""
    opened = listening_ports()
    port = int(opened[0].getsockname()[1])
    for listening in opened:
        listening.close()
    return port


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
