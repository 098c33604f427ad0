"""Peak memory of a command and of all its descendants (Linux only)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process
PERIOD = 0.5  # seconds between two readings of the memory; one takes 25 ms of processor time


class MeasuredCommand:
    """A command in a new session, whose memory is read until the context ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        errors: IO[bytes] | int,
    ) -> None:
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        self.peak_memory = 0  # bytes; a page that several processes map counts once
        # Processes of the caller, which go on.
        self._earlier = set(psutil.Process().children(recursive=True))
        self.started = time.time()
        self.process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **environment}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory")

    def __enter__(self) -> MeasuredCommand:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all processes: SIGTERM, then SIGKILL after three seconds."""
        self._ended.set()
        self._thread.join()
        for stop in (psutil.Process.terminate, psutil.Process.kill):
            members = self.members()
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    stop(member)
            psutil.wait_procs(members, timeout=3)  # also reaps those that this process has adopted
        assert self.process.stdout
        self.process.stdout.close()
        self.process.wait()

    def members(self) -> list[psutil.Process]:
        family = psutil.Process().children(recursive=True)
        return [member for member in family if member not in self._earlier]

    def read_output(self) -> str:
        """New standard output since the last call; never blocks."""
        assert self.process.stdout
        return (self.process.stdout.read() or b"").decode(errors="replace")

    def _watch(self) -> None:
        while True:
            memory = sum(map(proportional_bytes, self.members()))
            self.peak_memory = max(self.peak_memory, memory)
            if self._ended.wait(PERIOD):
                return


def proportional_bytes(process: psutil.Process) -> int:
    """Proportional set size (PSS) in bytes: of a page that n processes map, an n-th; 0 if ended."""
    try:
        return process.memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
