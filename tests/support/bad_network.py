"""A TCP proxy that simulates a bad network: delay, low bandwidth, loss, interruptions, damage."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
from collections.abc import Callable
from types import TracebackType

CHUNK = 1460  # bytes, as on Ethernet


class Proxy:
    """Forwards a random port to `address` on this machine in both directions.

    While `cut` is set, no bytes are forwarded and connections stay open, as with an unplugged
    cable; with `half_open` only those to `address` are held back. Each chunk waits `delay` seconds,
    its share of `bits_per_s`, and with probability `loss` 0.2 s for a retransmission. A connection
    breaks after `breaks_after` bytes in one direction. `damage`, if set, is called with each chunk,
    of either direction, and returns the bytes to forward.
    """

    def __init__(
        self,
        address: str,
        *,
        delay: float = 0.0,
        bits_per_s: float = 0.0,
        loss: float = 0.0,
        breaks_after: float = float("inf"),
    ) -> None:
        self.cut, self.half_open = threading.Event(), threading.Event()
        self.num_connections = 0
        self.damage: Callable[[bytes], bytes] | None = None
        self._port = int(address.rpartition(":")[2])
        self._delay, self._rate, self._loss = delay, bits_per_s, loss
        self._breaks_after = breaks_after
        self._random = random.Random(0)
        self._ended = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [self._start(self._accept)]

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for each in [self._listening, *self._open]:  # wakes threads blocked in them
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in [self._listening, *self._open]:
            each.close()

    def disconnect(self) -> None:
        """Close all connections; new ones are accepted."""
        for each in [*self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _start(self, target: object, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore
        thread.start()
        return thread

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                continue
            self.num_connections += 1
            for each in (near, far):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self._open += [near, far]
            self._threads.append(self._start(self._forward, near, far, True))
            self._threads.append(self._start(self._forward, far, near, False))

    def _forward(self, source: socket.socket, target: socket.socket, upward: bool) -> None:
        readable = select.poll()  # a socket timeout would apply to both threads
        readable.register(source, select.POLLIN)
        num_bytes = 0
        with contextlib.suppress(OSError):  # one end is closed
            while num_bytes < self._breaks_after and not self._ended.is_set():
                if self.cut.is_set() or (upward and self.half_open.is_set()):
                    self._ended.wait(0.02)
                elif readable.poll(50):  # ms
                    if not (chunk := source.recv(CHUNK)):
                        break
                    num_bytes += len(chunk)
                    self._ended.wait(self._pause(chunk))
                    target.sendall(self.damage(chunk) if self.damage else chunk)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _pause(self, chunk: bytes) -> float:
        lost = self._random.random() < self._loss
        return self._delay + 0.2 * lost + (len(chunk) * 8 / self._rate if self._rate else 0)


class BitFlip:
    """Flips a bit `offset` bytes after the start of a marker, the first time the marker passes."""

    def __init__(self, marker: bytes, offset: int = 0, *, bit: int = 0) -> None:
        self._marker, self._offset, self._bit = marker, offset, bit
        self.done = threading.Event()

    def __call__(self, chunk: bytes) -> bytes:
        start = chunk.find(self._marker)
        if self.done.is_set() or start < 0 or start + self._offset >= len(chunk):
            return chunk
        self.done.set()
        damaged = bytearray(chunk)
        damaged[start + self._offset] ^= 1 << self._bit
        return bytes(damaged)
