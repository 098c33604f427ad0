"""Local workers kept alive: started, restarted when they die, stopped together, never orphaned.

The first worker leads: when it is done, all is done. Knows processes, signals and exit codes;
knows nothing of models or messages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from peralta_zmq.operate.signals import Caught, caught_signals, leash

FIRST_DELAY, LONGEST_DELAY = 0.5, 10.0  # seconds before a restart; doubles with each crash
CALM_SECONDS = 60.0  # a life this long resets the delay; crashes are counted over as long
MAX_CRASHES = 5
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
NUM_LOG_LINES = 20
LOOK_SECONDS = 0.2  # between two looks at the run, if nothing happens
BAD_CONFIG = 2
SHOW_CURSOR = "\033[?25h"

# A guard beside each worker, in its process group: standard input is a pipe that only the
# supervisor holds open, so that its end, even by SIGKILL, is the end of the whole group.
GUARD = 'exec 3<&0; { read -r line <&3; kill -KILL 0; } >/dev/null 2>&1 & exec "$@" </dev/null 3<&-'
SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}

Record: TypeAlias = Callable[..., None]  # (event, **fields), as Events.record


@dataclass(frozen=True, slots=True)
class Worker:
    """A command to keep alive; its output goes to `log`, or to ours when there is none."""

    name: str
    command: tuple[str, ...]
    log: Path | None = None


def supervise(
    workers: Sequence[Worker],
    *,
    record: Record,
    look: Callable[[ProcessGroup], None] | None = None,
) -> int:
    """Run until the first worker is done; returns an exit code. `look` is called 5 times a second.

    A worker that fails is restarted; exit code 2, or 5 crashes in 60 s, stops them all. The first
    SIGINT or SIGTERM is passed to the first worker only, the second one kills all.
    """
    with caught_signals() as caught, leash() as tied, ProcessGroup(workers, tied, record) as crew:
        while (code := crew.settle()) is None:
            for number in caught(crew.patience()):
                if (code := crew.interrupt(number)) is not None:
                    return code
            if look:
                look(crew)
        crew.end(caught)
        return code


@dataclass(slots=True)
class ManagedProcess:
    """A worker and its present life."""

    worker: Worker
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0  # monotonic seconds, as `due` and `crashes`
    due: float | None = 0.0  # when to start it; None while it runs and once it is done
    delay: float = FIRST_DELAY
    reason: str = ""  # why it died last
    struck: bool = False  # killed by us, not by a fault of its own
    dismissed: bool = False  # stays down until it is recalled
    crashes: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_CRASHES))

    def start(self, leash: int) -> None:
        """Start a process in a session of its own, with its guard."""
        with contextlib.ExitStack() as stack:
            log = self.worker.log
            output = stack.enter_context(log.open("ab")) if log else None
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "sh", *self.worker.command],
                stdin=leash,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self.started, self.due, self.struck = time.monotonic(), None, False

    def signal(self, number: int) -> None:
        """Pass a signal to the process, not to its children."""
        if self.process:
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the whole group; a process is reaped by `collect`."""
        if self.process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def collect(self) -> int | None:
        """The exit code, negative for a signal, once the process has ended; then cleans up."""
        code = self.process.poll() if self.process else None
        if code is not None:
            self.kill()  # what it left behind, its guard for one
            self.process = None
        return code


