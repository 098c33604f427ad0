"""The process with vLLM (core.py): starts it, calls it, detects that it has died or hangs."""

from __future__ import annotations

import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from peralta_zmq.engines.vllm.core import COMPILING
from peralta_zmq.errors import EngineProcessError
from peralta_zmq.imports import FOLDER_LAST

# Not `-m`: with tensor parallelism vLLM starts copies of the main module.
PROGRAM = f"{FOLDER_LAST}; from peralta_zmq.engines.vllm.core import main; main(int(sys.argv[1]))"
# Variables that vLLM reads. It samples in this one process, unless there is tensor parallelism.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers would be bound to the same cores
}
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


class CoreError(Exception):
    """vLLM raised an exception, after which its process has ended; `kind` is its class."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(" ".join(text.split())[:300])  # vLLM lists all models that it has

    @property
    def is_out_of_memory(self) -> bool:
        """Whether an allocation failed; that of a worker process of vLLM is a RuntimeError here."""
        return self.kind == "OutOfMemoryError" or "out of memory" in str(self)


class CoreProcess:
    """A process with vLLM, started with the arguments of core.Core; end it with `kill`.

    It has a session of its own, so that `kill` reaches the processes of vLLM. A step counts as hung
    after `hang_polls` polls in which they use at most `cpu_seconds`, or, since a loop or a waiting
    driver of a GPU uses CPU time, after `slowdown` times the median step, which is known after
    `min_steps`; without a median, and for a compilation, after `longest_polls`. Raises CoreError.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        end_ids: Sequence[int],
        *,
        threads: int,
        program: str = "",  # empty: PROGRAM
        poll_seconds: float = 1.0,
        cpu_seconds: float = 0.05,
        min_steps: int = 10,
        hang_polls: int = 7,
        slowdown: int = 20,
        longest_polls: int = 300,
    ) -> None:
        self._poll_seconds = poll_seconds
        self._cpu_seconds = cpu_seconds
        self._min_steps = min_steps
        self._hang_polls = hang_polls
        self._slowdown = slowdown
        self._longest_polls = longest_polls
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        environment = {**QUIET, **os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program or PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # its end tells the process that the generator has ended
                stdout=2,  # vLLM prints messages
                env=environment,
                start_new_session=True,
            )
        self._observed = psutil.Process(self._process.pid)
        self._step_seconds = deque[float](maxlen=50)  # of steps without new prompts
        self.call("open", dict(arguments), list(end_ids))

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, *arguments: Any, prompt_tokens: int | None = None) -> Any:
        """The result of a method of core.Core.

        `prompt_tokens` is the number of tokens of new prompts that a step computes; None for a
        method that may take any time while it computes or reads files. Raises CoreError for an
        exception, and EngineProcessError if the process ends or hangs; in all cases it is killed.
        """
        started = time.monotonic()
        max_polls = None if prompt_tokens is None else self._max_polls(prompt_tokens)
        max_idle = self._longest_polls if name == "open" else self._hang_polls
        try:
            self._connection.send((name, arguments))
            kind, result = self._receive(max_polls, max_idle)
            is_usual = (name, prompt_tokens) == ("step", 0) and kind != COMPILING
            while kind == COMPILING:
                kind, result = self._receive(max_polls and self._longest_polls, max_idle)
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):  # the socket ends before the process
                self._process.wait(2.0)
            raise EngineProcessError(_end_text(self.kill())) from None
        if kind is not None:
            self.kill()
            raise CoreError(kind, result)
        if is_usual:
            self._step_seconds.append(time.monotonic() - started)
        return result

    def kill(self) -> int:
        """End the process and those of vLLM; returns the exit code."""
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._connection.close()
        return self._process.wait()

    def _max_polls(self, prompt_tokens: int) -> int:
        """Polls with CPU time after which a step counts as hung."""
        if len(self._step_seconds) < self._min_steps:
            return self._longest_polls
        slow = statistics.median(self._step_seconds) * max(self._slowdown, prompt_tokens)
        polls = math.ceil(slow / self._poll_seconds)
        return max(self._hang_polls, min(self._longest_polls, polls))

    def _receive(self, max_polls: int | None, max_idle: int) -> tuple[str | None, Any]:
        """The next message.

        Raises EngineProcessError after `max_idle` polls without CPU time in a row, or after
        `max_polls` with it: polls instead of seconds, because both processes may have been stopped.
        """
        num_polls = 0
        num_busy = 0
        num_idle = 0
        before = 0.0
        waiting = {psutil.STATUS_RUNNING}  # computes or waits for a CPU
        if max_polls is None:
            waiting.add(psutil.STATUS_DISK_SLEEP)
        while not self._connection.poll(self._poll_seconds):
            after, may_run = self._cpu_time(waiting)
            is_busy = after - before > self._cpu_seconds
            before = after
            num_polls += 1
            num_busy += is_busy
            num_idle = 0 if is_busy or may_run else num_idle + 1
            is_slow = max_polls and (num_busy >= max_polls or num_polls >= self._longest_polls)
            if is_slow or num_idle >= max_idle:
                self.kill()
                seconds = num_polls * self._poll_seconds
                raise EngineProcessError(f"the process of vLLM did not reply for {seconds:.0f} s")
        return self._connection.recv()

    def _cpu_time(self, states: Set[str]) -> tuple[float, bool]:
        """CPU time of the process and those of vLLM, and whether one is in one of these states."""
        total = 0.0
        may_run = False
        try:
            for each in (self._observed, *self._observed.children(recursive=True)):
                total += sum(each.cpu_times()[:2])  # user and system
                may_run |= each.status() in states
        except psutil.Error:  # one of them has ended
            pass
        return total, may_run


def _end_text(code: int) -> str:
    if code >= 0:
        return f"the process of vLLM ended with code {code}"
    hint = " (perhaps the system was out of memory)" if code == -signal.SIGKILL else ""
    return f"the process of vLLM was killed by {signal.Signals(-code).name}{hint}"
