"""Supervisor of one worker (the trainer or a generator), and the commands of supervisors.

`Supervisor` keeps a worker running in this process: one that bin/lan has started over ssh, or a job
of Slurm (slurm_job.py). bin/lan runs `python -m peralta_zmq.operate.supervisor COMMAND` over ssh in
the project folder of every host. A supervisor there outlives the ssh session. Files of worker NAME
in the folder .lan/:

    NAME.json    the job: command and environment of the worker
    NAME.lock    locked by the supervisor while it runs; contains its process id
    NAME.state   start time, restarts, exit code
    NAME.log     output of the worker and its supervisor; NAME.log.1 is the previous log
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peralta_zmq.atomic_files import is_held, replace_file
from peralta_zmq.errors import EXIT_ERROR, ConfigError, PeraltaError, prepare_streams
from peralta_zmq.observe.metrics import EVENTS, read_rows
from peralta_zmq.observe.run_state import newest_session
from peralta_zmq.operate import service_units
from peralta_zmq.operate.process_group import (
    DEFAULT_POLICY,
    ProcessGroup,
    RestartPolicy,
    Worker,
    recorder,
    supervise,
)
from peralta_zmq.operate.worker_logs import (
    MAX_LOG_BYTES,
    LogPrinter,
    rotate_log,
    tail_of,
    write_output,
)

FOLDER = Path(".lan")
COPY_MARKER = FOLDER / "copying"  # exists while the code is being copied
# In the last log line of a generator that waits for the trainer.
WAITING_TEXTS = ("waiting for trainer", "waiting for a trainer", "no announcement from the trainer")


@dataclass(frozen=True, slots=True)
class Job:
    """Command (relative to the project folder) and environment variables of a worker."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    run: str | None = None  # run folder in which a trainer's restarts are recorded (events.jsonl)


@dataclass(frozen=True, slots=True)
class State:
    """State of a worker, written by its supervisor; the defaults mean: never started."""

    since: float | None = None  # unix seconds at which the supervisor started
    restarts: int = 0  # after crashes; for a job also by Slurm and by `bin/lan restart`
    code: int | None = None  # exit code of the worker; None until it has ended
    stopped: bool = False  # True if a command or a signal ended the worker
    job: str = ""  # id of the job of Slurm: ID or ARRAY_TASK
    node: str = ""  # node of the job


