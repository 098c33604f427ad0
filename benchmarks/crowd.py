"""What a command and everything that it starts take: processor seconds and memory, while it runs.

Knows /proc and process trees (Linux only); knows nothing of what runs.
"""

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

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: whoever loses its parent becomes our child
TICKS = os.sysconf("SC_CLK_TCK")
PERIOD = 0.25  # seconds between two looks
KINDS = {"trainer": ("bin/trainer", "ray::Trainer"),
         "generators": ("bin/generator", "ray::Generator")}  # fmt: skip


class Look(NamedTuple):
    """Of all processes together."""

    time: float  # seconds since the epoch
    cpu: float  # seconds since the command's start
    memory: int  # bytes of their own: no mapped files
    kinds: Mapping[str, float]  # seconds of the living of each of KINDS since they began


class Crowd:
    """A command in a session of its own, looked at until it is left. Use with `with`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        errors: IO[bytes] | int,
    ) -> None:
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        self.looks: list[Look] = []
        self.started = time.time()
        self._before = _spent(family(os.getpid()))
        self.process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **environment}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="crowd")

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End them all: politely first, and after three seconds with SIGKILL."""
        self._ended.set()
        self._thread.join()
        members = family(os.getpid())
        for number in (signal.SIGTERM, signal.SIGKILL):
            _send(number, members)
            ends = time.monotonic() + 3
            while time.monotonic() < ends and any(map(runs, members)):
                self.process.poll()
                time.sleep(0.05)
            members = family(os.getpid())
        assert self.process.stdout
        self.process.stdout.close()
        self.process.wait()
        ends = time.monotonic() + 10
        with contextlib.suppress(ChildProcessError):  # nobody is left, of those who became ours too
            while time.monotonic() < ends:
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    _send(signal.SIGKILL, family(os.getpid()))
                    time.sleep(0.02)

    def said(self) -> str:
        """What it wrote to standard output since we last asked; never waits."""
        assert self.process.stdout
        return (self.process.stdout.read() or b"").decode(errors="replace")

    def cpu_at(self, moment: float, kind: str = "") -> float:
        """Processor seconds up to that moment, of all or of a kind, between two looks in
        proportion."""
        return between(self.looks, moment, kind)

    @property
    def peak_memory(self) -> int:
        """The most bytes of all processes at one look."""
        return max(each.memory for each in self.looks)

    def _watch(self) -> None:
        while not self._ended.is_set():
            members = family(os.getpid())
            cpu, kinds = _spent(members) - self._before, dict.fromkeys(KINDS, 0.0)
            for member in members:
                if kind := _kind(member):
                    kinds[kind] += _cpu_seconds(member)
            self.looks.append(Look(time.time(), cpu, sum(map(own_bytes, members)), kinds))
            self._ended.wait(PERIOD)


def between(looks: Sequence[Look], moment: float, kind: str = "") -> float:
    """Processor seconds, of all or of a kind, at a moment: a straight line between the looks
    around it.
    """
    times = [each.time for each in looks]
    taken = [each.kinds[kind] if kind else each.cpu for each in looks]
    at = bisect_left(times, moment)
    if at == 0 or at == len(looks):
        return taken[max(0, at - 1)]
    share = (moment - times[at - 1]) / (times[at] - times[at - 1])
    return taken[at - 1] + share * (taken[at] - taken[at - 1])


def _spent(members: Sequence[int]) -> float:
    """Processor seconds of these, and of our children that have ended and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(map(_cpu_seconds, members)) + used.ru_utime + used.ru_stime


def _kind(process: int) -> str:
    """Which of KINDS it is by its command; empty for others."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    command = " ".join(words[:2])
    return next((kind for kind, marks in KINDS.items() if any(m in command for m in marks)), "")


def _send(number: int, members: Sequence[int]) -> None:
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, number)


def family(root: int) -> list[int]:
    """All descendants of a process."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(folder.name)):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, waiting = list[int](), [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _stat(process: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ...; empty when it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def runs(process: int) -> bool:
    """Whether it is there and no zombie."""
    fields = _stat(process)
    return bool(fields) and fields[0] != "Z"


def _cpu_seconds(process: int) -> float:
    """Its own and those of its children that have ended."""
    fields = _stat(process)
    return sum(map(int, fields[11:15])) / TICKS if fields else 0.0


def own_bytes(process: int) -> int:
    """Memory of its own, no mapped files; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
