"""What a supervisor waits for and what its children hang on: two pipes.

Knows signals and descriptors; knows nothing of workers.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Generator
from typing import TypeAlias

Caught: TypeAlias = Callable[[float], list[int]]  # waits so many seconds, returns what came


@contextlib.contextmanager
def leash() -> Generator[int, None, None]:
    """The reading end of a pipe that ends with this process, whatever ends it."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def caught_signals() -> Generator[Caught, None, None]:
    """A function that waits up to so many seconds and returns the signals that came."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    earlier_wakeup = signal.set_wakeup_fd(writing)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    earlier = {number: signal.signal(number, _stay) for number in numbers}

    def caught(seconds: float) -> list[int]:
        ready, _, _ = select.select([reading], [], [], seconds)
        return list(os.read(reading, 4096)) if ready else []

    try:
        yield caught
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier_wakeup)
        os.close(reading)
        os.close(writing)


def _stay(number: int, frame: object) -> None:
    """Do nothing: the byte in the pipe is the message."""
