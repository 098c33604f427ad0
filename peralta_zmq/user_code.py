"""Functions of one's own, called so that whatever goes wrong in them is told with their name.

Knows calls and deadlines; knows nothing of what is called.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from peralta_zmq.errors import PeraltaError, UserCodeError, described

CALL_SECONDS = 60.0  # a call that takes longer hangs
GRACE_SECONDS = 5.0  # in which an interrupted one can be left


class _OverdueError(BaseException):
    """Passes through `except Exception` of the function."""


def call_with_timeout(
    name: str, function: Callable[..., Any], *, seconds: float = CALL_SECONDS
) -> Callable[..., Any]:
    """The function, whose exceptions and hanging become a PartError that begins with `name`.

    In the main thread Python code that runs or waits is interrupted. Elsewhere, and in native code,
    nothing can be: a little later the process ends, with a line on stderr and code 2.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            with _last_resort(name, seconds), _alarm(seconds):
                return function(*arguments, **options)
        except PeraltaError:
            raise
        except _OverdueError:
            raise UserCodeError(
                f"{name} has not answered within {seconds:g} s; make it return sooner"
            ) from None
        except Exception as error:
            raise UserCodeError(f"{name} raised {described(error)}; mend it") from error

    return call


@contextmanager
def _last_resort(name: str, seconds: float) -> Generator[None]:
    """End the process over a call that cannot be interrupted; a run goes on from its journal."""

    def end() -> None:
        sys.stderr.write(
            f"{name} has not answered within {seconds:g} s and cannot be interrupted where it is; "
            "make it return sooner\n"
        )
        sys.stderr.flush()
        os._exit(2)

    timer = threading.Timer(seconds + GRACE_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _alarm(seconds: float) -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _OverdueError

    before, started = signal.signal(signal.SIGALRM, ring), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)  # of somebody else's alarm
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            rest = max(0.001, left - (time.monotonic() - started))
            signal.setitimer(signal.ITIMER_REAL, rest, interval)
