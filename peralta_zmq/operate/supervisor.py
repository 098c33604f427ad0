"""The workers of one machine, kept going after everybody has left: started detached, stopped, told.

`bin/lan` calls it on every host, in the project's folder there. Each worker has a supervisor of its
own that holds a lock while it lives, so that no old process id misleads anybody. Knows processes
and the files in .lan/; knows nothing of ssh, of other machines, or of what a worker does.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.errors import ConfigError, PeraltaError
from peralta_zmq.operate import logs, service_units
from peralta_zmq.operate.process_group import BAD_CONFIG, NUM_LOG_LINES, Record, Worker, supervise

FOLDER = Path(".lan")
HALF_COPIED = FOLDER / "copying"  # there while, and only while, the code is being copied
START_SECONDS = 20.0  # until a supervisor has its lock
STOP_SECONDS = 60.0  # for a trainer to finish its step and save
KILL_SECONDS = 10.0
STOPPED_SECONDS = 1.0  # from the end of a supervisor to the note that it was asked for
RESTART_SECONDS = 10.0  # from the end of a supervisor to the next one, also by systemd
LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is: a command in the project's folder, and what its environment adds."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    run: str | None = None  # the folder of the run, where a trainer's restarts are recorded


@dataclass(frozen=True, slots=True)
class Life:
    """What a supervisor says of its worker."""

    since: float  # unix seconds
    restarts: int = 0
    code: int | None = None  # once it has ended
    stopped: bool = False  # because somebody asked for it


def main(arguments: Sequence[str]) -> int:
    """check and start (jobs as JSON lines), restart, run, stop, status, follow, enable, disable."""
    command, *names = arguments
    if command == "check":
        return check(jobs_of(sys.stdin.read()))
    if command == "start":
        return start(jobs_of(sys.stdin.read()))
    if command == "restart":
        return restart(names)
    if command == "run":
        return run(read_job(names[0]))
    if command == "stop":
        return max([stop(name) for name in names], default=0)
    if command == "status":
        return say_status(names)
    if command == "follow":
        return follow(names[1:], lines=int(names[0]))
    if command in ("enable", "disable"):
        return service_units.main(command, names)
    raise ConfigError(f"{command!r} is not a command of the keeper")


def jobs_of(text: str) -> list[Job]:
    """One JSON object a line."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [Job(row["name"], tuple(row["command"]), row["env"], run=row["run"]) for row in rows]


def job_text(job: Job) -> str:
    """A line for `jobs_of`."""
    return json.dumps(asdict(job))


def check(jobs: Sequence[Job]) -> int:
    """0 when each can be started, or runs already as it should. Raises ConfigError."""
    _check_whole()
    for job in jobs:
        if supervisor_of(job.name) and read_job(job.name) != job:
            raise ConfigError(
                f"{job.name} runs already with other settings; bin/lan stop {job.name} first"
            )
    return 0


def start(jobs: Sequence[Job]) -> int:
    """Start each detached; one that runs already stays. Raises ConfigError, before any starts."""
    check(jobs)
    FOLDER.mkdir(exist_ok=True)
    for job in jobs:
        if pid := supervisor_of(job.name):
            sys.stdout.write(f"{job.name}: runs already pid={pid}\n")
            continue
        replace_file(_file(job.name, "json"), job_text(job).encode())
        _file(job.name, "life").unlink(missing_ok=True)
        _detach(job.name)
        sys.stdout.write(f"{job.name}: started pid={_started(job.name)}\n")
    return 0


def restart(names: Sequence[str]) -> int:
    """Stop, then start as before. Raises ConfigError, before any is stopped."""
    _check_whole()
    jobs = [read_job(name) for name in names]
    return max(map(stop, names), default=0) or start(jobs)


def run(job: Job) -> int:
    """Supervise until the worker is done, stopped, or given up; an exit code."""
    _lock(job.name)
    os.environ.update(job.env)
    life = Life(since=time.time())
    _write_life(job.name, life)
    restarts = 0
    forward = _recorder(job)

    def record(event: str, **fields: object) -> None:
        nonlocal restarts
        restarts += event == "restart"
        _write_life(job.name, replace(life, restarts=restarts))
        if forward:
            forward(event, **fields)

    log = _file(job.name, "log")
    worker = Worker(job.name, job.command)
    code = supervise([worker], record=record, on_tick=lambda _: logs.bound(log))
    _write_life(job.name, replace(life, restarts=restarts, code=code))
    return code


def stop(name: str) -> int:
    """Ask a worker to end, wait for it, and kill what will not; 0 once it is gone."""
    pid = supervisor_of(name)
    if pid is None:
        sys.stdout.write(f"{name}: does not run\n")
        return 0
    for number, seconds in (
        (signal.SIGTERM, STOP_SECONDS),
        (signal.SIGTERM, KILL_SECONDS),  # the second one is no request any more
        (signal.SIGKILL, KILL_SECONDS),
    ):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        if _gone_within(name, seconds):
            _write_life(name, replace(_life(name) or Life(time.time()), stopped=True))
            sys.stdout.write(f"{name}: stopped\n")
            return 0
    sys.stdout.write(f"{name}: will not end, pid={pid}\n")
    return 1


