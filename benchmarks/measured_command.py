"""CPU time and memory of a command and of all its descendants (Linux only)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

import psutil

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process
PERIOD = 0.25  # seconds between two samples
MEMORY_PERIOD = 0.5  # between two readings of the memory; one takes 25 ms of processor time
KINDS = {"trainer": ("bin/trainer", "ray::Trainer"),
         "generators": ("bin/generator", "ray::Generator")}  # fmt: skip


class Sample(NamedTuple):
    """Totals over all processes at one time."""

    time: float  # seconds since the epoch
    cpu: float  # seconds since the command's start
    memory: int  # bytes, at most MEMORY_PERIOD old; a page that several processes map counts once
    kinds: Mapping[str, float]  # CPU seconds of the running processes of each kind in KINDS


class MeasuredCommand:
    """A command in a new session, sampled until the context ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        errors: IO[bytes] | int,
    ) -> None:
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        self.samples: list[Sample] = []
        self.started = time.time()
        self._before = _spent(family(os.getpid()))
        self.process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **environment}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="samples")

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
        members = family(os.getpid())
        for number in (signal.SIGTERM, signal.SIGKILL):
            _send(number, members)
            ends = time.monotonic() + 3
            while time.monotonic() < ends and any(map(is_running, members)):
                self.process.poll()
                time.sleep(0.05)
            members = family(os.getpid())
        assert self.process.stdout
        self.process.stdout.close()
        self.process.wait()
        ends = time.monotonic() + 10
        with contextlib.suppress(ChildProcessError):  # no child is left, adopted ones included
            while time.monotonic() < ends:
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    _send(signal.SIGKILL, family(os.getpid()))
                    time.sleep(0.02)

    def read_output(self) -> str:
        """New standard output since the last call; never blocks."""
        assert self.process.stdout
        return (self.process.stdout.read() or b"").decode(errors="replace")

    def cpu_at(self, moment: float, kind: str = "") -> float:
        """CPU seconds of all processes, or of one kind, up to a time; interpolated."""
        return between(self.samples, moment, kind)

    @property
    def peak_memory(self) -> int:
        """Maximum over the samples, in bytes."""
        return max(each.memory for each in self.samples)

    def _watch(self) -> None:
        memory, memory_due = 0, time.monotonic()
        while not self._ended.is_set():
            members = family(os.getpid())
            if time.monotonic() >= memory_due:
                memory = sum(map(proportional_bytes, members))
                memory_due += MEMORY_PERIOD
            cpu, kinds = _spent(members) - self._before, dict.fromkeys(KINDS, 0.0)
            for member in members:
                if kind := _kind(member):
                    kinds[kind] += _cpu_seconds(member)
            self.samples.append(Sample(time.time(), cpu, memory, kinds))
            self._ended.wait(PERIOD)


def between(samples: Sequence[Sample], moment: float, kind: str = "") -> float:
    """CPU seconds of all processes, or of one kind, at a time; linear between samples."""
    times = [each.time for each in samples]
    seconds = [each.kinds[kind] if kind else each.cpu for each in samples]
    at = bisect_left(times, moment)
    if at == 0 or at == len(samples):
        return seconds[max(0, at - 1)]
    share = (moment - times[at - 1]) / (times[at] - times[at - 1])
    return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


def _spent(members: Sequence[int]) -> float:
    """CPU seconds of these processes and of descendants that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(map(_cpu_seconds, members)) + used.ru_utime + used.ru_stime


def _kind(process: int) -> str:
    """The kind of a process by its command; empty for others."""
    try:
        command = " ".join(psutil.Process(process).cmdline()[:2])
    except psutil.Error:
        return ""
    return next((kind for kind, marks in KINDS.items() if any(m in command for m in marks)), "")


def _send(number: int, members: Sequence[int]) -> None:
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, number)


def family(root: int) -> list[int]:
    """Process ids of all descendants."""
    return [process.pid for process in psutil.Process(root).children(recursive=True)]


def is_running(process: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _cpu_seconds(process: int) -> float:
    """CPU seconds of a process and of its children that have ended; 0 if it has ended."""
    try:
        times = psutil.Process(process).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def proportional_bytes(process: int) -> int:
    """Proportional set size (PSS) in bytes: of a page that n processes map, an n-th; 0 if ended."""
    try:
        return psutil.Process(process).memory_full_info().pss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
