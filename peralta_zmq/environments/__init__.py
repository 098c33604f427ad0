"""Tasks: where problems come from and what an answer is worth, one module each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.rollout import Problem


class Problems(Protocol):
    """The part of a task that makes problems."""

    def problems(self, split: str, seed: int, **options: Any) -> Iterator[Problem]:
        """The problems of 'train' or 'eval'."""
        ...


def load(
    task: Problems, split: str, *, seed: int, options: Mapping[str, Any],
    watch: Callable[[Iterator[Problem]], Iterator[Problem]] = iter,
) -> list[Problem]:  # fmt: skip
    """All problems of a split; `watch` passes them on one by one.

    Raises ConfigError for a [data] option that the task does not take, TaskError when nothing is
    left to ask.
    """
    try:
        inspect.signature(task.problems).bind(split, seed, **options)
    except TypeError as error:
        raise ConfigError(f"[data] does not fit this task: {error}; remove the option") from None
    problems = list(watch(task.problems(split, seed, **options)))
    if not problems:
        raise TaskError(f"the task has no problems for '{split}'; name a data set in [data]")
    return problems
