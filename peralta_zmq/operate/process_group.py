"""Run a group of worker processes: restart with back-off, stop all, no orphans.

A worker that crashes is restarted. It fails if it crashes too often or ends with an error of its
own (exit code 2), which a restart would repeat. The first worker is the leader: when it has
finished (exit code 0), the group ends. The group also ends when the leader fails, or when all other
workers have failed before the first training step. Otherwise a failed worker starts again later.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

from peralta_zmq import errors
from peralta_zmq.errors import EXIT_ERROR, printable, program_name
from peralta_zmq.observe.metrics import EVENTS, JsonLines
from peralta_zmq.operate.worker_logs import NUM_LOG_LINES, tail_of, write_output

SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}
HINTS = {  # by the cause of a crash
    "killed by SIGKILL": (
        f"; if the system was out of memory, {program_name('doctor')} plan shows what to change"
    ),
    "killed by SIGBUS": (
        "; a file that it had mapped became unreadable: check the disk, or mount the NAS again"
    ),
}

# Shell script that starts a guard process and then becomes the worker (exec). The guard reads from
# a pipe until it is closed. Only the supervisor holds the writing end, so the pipe is closed when
# the supervisor ends, even by SIGKILL. The guard then kills the worker and itself.
GUARD = 'exec 3<&0; { read -r line <&3; kill -KILL 0; } >/dev/null 2>&1 & exec "$@" </dev/null 3<&-'

Record: TypeAlias = Callable[..., None]  # called as record(event, **fields)
WaitForSignals: TypeAlias = Callable[[float], list[int]]  # see `catch_signals`


@dataclass(frozen=True, slots=True)
class Worker:
    """A command to keep running. Its output goes to `log`; None = to the terminal."""

    name: str
    command: tuple[str, ...]
    log: Path | None = None


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When workers are started again; times in seconds."""

    first_delay: float = 0.5  # before a restart; doubled with each crash
    longest_delay: float = 10.0
    calm_seconds: float = 60.0  # a worker that ran longer starts again after `first_delay`
    max_crashes: int = 5  # within `calm_seconds`, after which a worker has failed
    retry_seconds: float = 60.0  # before a failed worker is started again
    grace_seconds: float = 5.0  # from SIGTERM to SIGKILL
    poll_seconds: float = 0.2  # longest wait for a signal, and between two calls of `on_tick`


DEFAULT_POLICY = RestartPolicy()


def supervise(
    workers: Sequence[Worker],
    *,
    record: Record,
    on_tick: Callable[[ProcessGroup], None] | None = None,
    has_trained: Callable[[], bool] = lambda: False,
    stop_signal: int | None = None,
    policy: RestartPolicy = DEFAULT_POLICY,
) -> int:
    """Run the workers until the leader finishes; returns the exit code of the group.

    The first SIGINT or SIGTERM is passed to the leader only, the second one kills all workers. With
    `stop_signal`, the leader gets that signal instead of the first one, and later ones are ignored.
    `record` gets the events restart, killed and failed.
    """
    atexit.register(errors.discard_unwritten_output)
    group = ProcessGroup(workers, record, has_trained, stop_signal, policy)
    with catch_signals() as wait_for_signals, group:
        while (code := group.poll()) is None:
            for number in wait_for_signals(policy.poll_seconds):
                if number == signal.SIGTSTP:
                    group.suspend()
                elif (code := group.interrupt(number)) is not None:
                    return code
            if on_tick:
                on_tick(group)
        group.stop_all(wait_for_signals)
        return code


