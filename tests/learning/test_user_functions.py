"""Calls of a user's loss, advantage or filter: results, errors and the timeout."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from peralta_zmq.errors import ConfigError, UserCodeError
from peralta_zmq.learning.user_functions import checked_function


def test_call_returns_the_checked_result_in_any_thread() -> None:
    results: list[Any] = []
    call = checked_function(
        "advantage", "mine", lambda rewards, *, scale: map(scale.__mul__, rewards)
    )
    thread = threading.Thread(target=lambda: results.append(call([1, 2], scale=3)))
    thread.start()
    thread.join()
    assert results == [[3.0, 6.0]]


def test_peralta_error_is_not_wrapped() -> None:
    def misconfigured() -> None:
        raise ConfigError("loss.beta needs a reference")

    with pytest.raises(ConfigError, match="needs a reference"):
        checked_function("loss", "mine", misconfigured)()


def test_exception_is_reported_on_one_line_with_its_location() -> None:
    def broken() -> None:
        raise ValueError("two\nlines")

    expected = r"^loss 'mine' raised ValueError: two lines \(.*py, line \d+\); fix the function$"
    with pytest.raises(UserCodeError, match=expected):
        checked_function("loss", "mine", broken)()


def test_call_leaves_no_thread() -> None:
    before = threading.active_count()
    for _ in range(5):
        checked_function("filter", "mine", lambda: True)()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


HANGING = """
import hashlib, sys, threading, time
from peralta_zmq.learning import user_functions

def careless():
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue

def native():
    hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)

user_functions.CALL_TIMEOUT_SECONDS = 0.2
call = user_functions.checked_function("loss", "mine", globals()[sys.argv[1]])
if sys.argv[2] == "main":
    call()
else:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("function", "thread"), [("careless", "main"), ("native", "main"), ("native", "other")]
)
def test_hanging_function_ends_the_process_and_is_named(function: str, thread: str) -> None:
    command = [sys.executable, "-c", HANGING, function, thread]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 2
    assert result.stderr == "loss 'mine' did not return within 0.2 s; make it faster\n"