class ProcessGroup:
    """The running workers; leaving the `with` block kills whatever is left of them."""

    def __init__(self, workers: Sequence[Worker], leash: int, record: Record) -> None:
        self.members = [ManagedProcess(worker) for worker in workers]
        self._leader = self.members[0]
        self._leash = leash
        self._record = record
        self._interrupted = False
        self._held: list[str] = []  # said while the leader draws its table

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()
            if member.process:
                member.process.wait()
                member.process = None
        self._release()

    def settle(self) -> int | None:
        """Take in who has ended, start who is due; an exit code when all is over."""
        for member in self.members:
            code = member.collect()
            verdict = None if code is None else self._judge(member, code)
            if verdict is not None:
                return verdict
        for member in self.members:
            if member.due is not None and member.due <= time.monotonic():
                self._start(member)
        return None

    def patience(self) -> float:
        """Seconds until something is due."""
        dues = [member.due for member in self.members if member.due is not None]
        return max(0.0, min([LOOK_SECONDS, *(due - time.monotonic() for due in dues)]))

    def interrupt(self, number: int) -> int | None:
        """Pass the first SIGINT or SIGTERM to the leader; an exit code if there is no waiting."""
        if number not in (signal.SIGINT, signal.SIGTERM):
            return None
        if self._interrupted or self._leader.process is None:
            return 128 + number
        self._interrupted = True
        self._leader.signal(number)
        return None

    def end(self, caught: Caught) -> None:
        """Ask the workers that still run to stop, and wait a little for it."""
        for member in self.members:
            member.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(member.process for member in self.members):
            if {signal.SIGINT, signal.SIGTERM} & set(caught(LOOK_SECONDS)):
                return
            for member in self.members:
                member.collect()

    def strike(self, name: str) -> bool:
        """SIGKILL a worker, as a crash would; False when it does not run just now.

        It is restarted, and its end is no reason to give up on it.
        """
        member = self._member(name)
        if member.process is None or member.struck or member.process.poll() is not None:
            return False
        member.struck = True
        member.signal(signal.SIGKILL)
        self._record("killed", worker=name)
        return True

    def signal(self, name: str, number: int) -> bool:
        """Pass a signal to a worker; False when it does not run just now."""
        member = self._member(name)
        member.signal(number)
        return member.process is not None

    def dismiss(self, name: str) -> None:
        """Ask a worker to leave; it stays down until `recall`."""
        member = self._member(name)
        member.dismissed, member.due = True, None
        member.signal(signal.SIGTERM)

    def recall(self, name: str) -> bool:
        """Start a worker that was dismissed; False while it is still leaving."""
        member = self._member(name)
        if not member.dismissed:
            return True
        if member.process is not None:
            return False
        member.dismissed, member.due, member.reason = False, time.monotonic(), ""
        return True

    def _member(self, name: str) -> ManagedProcess:
        return next(member for member in self.members if member.worker.name == name)

    def _start(self, member: ManagedProcess) -> None:
        if member.reason:
            name, delay = member.worker.name, member.delay
            reason, struck = member.reason, member.struck
            self._say(f"restarted {name} ({reason}) after {delay:g} s")
            self._record("restart", worker=name, reason=reason, delay=delay, struck=struck)
        member.start(self._leash)

    def _judge(self, member: ManagedProcess, code: int) -> int | None:
        """What the end of a worker means: an exit code for all, or None to go on."""
        if member is self._leader:
            self._release()
            if code == 0 or self._interrupted:
                return code if code >= 0 else 128 - code
        if code == BAD_CONFIG:
            if member.worker.log:  # else its line is on the screen already
                self._say(f"{member.worker.name} refused its settings{_tail(member.worker)}")
            return BAD_CONFIG
        if code == 0 or self._interrupted or member.dismissed:
            return None
        return self._mourn(member, _reason(code))

    def _mourn(self, member: ManagedProcess, reason: str) -> int | None:
        """Plan the restart of a crashed worker, or give up on it."""
        now, name = time.monotonic(), member.worker.name
        again = bool(member.crashes) and now - member.started < CALM_SECONDS and not member.struck
        member.delay = min(LONGEST_DELAY, 2 * member.delay) if again else FIRST_DELAY
        member.reason, member.due = reason, now + member.delay
        if member.struck:
            return None
        member.crashes.append(now)
        if len(member.crashes) == MAX_CRASHES and now - member.crashes[0] <= CALM_SECONDS:
            often = f"{name} crashed {MAX_CRASHES} times in {CALM_SECONDS:.0f} s, last: {reason}"
            self._say(f"{often}; giving up{_tail(member.worker)}")
            return 1
        return None

    def _say(self, text: str) -> None:
        self._held.append(text)
        if self._leader.process is None or not sys.stdout.isatty():
            self._release()

    def _release(self) -> None:
        if sys.stdout.isatty():  # a leader killed while it drew has left the cursor hidden
            sys.stdout.write(SHOW_CURSOR)
        for text in self._held:
            sys.stdout.write(f"{text}\n")
        self._held.clear()
        sys.stdout.flush()


def _reason(code: int) -> str:
    return f"killed by {SIGNAL_NAMES.get(-code, -code)}" if code < 0 else f"exit code {code}"


def _tail(worker: Worker) -> str:
    if worker.log is None:
        return "; its output is above"
    lines = worker.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"; the end of {worker.log}:", *lines[-NUM_LOG_LINES:]])