class ProcessGroup:
    """The processes of all workers, by name; leaving the `with` block kills them."""

    def __init__(
        self,
        workers: Sequence[Worker],
        record: Record,
        has_trained: Callable[[], bool],
        stop_signal: int | None,
        policy: RestartPolicy,
    ) -> None:
        self._processes = {
            worker.name: ManagedProcess(worker, record, policy) for worker in workers
        }
        self._leader = self._processes[workers[0].name]
        self._record = record
        self._has_trained = has_trained
        self._stop_signal = stop_signal
        self._policy = policy
        self._guard_pipe = os.pipe()
        self.is_interrupted = False  # a SIGINT or SIGTERM was received
        self._notices: list[str] = []  # messages not yet printed, see `_print`

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill_and_wait()
        for descriptor in self._guard_pipe:
            os.close(descriptor)
        self._print_notices()

    def __getitem__(self, name: str) -> ManagedProcess:
        return self._processes[name]

    def poll(self) -> int | None:
        """Handle ended processes, start due ones; returns an exit code if the group ends."""
        for process in self._processes.values():
            code = process.poll()
            if code is not None and (group_code := self._handle_exit(process, code)) is not None:
                return group_code
        for process in self._processes.values():
            if process.start_at is not None and process.start_at <= time.monotonic():
                self._start(process)
        return None

    def interrupt(self, number: int) -> int | None:
        """Handle a SIGINT or SIGTERM; returns the exit code if the group ends now."""
        if self.is_interrupted and self._stop_signal:
            return None
        if self.is_interrupted or not self._leader.send_signal(self._stop_signal or number):
            return 128 + number
        self.is_interrupted = True
        return None

    def suspend(self) -> None:
        """Stop all workers and this process after SIGTSTP (Ctrl-Z), until SIGCONT (`fg`)."""
        for process in self._processes.values():
            process.send_signal(signal.SIGSTOP)
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # without effect if no shell could continue it
        signal.signal(signal.SIGTSTP, handler)
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)

    def stop_all(self, wait_for_signals: WaitForSignals) -> None:
        """Send SIGTERM to all processes and wait until they end, or the user sends a signal."""
        processes = self._processes.values()
        for process in processes:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._policy.grace_seconds
        while time.monotonic() < deadline and any(process.is_running for process in processes):
            if {*wait_for_signals(self._policy.poll_seconds)} - {signal.SIGTSTP}:
                return
            for process in processes:
                process.poll()

    def _start(self, process: ManagedProcess) -> None:
        if process.reason:  # a restart after a crash
            name = process.worker.name
            reason = process.reason
            delay = process.delay
            hint = "" if process.was_killed else HINTS.get(reason, "")
            self._print(f"restarted {name} ({reason}) after {delay:g} s{hint}")
            self._record(
                "restart", worker=name, reason=reason, delay=delay, killed=process.was_killed
            )
        process.start(self._guard_pipe)

    def _handle_exit(self, process: ManagedProcess, code: int) -> int | None:
        """Schedule a restart, or return the exit code of the group; None if it continues."""
        worker = process.worker
        if process is self._leader:
            self._print_notices()
            if code == 0 or self.is_interrupted:
                return code if code >= 0 else 128 - code  # 128 + signal number, as a shell returns
        if code == 0 or self.is_interrupted or process.is_stopped:
            return None
        reason = f"killed by {SIGNAL_NAMES.get(-code, -code)}" if code < 0 else f"exit code {code}"
        process.reason = reason
        if time.monotonic() - process.started > self._policy.calm_seconds:  # it had recovered
            process.failure = ""
        if code == EXIT_ERROR:
            return self._fail(process, f"{worker.name} ended with an error ({reason})", code)
        if process.schedule_restart():
            return None
        within = f"{self._policy.max_crashes} times in {self._policy.calm_seconds:.0f} s"
        return self._fail(process, f"{worker.name} crashed {within}, last: {reason}", 1)

    def _fail(self, process: ManagedProcess, failure: str, code: int) -> int | None:
        """Report a failure once; schedule the next start, or return `code` if it ends the group."""
        is_repeated = failure == process.failure
        process.failure = failure
        others = [each for each in self._processes.values() if each is not self._leader]
        all_others_failed = all(each.failure and not each.is_running for each in others)
        ends_group = process is self._leader or (all_others_failed and not self._has_trained())
        if not ends_group:
            process.schedule_start(self._policy.retry_seconds)
            if not is_repeated:
                self._record("failed", worker=process.worker.name, reason=failure)
        retry = f"the next start is in {self._policy.retry_seconds:g} s"
        result = "giving up" if ends_group else retry
        # A worker without a log has itself printed its error on the terminal.
        if (ends_group or not is_repeated) and (process.worker.log or code != EXIT_ERROR):
            end = "its output is above"
            if log := process.worker.log:
                lines = tail_of(log)[-NUM_LOG_LINES:]
                end = "\n".join([f"the end of {log}:", *map(printable, lines)])
            self._print(f"{failure}; {result}; {end}")
        return code if ends_group else None

    def _print(self, text: str) -> None:
        """Print a message, after the end of a leader that draws on this terminal."""
        self._notices.append(text)
        if not self._leader.is_running or not sys.stdout.isatty():
            self._print_notices()

    def _print_notices(self) -> None:
        write_output(sys.stdout, "".join(f"{text}\n" for text in self._notices))
        self._notices.clear()


