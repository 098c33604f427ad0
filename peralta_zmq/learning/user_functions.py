"""Calls of a user's loss, advantage or filter: errors name the function, and a timeout ends it.

These functions run inside the trainer. A function that fails ends the training with one line
that names it; the trainer can then be restarted, because its journal and checkpoints hold all
previous steps. The losses, advantages and filters of this package are called directly.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from peralta_zmq.errors import PeraltaError, UserCodeError, described

FunctionKind: TypeAlias = Literal["loss", "advantage", "filter"]

CALL_TIMEOUT_SECONDS = 60.0  # for one call; a normal call takes milliseconds


def checked_function(
    kind: FunctionKind, name: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """The same function with a timeout, error messages and a check of its result.

    An exception or an invalid result becomes a UserCodeError with kind and name. A call that takes
    longer than CALL_TIMEOUT_SECONDS ends the process with a line on stderr and exit code 2.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            with _exit_after_timeout(f"{kind} '{name}'"):
                result = function(*arguments, **options)
                return RESULT_CHECKS[kind](name, result, *arguments)
        except PeraltaError:
            raise
        except Exception as error:
            raise UserCodeError(
                f"{kind} '{name}' raised {described(error)}; fix the function"
            ) from error

    return call


@contextmanager
def _exit_after_timeout(function: str) -> Generator[None]:
    """End the process if the block takes longer than CALL_TIMEOUT_SECONDS.

    An exception could not interrupt native code or other threads, and `except Exception` in the
    function could catch it.
    """
    seconds = CALL_TIMEOUT_SECONDS

    def exit_process() -> None:
        sys.stderr.write(f"{function} did not return within {seconds:g} s; make it faster\n")
        sys.stderr.flush()
        os._exit(2)

    timer = threading.Timer(seconds, exit_process)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_loss(name: str, result: Any, tokens: Any) -> Any:
    """The result of a loss. Raises UserCodeError if it is not finite although all logprobs are."""
    value = result[0] if isinstance(result, tuple) and result else result
    if (
        isinstance(value, torch.Tensor)
        and not bool(value.isfinite().all())
        and bool(tokens.logprobs.isfinite().all())
    ):
        raise UserCodeError(
            f"loss '{name}' returned {value.tolist()} although all logprobs are finite; "
            "fix the function"
        )
    return result


def _check_advantages(name: str, result: Any, *_: object) -> list[float]:
    """The advantages as a list; the function may return an array or a tensor."""
    return [float(advantage) for advantage in result]


def _check_filter(name: str, result: Any, *_: object) -> bool:
    """The result of a filter. Raises UserCodeError unless it is True or False."""
    if not isinstance(result, (bool, np.bool_)):
        raise UserCodeError(f"filter '{name}' returned {result!r:.80}; return True or False")
    return bool(result)


RESULT_CHECKS: dict[FunctionKind, Callable[..., Any]] = {
    "loss": _check_loss,
    "advantage": _check_advantages,
    "filter": _check_filter,
}