def read_state(file: Path) -> State | None:
    try:
        return State(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def name_of(state: State) -> str:
    """Name of the state, as in `bin/lan status`, of a worker whose supervisor does not run."""
    if state.since is None and not state.job:
        return "not started"
    if state.stopped:
        return "stopped"
    if state.code is None:
        return "crashed"  # the supervisor was killed before it could write an exit code
    return {0: "done", 1: "gave up", EXIT_ERROR: "failed"}.get(state.code, "ended")


@dataclass
class Supervisor:
    """Keeps a worker running in this process, its state in `file`, and restarts in the run folder.

    `log` is the file with the output of this process, which is rotated.
    """

    worker: Worker
    state: State
    file: Path | None
    log: Path | None
    run_folder: Path | None
    policy: RestartPolicy = DEFAULT_POLICY
    max_log_bytes: int = MAX_LOG_BYTES

    def run(
        self,
        *,
        on_tick: Callable[[ProcessGroup], None] | None = None,
        stop_signal: int | None = None,
    ) -> int:
        def record(event: str, **fields: object) -> None:
            if event == "restart":
                self.update(restarts=self.state.restarts + 1)
            if self.run_folder:
                recorder(self.run_folder)(event, **fields)

        def tick(group: ProcessGroup) -> None:
            with suppress(OSError):  # a read-only disk must not end the supervisor
                if self.log:
                    rotate_log(self.log, max_bytes=self.max_log_bytes)
            if on_tick:
                on_tick(group)

        return supervise(
            [self.worker],
            record=record,
            on_tick=tick,
            stop_signal=stop_signal,
            policy=self.policy,
        )

    def update(self, **changes: Any) -> None:
        """Change the state and write it, unless Slurm has started its job on another node."""
        self.state = replace(self.state, **changes)
        if self.file is None:
            return
        latest = read_state(self.file)
        if latest is None or latest.job != self.state.job or latest.node == self.state.node:
            _write_state(self.file, self.state)


def main(arguments: Sequence[str]) -> int:
    """Run a command; returns an exit code. `check` and `start` read jobs from stdin."""
    command, *names = arguments
    commands: dict[str, Callable[[], int | None]] = {
        "check": lambda: check(parse_jobs(sys.stdin.read())),
        "start": lambda: start(parse_jobs(sys.stdin.read())),
        "restart": lambda: restart(names),
        "run": lambda: run(read_job(names[0])),
        "stop": lambda: max(map(stop, names)),
        "status": lambda: print_status(names),
        "follow": lambda: follow(names[1:], lines=int(names[0])),  # follow LINES NAME ...
        "enable": lambda: service_units.main(command, names),
        "disable": lambda: service_units.main(command, names),
    }
    return commands[command]() or 0


def parse_jobs(text: str) -> list[Job]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [Job(row["name"], tuple(row["command"]), row["env"], run=row["run"]) for row in rows]


def job_text(job: Job) -> str:
    return json.dumps(asdict(job))


def check(jobs: Sequence[Job]) -> None:
    """Raise ConfigError if code is missing or a worker runs with other settings."""
    _check_copied()
    for job in jobs:
        if supervisor_pid(job.name) and read_job(job.name) != job:
            raise ConfigError(
                f"{job.name} is already running with other settings; bin/lan stop {job.name} first"
            )


def start(jobs: Sequence[Job]) -> None:
    """Start each worker detached, except those that run already. Raises ConfigError."""
    check(jobs)
    FOLDER.mkdir(exist_ok=True)
    for job in jobs:
        if pid := supervisor_pid(job.name):
            sys.stdout.write(f"{job.name}: already running pid={pid}\n")
            continue
        # The environment variables may hold passwords.
        replace_file(_file(job.name, "json"), job_text(job).encode(), mode=0o600)
        _file(job.name, "state").unlink(missing_ok=True)
        _start_detached(job.name)
        sys.stdout.write(f"{job.name}: started pid={_wait_for_start(job.name)}\n")


def restart(names: Sequence[str]) -> int | None:
    """Stop workers, then start their jobs again; returns 1 if a worker does not stop."""
    _check_copied()
    jobs = [read_job(name) for name in names]
    return max(map(stop, names)) or start(jobs)


def run(job: Job, **options: Any) -> int:
    """Supervise a worker until it ends or crashes too often; `options` are those of Supervisor."""
    _lock(job.name)
    os.environ.update(job.env)
    supervisor = Supervisor(
        Worker(job.name, job.command),
        State(since=time.time()),
        file=_file(job.name, "state"),
        log=_file(job.name, "log"),
        run_folder=Path(job.run) if job.run else None,
        **options,
    )
    supervisor.update()
    code = supervisor.run()
    supervisor.update(code=code)
    return code


def stop(name: str, *, save_seconds: float = 60.0) -> int:
    """Send SIGTERM to a supervisor, again after `save_seconds`, then SIGKILL; 1 if all fail."""
    pid = supervisor_pid(name)
    if pid is None:
        sys.stdout.write(f"{name}: not running\n")
        return 0
    for number, seconds in (
        (signal.SIGTERM, save_seconds),  # a trainer finishes its step and saves
        (signal.SIGTERM, 10.0),  # after two SIGTERM a supervisor kills its worker
        (signal.SIGKILL, 10.0),
    ):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        if _wait_until(lambda: not supervisor_pid(name), seconds):
            _write_state(_file(name, "state"), replace(_state_of(name), stopped=True))
            sys.stdout.write(f"{name}: stopped\n")
            return 0
    sys.stdout.write(f"{name}: still running, pid={pid}\n")
    return 1


def print_status(names: Sequence[str]) -> None:
    """Print one JSON object per worker: fields of State, name, state and log tail."""
    for name in names:
        state = _state_of(name)
        tail = tail_of(_file(name, "log"))
        state_name = name_of(state)
        if supervisor_pid(name):
            run = read_job(name).run
            state_name = activity_of(Path(run) if run else None, tail)
        row = {**asdict(state), "name": name, "state": state_name, "tail": tail}
        sys.stdout.write(f"{json.dumps(row)}\n")


def follow(names: Sequence[str], *, lines: int, restart_seconds: float = 10.0) -> None:
    """Print the last `lines` lines of each log, then all new lines.

    Ends when no worker runs, or when standard input is closed, which a lost ssh connection does.
    `restart` or systemd may start an ended supervisor again within `restart_seconds`.
    """
    printer = LogPrinter({name: _file(name, "log") for name in names}, lines=lines)
    last_alive = float("-inf")  # monotonic seconds
    while True:
        is_alive = any(map(supervisor_pid, names))
        has_printed = printer.print_new()
        if is_alive:
            last_alive = time.monotonic()
        elif not has_printed:
            # 1 s: for `stop` to write State.stopped.
            grace = 1.0 if all(map(_has_finished, names)) else restart_seconds
            if time.monotonic() - last_alive > grace:
                return
        ready, _, _ = select.select([sys.stdin], [], [], 0.2)
        if ready and not os.read(sys.stdin.fileno(), 1024):  # the ssh connection is gone
            return


def _has_finished(name: str) -> bool:
    state = _state_of(name)
    return state.code is not None and not state.stopped


def supervisor_pid(name: str) -> int | None:
    """The process id of a worker's supervisor; None if no supervisor holds the lock."""
    lock = _file(name, "lock")  # it is empty until its owner has written the process id
    return int(lock.read_text() or 0) or None if is_held(lock) else None


def read_job(name: str) -> Job:
    """The job of a worker that was started before. Raises ConfigError."""
    try:
        (job,) = parse_jobs(_file(name, "json").read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{name} was never started here; run bin/lan up") from None
    return job


def _check_copied() -> None:
    if COPY_MARKER.exists():
        raise ConfigError("the copied code is incomplete: a sync was interrupted; run bin/lan sync")


def _lock(name: str) -> None:
    """Lock a worker until this process ends. Raises ConfigError if it is already running."""
    lock = os.open(_file(name, "lock"), os.O_RDWR | os.O_CREAT, 0o644)  # never closed

    def take_lock() -> bool:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    if not _wait_until(take_lock, 2.0):  # `supervisor_pid` takes it briefly, too
        raise ConfigError(f"{name} is already running; bin/lan stop {name} first")
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())


def _start_detached(name: str) -> None:
    words = [sys.executable, "-m", "peralta_zmq.operate.supervisor", "run", name]
    with _file(name, "log").open("ab") as output:
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _wait_for_start(name: str) -> int:
    """Wait until a supervisor runs; returns its process id. Raises ConfigError if it ends."""

    def has_started() -> bool:
        state = _state_of(name)
        return state.code is not None or bool(state.since and supervisor_pid(name))

    if _wait_until(has_started, 20.0) and (pid := supervisor_pid(name)):
        return pid
    tail = " / ".join(tail_of(_file(name, "log"))[-3:])
    raise ConfigError(f"{name} did not start; the end of {_file(name, 'log')}: {tail}")


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def activity_of(run: Path | None, tail: Sequence[str]) -> str:
    """What a trainer does by the events in `run`, or a generator (None) by its log."""
    if run is None:
        is_waiting = bool(tail) and any(text in tail[-1] for text in WAITING_TEXTS)
        return "waiting" if is_waiting else "running"
    try:
        session = newest_session(read_rows(run / EVENTS))
    except OSError:  # its disk is missing
        return "running"
    activity = session.activity({})
    return "running" if session.is_over or activity == "training" else activity


def _state_of(name: str) -> State:
    return read_state(_file(name, "state")) or State()


def _write_state(file: Path, state: State) -> None:
    try:
        replace_file(file, json.dumps(asdict(state)).encode())
    except OSError as error:  # a full disk must not end the supervisor
        write_output(sys.stderr, f"state of {file.stem} not written: {error}\n")


def _file(name: str, kind: str) -> Path:
    """Path of a worker's file; `kind` is json, lock, state or log."""
    return FOLDER / f"{name}.{kind}"


if __name__ == "__main__":
    prepare_streams()
    try:
        sys.exit(main(sys.argv[1:]))
    except PeraltaError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_ERROR)
