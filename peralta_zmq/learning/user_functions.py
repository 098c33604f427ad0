"""Calls the loss, advantage or filters of a user, with clear errors and a timeout.

A function that fails ends the training with one line that names the function. The functions of
this package are called without this wrapper.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from torch import Tensor

from peralta_zmq.errors import PeraltaError, UserCodeError, described
from peralta_zmq.learning.losses import Metrics

FunctionKind: TypeAlias = Literal["loss", "advantage", "filter"]


def checked_function(
    kind: FunctionKind, name: str, function: Callable[..., Any], *, timeout: float = 60.0
) -> Callable[..., Any]:
    """Wrap the function with a timeout, error messages and a check of its result.

    An exception or an invalid result becomes a UserCodeError with kind and name. A call that takes
    longer than `timeout` seconds, instead of milliseconds, ends the process with exit code 2.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            with _exit_after(timeout, f"{kind} '{name}'"):
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
def _exit_after(seconds: float, label: str) -> Generator[None]:
    """End the process if the block takes longer; `label` names the function in the message.

    An exception would not suffice: it cannot interrupt native code, and the function might catch
    it.
    """

    def exit_process() -> None:
        sys.stderr.write(f"{label} did not return within {seconds:g} s; make it faster\n")
        sys.stderr.flush()
        os._exit(2)

    timer = threading.Timer(seconds, exit_process)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_loss(name: str, result: Any, *_: object) -> tuple[Tensor, Metrics]:
    """The result of a loss. Raises UserCodeError unless it is a scalar and a dict of scalars."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise UserCodeError(f"loss '{name}' must return a scalar and a dict of metrics")
    value, metrics = cast("tuple[object, dict[str, object]]", result)
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
        raise UserCodeError(f"loss '{name}' must return a scalar that depends on tokens.logprobs")
    for metric, number in metrics.items():
        if not isinstance(number, Tensor) or number.ndim:
            raise UserCodeError(f"metric '{metric}' of loss '{name}' must be a scalar tensor")
    return value, cast("Metrics", metrics)


def _check_advantages(
    name: str, result: Any, rewards: Sequence[float], lengths: Sequence[int]
) -> list[float]:
    """The advantages as a list; the function may return an array or a tensor.

    Raises UserCodeError unless the result has one finite number per reward.
    """
    advantages = [float(advantage) for advantage in result]
    if len(advantages) != len(rewards):
        raise UserCodeError(
            f"advantage '{name}' returned {len(advantages)} advantages for {len(rewards)} rewards; "
            "return one for each, in their order"
        )
    for advantage in advantages:
        if not math.isfinite(advantage):
            raise UserCodeError(
                f"advantage '{name}' returned the advantage {advantage} for the rewards "
                f"{list(rewards)!r:.200}; return finite numbers"
            )
    return advantages


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
