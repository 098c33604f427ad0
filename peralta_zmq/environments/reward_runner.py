"""Rewards with a deadline: a function in a process of its own, replaced when it hangs.

A reward that raises, hangs, dies or gives no number is a RewardError and never a number: who asked
counts it and gives the group up. A bounded one is judged in this process. Knows processes and one
function; knows nothing of models or groups.
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
from typing import Any, cast

from peralta_zmq.errors import RewardError, TaskError, described
from peralta_zmq.rollout import MAX_REWARD, Problem

START_SECONDS = 120.0  # to import the task
MAX_IN_A_ROW = 20  # failures without a reward between them
Earned = float | dict[str, float]


class RewardRunner:
    """Asks a reward function what answers are worth; use with `with` or close it."""

    def __init__(
        self,
        function: Callable[..., Any],  # of a module, by its own name
        *,
        timeout_seconds: float,
        options: Mapping[str, Any] | None = None,
        bounded: bool = False,
    ) -> None:
        self._function, self._options = function, dict(options or {})
        self._deadline, self._bounded = timeout_seconds, bounded
        self._name = f"{function.__module__}:{function.__qualname__}"
        self._worker: _Worker | None = None
        self._in_a_row = 0
        self.num_failed = 0

    def reward(self, problem: Problem, completion_text: str) -> Earned:
        """What the answer is worth.

        Raises RewardError, naming the function, when that cannot be told; TaskError when it could
        not be told for any of the last `MAX_IN_A_ROW` answers.
        """
        try:
            earned = self._earned(problem, completion_text)
        except RewardError as error:
            self.num_failed, self._in_a_row = self.num_failed + 1, self._in_a_row + 1
            if self._in_a_row >= MAX_IN_A_ROW:
                raise TaskError(
                    f"{self._in_a_row} answers in a row got no reward, the last: {error}"
                ) from None
            raise
        self._in_a_row = 0
        return earned

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _earned(self, problem: Problem, text: str) -> Earned:
        if self._bounded:
            outcome = _outcome(self._function, problem, text, self._options)
        else:
            self._worker = self._worker or _Worker(self._name, self._options)
            outcome = self._worker.ask(problem, text, seconds=self._deadline)
            if not self._worker.alive:
                self._worker = None
        if isinstance(outcome, str):
            raise RewardError(
                f"the reward {self._name} {outcome}, for an answer to {problem.id}; "
                "mend it (task.reward_timeout is its deadline)"
            )
        return outcome


class _Worker:
    """One process that rewards, one answer at a time."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, name, str(theirs.fileno())],
                stdin=subprocess.PIPE,  # its end tells the worker that we are gone
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        self.alive = True
        self._ours.send(options)
        if (said := self._said(START_SECONDS)) != "ready":
            self.kill()
            raise TaskError(f"a process for the reward {name} does not start: {said}")

    def ask(self, problem: Problem, text: str, *, seconds: float) -> Earned | str:
        """What the answer is worth, or what went wrong."""
        try:
            self._ours.send((problem, text))
        except OSError:
            self.kill()
            return "has lost its process"
        return cast("Earned | str", self._said(seconds))

    def kill(self) -> None:
        """End the process, and what it has started."""
        self.alive = False
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._ours.close()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _said(self, seconds: float) -> object:
        try:
            if self._ours.poll(seconds):
                return self._ours.recv()
        except (EOFError, OSError):
            self.kill()
            return f"ended its process with code {self._process.returncode}"
        self.kill()
        return f"took longer than {seconds:g} s"


def _outcome(
    function: Callable[..., Any], problem: Problem, text: str, options: Mapping[str, Any]
) -> Earned | str:
    """A sound reward, or half a sentence that says why there is none."""
    try:
        earned: Any = function(problem, text, **options)
    except Exception as error:  # noqa: BLE001  whatever a stranger's function raises
        return f"raised {described(error)}"
    given = cast("Mapping[object, object]", earned) if isinstance(earned, Mapping) else {"": earned}
    parts, part = dict[str, float](), cast("object", earned)
    try:
        for name, part in given.items():
            parts[str(name)] = _number(part)
        part = cast("object", earned)
        total = math.fsum(parts.values())  # infinities of both signs have no sum
    except Exception:  # noqa: BLE001  whatever a stranger's object raises
        return f"gave {_shown(part)}, which is no number"
    if not abs(total) <= MAX_REWARD:  # NaN too
        return f"gave {total}, which is no number between -{MAX_REWARD:g} and {MAX_REWARD:g}"
    return parts if isinstance(earned, Mapping) else total


def _number(part: object) -> float:
    """It as a float; a word is none. Raises whatever its conversion raises."""
    if isinstance(part, (str, bytes)) or not hasattr(part, "__float__"):
        raise TypeError
    return float(cast("Any", part))


def _shown(value: object) -> str:
    """The beginning of its repr on one line; its type, when it has none."""
    try:
        return f"{' '.join(repr(value).split()):.80}"
    except Exception:  # noqa: BLE001  a stranger's too, and that of an int of 4300 digits
        return f"a value of type {type(value).__name__}"


def _leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _serve(name: str, line: Connection) -> None:
    """Answer until the parent is gone."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    function: Callable[..., Any] = pkgutil.resolve_name(name)
    options = line.recv()
    line.send("ready")
    with suppress(EOFError, OSError):
        while True:
            problem, text = line.recv()
            line.send(_outcome(function, problem, text, options))


if __name__ == "__main__":
    _serve(sys.argv[1], Connection(int(sys.argv[2])))
