"""Failing calls of the operating system, and outages that end while a trainer waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import pytest

from peralta_zmq.config import Config
from peralta_zmq.trainer.session import StopSignal
from peralta_zmq.trainer.trainer import Trainer


def failing(number: int) -> Callable[..., NoReturn]:
    """A function that raises the OSError of this number."""

    def fails(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fails


def failing_until_pause(
    patched: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    number: int,
    *,
    concerns: Callable[..., bool] = lambda *_: True,
) -> list[tuple[Any, ...]]:
    """Let each first call of a function fail, and work after the trainer has paused.

    Returns the list of the arguments of the calls that worked; others than those that it `concerns`
    always do.
    """
    function = getattr(owner, name)
    is_broken = [True]
    worked: list[tuple[Any, ...]] = []

    def call(*arguments: Any, **options: Any) -> Any:
        if not concerns(*arguments):
            return function(*arguments, **options)
        if is_broken[0]:
            raise OSError(number, os.strerror(number))
        is_broken[0] = True  # the next call fails again
        worked.append(arguments)
        return function(*arguments, **options)

    patched.setattr(owner, name, call)
    on_pause(patched, lambda: is_broken.__setitem__(0, False))
    return worked


def on_pause(patched: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Call `action` instead of each pause of the trainer between two attempts."""
    patched.setattr(StopSignal, "pause", lambda stop, seconds: action())


def start_and_end(config: Config) -> str:
    """Open a trainer and close it; returns the id of its run."""
    with ExitStack() as stack:
        return Trainer(config, stack).session.run_id