def say_status(names: Sequence[str]) -> int:
    """A JSON object a line for each name: name, state, pid, since, restarts, code, last, tail."""
    for name in names:
        pid, life, tail = supervisor_of(name), _life(name), _tail(name)
        row = {
            "name": name,
            "state": _state(pid, life),
            "pid": pid,
            "since": life.since if life else None,
            "restarts": life.restarts if life else 0,
            "code": life.code if life else None,
            "tail": tail,
        }
        sys.stdout.write(f"{json.dumps(row)}\n")
    return 0


def follow(names: Sequence[str], *, lines: int) -> int:
    """Print the last lines of the logs and all that come, until the workers or the reader end."""
    for name in names:
        _file(name, "log").touch()
    places = {name: logs.near_end(_file(name, "log"), lines) for name in names}
    seen = float("-inf")  # monotonic seconds, when one of them ran
    while True:
        alive, said = [name for name in names if supervisor_of(name)], False
        for name in names:
            come, places[name] = logs.lines_since(_file(name, "log"), places[name])
            sys.stdout.writelines(f"{name} | {line}\n" for line in come)
            said = said or bool(come)
        sys.stdout.flush()
        if alive:
            seen = time.monotonic()
        elif not said and time.monotonic() - seen > _patience(names):
            return 0
        if _reader_left(LOOK_SECONDS):
            return 0


def _patience(names: Sequence[str]) -> float:
    """Seconds until workers that do not run will not be started again, as it seems."""
    lives = [_life(name) for name in names]
    have_ended = all(life and life.code is not None and not life.stopped for life in lives)
    return STOPPED_SECONDS if have_ended else RESTART_SECONDS


def supervisor_of(name: str) -> int | None:
    """The process id of a worker's supervisor, None when there is none."""
    try:
        with _file(name, "lock").open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read() or 0) or None
    except FileNotFoundError:
        return None
    return None


def read_job(name: str) -> Job:
    """The job of a worker that was started here before. Raises ConfigError."""
    try:
        (job,) = jobs_of(_file(name, "json").read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{name} was never started here; run bin/lan up") from None
    return job


def _check_whole() -> None:
    if HALF_COPIED.exists():
        raise ConfigError("the code here is half copied, a sync was cut off; run bin/lan sync")


def _lock(name: str) -> None:
    """Hold the worker's lock to the end of this process. Raises ConfigError when another does."""
    deadline = time.monotonic() + 2.0  # somebody who only looks holds it for a moment
    lock = os.open(_file(name, "lock"), os.O_RDWR | os.O_CREAT, 0o644)  # the kernel closes it
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConfigError(f"{name} runs already; bin/lan stop {name} first") from None
            time.sleep(0.02)
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())


def _recorder(job: Job) -> Record | None:
    if job.run is None:
        return None
    from peralta_zmq.operate.local import event_recorder  # slow to import: it reads the config

    return event_recorder(Path(job.run))


def _detach(name: str) -> None:
    """Start `run` so that it outlives us and our terminal; its words go to the worker's log."""
    words = [sys.executable, "-m", "peralta_zmq.operate.supervisor", "run", name]
    log = _file(name, "log")
    log.touch()
    if service_units.systemd_keeps_us() and service_units.given_to_systemd(name, words, log):
        return
    with log.open("ab") as output:
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _started(name: str) -> int:
    """The process id, once the supervisor has its lock. Raises ConfigError when it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        pid, life = supervisor_of(name), _life(name)
        if pid and life:
            return pid
        if life and life.code is not None:
            break
        time.sleep(0.02)
    tail = " / ".join(_tail(name)[-3:])
    raise ConfigError(f"{name} did not start; the end of {_file(name, 'log')}: {tail}")


def _gone_within(name: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while supervisor_of(name):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _state(pid: int | None, life: Life | None) -> str:
    if pid:
        return "running"
    if life is None:
        return "not started"
    if life.stopped:
        return "stopped"
    if life.code is None:
        return "killed with its supervisor"
    return {0: "done", 1: "given up", BAD_CONFIG: "refused"}.get(life.code, "ended")


def _reader_left(seconds: float) -> bool:
    """Whether standard input has ended: the connection is gone, and so is who reads us."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1024)


def _tail(name: str) -> list[str]:
    return logs.tail(_file(name, "log"), NUM_LOG_LINES + 1)  # the supervisor's last word is one


def _life(name: str) -> Life | None:
    try:
        return Life(**json.loads(_file(name, "life").read_text("utf-8")))
    except FileNotFoundError:
        return None


def _write_life(name: str, life: Life) -> None:
    replace_file(_file(name, "life"), json.dumps(asdict(life)).encode())


def _file(name: str, kind: str) -> Path:
    return FOLDER / f"{name}.{kind}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PeraltaError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BAD_CONFIG)
