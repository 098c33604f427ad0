from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from peralta_zmq.errors import ConfigError, UserCodeError
from peralta_zmq.registry import call_with_timeout


def forever() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:  # noqa: BLE001  as careless code does
            continue


def test_what_a_function_gives_comes_back() -> None:
    assert call_with_timeout("sum", lambda a, *, b: a + b)(1, b=2) == 3


def test_a_function_that_hangs_is_named_in_time() -> None:
    with pytest.raises(UserCodeError, match=r"mine did not return within 0\.1 s"):
        call_with_timeout("mine", forever, seconds=0.1)()


def test_an_error_of_ours_passes() -> None:
    def ours() -> None:
        raise ConfigError("loss.beta needs a reference")

    with pytest.raises(ConfigError, match="needs a reference"):
        call_with_timeout("mine", ours)()


def test_an_exception_is_told_with_its_place_on_one_line() -> None:
    def broken() -> None:
        raise ValueError("two\nlines")

    with pytest.raises(
        UserCodeError, match=r"mine raised ValueError: two lines \(.*py, line"
    ) as told:
        call_with_timeout("mine", broken)()
    assert "\n" not in str(told.value)


def test_an_alarm_of_somebody_else_goes_on() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        call_with_timeout("mine", lambda: None, seconds=30)()
        deadline = time.monotonic() + 10
        while not rung and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, interval)
    assert rung == [signal.SIGALRM]


STUCK = """
import hashlib, sys, threading
from peralta_zmq import registry
registry.INTERRUPT_SECONDS = 0.2
call = registry.call_with_timeout(
    "loss 'mine'", lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1), seconds=0.2
)
if "thread" in sys.argv:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
else:
    call()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_call_that_cannot_be_interrupted_ends_the_process_and_is_named(where: str) -> None:
    command = [sys.executable, "-c", STUCK, where]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("loss 'mine' did not return within 0.2 s and cannot be inter")
    assert ended.stderr.count("\n") == 1


def test_a_call_that_returns_in_time_leaves_nothing_behind() -> None:
    before = threading.active_count()
    for _ in range(5):
        call_with_timeout("mine", lambda: None, seconds=30)()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_other_threads_are_called_without_an_alarm() -> None:
    given: list[int] = []
    thread = threading.Thread(target=lambda: given.append(call_with_timeout("mine", lambda: 3)()))
    thread.start()
    thread.join()
    assert given == [3]
