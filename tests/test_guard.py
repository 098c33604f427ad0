from __future__ import annotations

import signal
import threading
import time

import pytest

from peralta_zmq.errors import ConfigError, PartError
from peralta_zmq.guard import guarded


def forever() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:  # noqa: BLE001  as careless code does
            continue


def test_what_a_function_gives_comes_back() -> None:
    assert guarded("sum", lambda a, *, b: a + b)(1, b=2) == 3


def test_a_function_that_hangs_is_named_in_time() -> None:
    with pytest.raises(PartError, match=r"mine has not answered within 0\.1 s"):
        guarded("mine", forever, seconds=0.1)()


def test_an_error_of_ours_passes() -> None:
    def ours() -> None:
        raise ConfigError("loss.beta needs a reference")

    with pytest.raises(ConfigError, match="needs a reference"):
        guarded("mine", ours)()


def test_an_exception_is_told_with_its_place_on_one_line() -> None:
    def broken() -> None:
        raise ValueError("two\nlines")

    with pytest.raises(PartError, match=r"mine raised ValueError: two lines \(.*py, line") as told:
        guarded("mine", broken)()
    assert "\n" not in str(told.value)


def test_an_alarm_of_somebody_else_goes_on() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        guarded("mine", lambda: None, seconds=30)()
        deadline = time.monotonic() + 10
        while not rung and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, interval)
    assert rung == [signal.SIGALRM]


def test_other_threads_are_called_without_an_alarm() -> None:
    given: list[int] = []
    thread = threading.Thread(target=lambda: given.append(guarded("mine", lambda: 3)()))
    thread.start()
    thread.join()
    assert given == [3]
