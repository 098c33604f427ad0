"""A bad network between two programs: what a link proxy does with the bytes that it forwards."""

from __future__ import annotations

import random
import threading
import time

from tools.link_proxy import LinkProxy


def proxy_to(address: str) -> LinkProxy:
    """A proxy of one port of this machine, given as tcp://HOST:PORT."""
    return LinkProxy(int(address.rpartition(":")[2]), num_ports=1)


class Slow:
    """Bytes at `bits_per_s`, `delay` seconds late after a pause, some 0.2 s late after a loss."""

    def __init__(self, *, bits_per_s: float, delay: float = 0.0, loss: float = 0.0) -> None:
        self._rate, self._delay, self._loss = bits_per_s, delay, loss
        self._random = random.Random(0)
        self._passed_at = 0.0  # monotonic seconds of the newest bytes, of either direction

    def __call__(self, chunk: bytes) -> bytes:
        is_after_pause = time.monotonic() > self._passed_at + self._delay
        is_lost = self._random.random() < self._loss
        time.sleep(len(chunk) * 8 / self._rate + self._delay * is_after_pause + 0.2 * is_lost)
        self._passed_at = time.monotonic()
        return chunk


class Break:
    """Closes a connection whenever `num_bytes` more have passed."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._num_left = num_bytes

    def __call__(self, chunk: bytes) -> bytes:
        self._num_left -= len(chunk)
        if self._num_left <= 0:
            self._num_left = self._num_bytes
            raise ConnectionResetError
        return chunk


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
