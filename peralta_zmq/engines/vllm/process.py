"""The process with vLLM (core.py): starts it, calls it, detects that it has died or hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from peralta_zmq.errors import EngineProcessError

# Not `-m`: with tensor parallelism vLLM starts copies of the main module.
PROGRAM = "import sys; from peralta_zmq.engines.vllm.core import main; main(int(sys.argv[1]))"
POLL_SECONDS = 1.0
EXIT_SECONDS = 2.0
HANG_POLLS = 8  # without a reply and without CPU time until a step counts as hung
STEP_POLLS = 300  # until a step counts as hung although it uses CPU time, as a GPU's driver may
CPU_SECONDS = 0.05  # in one poll; less is idle
MAX_TEXT = 300  # characters of an exception; vLLM lists all models that it has
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
        super().__init__(" ".join(text.split())[:MAX_TEXT])


class CoreProcess:
    """A process with vLLM, started with the arguments of vllm.EngineArgs; end it with `kill`.

    Raises CoreError if vLLM does not start. A session of its own, so that `kill` reaches the
    processes of vLLM.
    """

    def __init__(self, arguments: Mapping[str, Any], *, threads: int) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        environment = {**QUIET, **os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # its end tells the process that the generator has ended
                stdout=2,  # vLLM prints messages
                env=environment,
                start_new_session=True,
            )
        self._observed = psutil.Process(self._process.pid)
        self.call("open", dict(arguments))

    @property
    def pid(self) -> int:
        """Process id, also of the session."""
        return self._process.pid

    def check(self) -> None:
        """Raise EngineProcessError if the process has ended."""
        if (code := self._process.poll()) is not None:
            raise EngineProcessError(f"the process of vLLM has {_ended(code)}")

    def call(self, name: str, *arguments: Any, is_step: bool = False) -> Any:
        """The result of a method of core.Core.

        Raises CoreError for an exception, and EngineProcessError if the process ends; of a step
        also if it hangs. In all three cases the process is killed.
        """
        try:
            self._connection.send((name, arguments))
            self._wait(is_step)
            kind, result = self._connection.recv()
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):  # the socket ends before the process
                self._process.wait(EXIT_SECONDS)
            raise EngineProcessError(f"the process of vLLM has {_ended(self.kill())}") from None
        if kind is not None:
            self.kill()
            raise CoreError(kind, result)
        return result

    def kill(self) -> int:
        """End the process and those of vLLM; returns the exit code."""
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._connection.close()
        return self._process.wait()

    def _wait(self, is_step: bool) -> None:
        """Wait for a reply, or the end of the process.

        Polls are counted instead of seconds, because both processes may have been stopped.
        """
        num_polls, num_idle, before = 0, 0, 0.0
        while not self._connection.poll(POLL_SECONDS):
            after = self._cpu_seconds()
            num_polls, num_idle = num_polls + 1, 0 if after - before > CPU_SECONDS else num_idle + 1
            before = after
            if is_step and (num_idle >= HANG_POLLS or num_polls >= STEP_POLLS):
                self.kill()
                seconds = num_polls * POLL_SECONDS
                raise EngineProcessError(f"the process of vLLM did not reply for {seconds:.0f} s")

    def _cpu_seconds(self) -> float:
        """CPU time of the process and those of vLLM."""
        total = 0.0
        try:
            for each in (self._observed, *self._observed.children(recursive=True)):
                total += sum(each.cpu_times()[:2])  # user and system
        except psutil.Error:  # one of them has ended
            pass
        return total


def _ended(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"ended with code {code}"
    hint = " (perhaps the system was out of memory)" if code == -signal.SIGKILL else ""
    return f"been ended by {signal.Signals(-code).name}{hint}"
