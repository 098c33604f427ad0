"""Calls of a user's loss, advantage or filter: results, errors and the timeout."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peralta_zmq.errors import ConfigError, UserCodeError
from peralta_zmq.learning.user_functions import checked_function


def test_call_returns_the_checked_result_in_any_thread() -> None:
    results: list[Any] = []
    call = checked_function(
        "advantage", "mine", lambda rewards, lengths, *, scale: map(scale.__mul__, rewards)
    )
    thread = threading.Thread(target=lambda: results.append(call([1, 2], [5, 5], scale=3)))
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


LOGPROBS = torch.tensor([-1.0], requires_grad=True)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (LOGPROBS.sum(), "loss 'mine' must return a scalar and a dict of metrics"),
        ((LOGPROBS, {}), "loss 'mine' must return a scalar that depends on tokens.logprobs"),
        ((torch.ones(()), {}), "loss 'mine' must return a scalar that depends on tokens.logprobs"),
        ((1.0, {}), "loss 'mine' must return a scalar that depends on tokens.logprobs"),
        ((LOGPROBS.sum(), {"kl": LOGPROBS}), "metric 'kl' of loss 'mine' must be a scalar tensor"),
    ],
)
def test_invalid_loss_result_is_rejected(result: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        checked_function("loss", "mine", lambda tokens: result)(SimpleNamespace(logprobs=LOGPROBS))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([math.nan, 0], r"advantage 'mine' returned the advantage nan for the rewards \[1, 0\]"),
        ([0.0] * 4, "advantage 'mine' returned 4 advantages for 2 rewards"),
    ],
)
def test_invalid_advantages_are_rejected(result: list[float], message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        checked_function("advantage", "mine", lambda rewards, lengths: result)([1, 0], [2, 2])


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

call = user_functions.checked_function("loss", "mine", globals()[sys.argv[1]], timeout=0.2)
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
