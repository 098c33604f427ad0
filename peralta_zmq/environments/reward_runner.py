"""Calls a reward function in a separate process, which is killed when it hangs.

The next call starts a new process. A function that raises, hangs, exits or does not return a number
causes a RewardError, never a reward. A function whose own code bounds its run time is called in
this process instead, without a timeout.
"""

from __future__ import annotations

import math
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeAlias, cast

from peralta_zmq.errors import RewardError, TaskError, described
from peralta_zmq.rollout import MAX_REWARD, Problem

START_TIMEOUT_SECONDS = 120.0  # for importing the reward function
Reward: TypeAlias = "float | dict[str, float]"  # a dict holds named terms, whose sum is the reward


class RewardRunner:
    """Calls a reward function with `options` as keyword arguments. Use with `closing`.

    With `bounded`, the function bounds its own run time and is called in this process.
    """

    def __init__(
        self,
        function: Callable[..., Any],  # must be importable by its module and name
        *,
        timeout_seconds: float,
        options: Mapping[str, Any] | None = None,
        bounded: bool = False,
    ) -> None:
        self._function, self._options = function, dict(options or {})
        self._timeout, self._bounded = timeout_seconds, bounded
        self._name = f"{function.__module__}:{function.__qualname__}"
        self._process: subprocess.Popen[bytes] | None = None  # imports the function and calls it
        self._pipe: Connection | None = None  # to `_process`

    def reward(self, problem: Problem, completion_text: str) -> Reward:
        """The reward of a completion. Raises RewardError if the function fails."""
        result = self._call(problem, completion_text)
        if isinstance(result, str):  # the reason of a failure
            raise RewardError(
                f"reward function {self._name} {result}, for a completion of problem {problem.id}; "
                "fix the function (its timeout is task.reward_timeout)"
            )
        return result

    def close(self) -> None:
        """Kill the process of the reward function, if any, and its child processes."""
        if self._process is None:
            return
        assert self._pipe is not None and self._process.stdin is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._pipe.close()
        self._process = self._pipe = None

    def _call(self, problem: Problem, text: str) -> Reward | str:
        """The reward, or the reason of a failure as text."""
        if self._bounded:
            return _call_function(self._function, problem, text, self._options)
        if self._process is None:
            self._start()
        return cast("Reward | str", self._exchange((problem, text), self._timeout))

    def _start(self) -> None:
        """Start the process and import the function there. Raises TaskError on failure."""
        self._pipe, child_pipe = Pipe()
        with child_pipe:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, self._name, str(child_pipe.fileno())],
                stdin=subprocess.PIPE,  # ends when this process dies: see _exit_with_parent
                pass_fds=[child_pipe.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        if (result := self._exchange(self._options, START_TIMEOUT_SECONDS)) != "ready":
            self.close()
            raise TaskError(f"reward function {self._name} did not start: its process {result}")

    def _exchange(self, message: object, timeout_seconds: float) -> object:
        """Send a message to the process and return its reply.

        If no reply arrives in time, kills the process and returns the reason as text.
        """
        assert self._process is not None and self._pipe is not None
        process = self._process
        try:
            self._pipe.send(message)
            if self._pipe.poll(timeout_seconds):
                return self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            return f"exited with code {process.returncode}"
        self.close()
        return f"took longer than {timeout_seconds:g} s"


def _call_function(
    function: Callable[..., Any], problem: Problem, text: str, options: Mapping[str, Any]
) -> Reward | str:
    """The reward, or the reason of a failure as text."""
    try:
        result = function(problem, text, **options)
    except Exception as error:  # noqa: BLE001  a user's function may raise anything
        return f"raised {described(error)}"
    try:
        return checked_reward(result)
    except ValueError as error:
        return f"returned {error}"


def checked_reward(result: object) -> Reward:
    """Convert the result of a reward function to a reward.

    A mapping holds the named terms of a reward. Raises ValueError unless the result, or each term,
    is a number and their sum is within MAX_REWARD.
    """
    is_mapping = isinstance(result, Mapping)
    values = cast("Mapping[object, object]", result if is_mapping else {"": result})
    try:
        terms = {str(name): _to_float(value) for name, value in values.items()}
        total = math.fsum(terms.values())  # raises for infinities of both signs
    except Exception:  # noqa: BLE001  a user's object may raise anything
        raise ValueError(f"{_short_repr(result)}, which is not a number") from None
    if not abs(total) <= MAX_REWARD:  # also true for NaN
        limits = f"-{MAX_REWARD:g} to {MAX_REWARD:g}"
        raise ValueError(f"{total}, which is not a number from {limits}")
    return terms if is_mapping else total


def _to_float(value: object) -> float:
    """Like float(), but raises TypeError for text and for objects that are no number."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError
    return float(cast("Any", value))


def _short_repr(value: object) -> str:
    """The first 80 characters of the repr on one line; the type if repr() raises."""
    try:
        return f"{' '.join(repr(value).split()):.80}"
    except Exception:  # noqa: BLE001  e.g. an int of more than 4300 digits
        return f"a value of type {type(value).__name__}"


def _exit_with_parent() -> None:
    """Exit when stdin ends, which happens whenever the parent process ends."""
    sys.stdin.buffer.read()
    os._exit(0)


def _serve(name: str, pipe: Connection) -> None:
    """Main loop of the reward process: receives problems and texts, sends results."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    function: Callable[..., Any] = pkgutil.resolve_name(name)
    options = pipe.recv()
    pipe.send("ready")
    with suppress(EOFError, OSError):
        while True:
            problem, text = pipe.recv()
            pipe.send(_call_function(function, problem, text, options))


if __name__ == "__main__":
    _serve(sys.argv[1], Connection(int(sys.argv[2])))