@dataclass(slots=True)
class ManagedProcess:
    worker: Worker
    record: Record
    policy: RestartPolicy
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0  # time of the last start, in monotonic seconds like all times here
    start_at: float | None = 0.0  # time of the next start; None = no start is due
    delay: float = 0.0  # seconds from the last crash to the restart
    reason: str = ""  # cause of the last crash, such as "exit code 1"; empty = not a restart
    was_killed: bool = False  # True after `kill`, which does not count as a crash
    is_stopped: bool = False  # True from `stop` until `resume`
    failure: str = ""  # text of the last failure; empty = none
    crashes: list[float] = field(default_factory=list[float])  # the newest ones

    @property
    def is_running(self) -> bool:
        """True from the start of the process until `poll` returns its exit code."""
        return self.process is not None

    def start(self, guard_pipe: tuple[int, int]) -> None:
        """Start the worker and its guard, which reads `guard_pipe`, in a new session."""
        worker = self.worker
        with _open_log(worker) as output:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "sh", *worker.command],
                stdin=guard_pipe[0],
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self.started = time.monotonic()
        self.start_at = None
        self.was_killed = False

    def poll(self) -> int | None:
        """The exit code (negative for a signal), once after the process has ended."""
        code = self.process.poll() if self.process else None
        if code is not None:
            self.kill_and_wait()
        return code

    def kill_and_wait(self) -> None:
        """Send SIGKILL to the process, its children and its guard; reap the process."""
        if self.process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def schedule_start(self, delay: float) -> None:
        self.delay = delay
        self.start_at = time.monotonic() + delay

    def schedule_restart(self) -> bool:
        """Schedule a restart after a crash or `kill`; False if there are too many."""
        now = time.monotonic()
        is_repeated = bool(self.crashes) and now - self.started < self.policy.calm_seconds
        delay = self.policy.first_delay
        if is_repeated and not self.was_killed:
            delay = min(self.policy.longest_delay, 2 * self.delay)
        self.schedule_start(delay)
        if self.was_killed:
            return True
        recent = [crash for crash in self.crashes if now - crash <= self.policy.calm_seconds]
        self.crashes = [*recent, now]
        return len(self.crashes) < self.policy.max_crashes

    def send_signal(self, number: int) -> bool:
        """Send a signal to the process, not to its children; False if it is not running."""
        if self.process:
            self.process.send_signal(number)
        return self.is_running

    def kill(self) -> bool:
        """Send SIGKILL, which does not count as a crash; False if the process is not running."""
        if self.process is None or self.was_killed or self.process.poll() is not None:
            return False
        self.was_killed = True
        self.send_signal(signal.SIGKILL)
        self.record("killed", worker=self.worker.name)
        return True

    def stop(self) -> None:
        """Send SIGTERM; the process stays stopped until `resume`."""
        self.is_stopped = True
        self.start_at = None
        self.send_signal(signal.SIGTERM)

    def resume(self) -> bool:
        """Start the process again after `stop`; False while it is still ending."""
        if not self.is_stopped:
            return True
        if self.is_running:
            return False
        self.is_stopped = False
        self.start_at = time.monotonic()
        self.reason = ""
        return True


@contextlib.contextmanager
def catch_signals() -> Generator[WaitForSignals, None, None]:
    """Yield a function `wait(seconds)` that returns the received SIGINT, SIGTERM and SIGTSTP.

    SIGCHLD (a child has ended) and signals with handlers of the caller only end the wait.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    previous_wakeup = signal.set_wakeup_fd(writing)  # each signal writes its number as one byte
    returned = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)
    numbers = (*returned, signal.SIGCHLD)
    # A handler that does nothing: unlike SIG_IGN it keeps the wake-up byte.
    previous = {number: signal.signal(number, lambda number, frame: None) for number in numbers}

    def wait_for_signals(seconds: float) -> list[int]:
        ready, _, _ = select.select([reading], [], [], seconds)
        received = os.read(reading, 4096) if ready else b""
        return [number for number in received if number in returned]

    try:
        yield wait_for_signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(reading)
        os.close(writing)


def recorder(folder: Path) -> Record:
    """A function that appends events (restart, ...) to a run's events.jsonl."""

    def record(event: str, **fields: object) -> None:
        try:
            with JsonLines(folder / EVENTS) as events:
                events.append_event(event, **fields)
        except OSError as error:  # a full disk must not end the supervisor
            write_output(sys.stderr, f"{event} not recorded in {folder / EVENTS}: {error}\n")

    return record


def _open_log(worker: Worker) -> contextlib.AbstractContextManager[BinaryIO | None]:
    """Open the log of a worker; None (the terminal) if it has none or that fails."""
    try:
        return worker.log.open("ab") if worker.log else contextlib.nullcontext()
    except OSError as error:
        write_output(
            sys.stderr,
            f"{worker.log} cannot be written ({error.strerror}); the output of {worker.name} goes "
            "to the terminal\n",
        )
        return contextlib.nullcontext()
