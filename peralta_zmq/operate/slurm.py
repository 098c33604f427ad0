"""`bin/lan --launcher slurm`: start and control a run as jobs of a Slurm cluster.

slurm_commands.py describes the jobs and the files in the run folder. The ids of the jobs are in
.lan/slurm-NAME.json in the current folder, where NAME is that of the hosts file.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.config import Config, earlier_config
from peralta_zmq.config.hosts import Slurm
from peralta_zmq.errors import ConfigError, printable, program_name
from peralta_zmq.operate import slurm_commands, ssh
from peralta_zmq.operate.lan_monitor import Row, print_detached
from peralta_zmq.operate.slurm_commands import (
    GENERATORS,
    JobStatus,
    SubmittedRun,
    find_jobs,
    sbatch,
)
from peralta_zmq.operate.slurm_job import (
    TRAINER,
    generator_name,
    log_file,
    read_state,
    state_file,
)
from peralta_zmq.operate.supervisor import (
    FOLDER,
    State,
    activity_of,
    name_of,
)
from peralta_zmq.operate.worker_logs import LogPrinter, tail_of

SHARED_SECONDS = 60.0  # for the state of a started job to appear in the run folder
UNSHARED = "unshared"  # state of a worker whose started job has not written its state
STATE_NAMES = {  # of Slurm's states in the status table; the others are in lower case
    "PENDING": "queued", "COMPLETED": "done", "CANCELLED": "stopped", "TIMEOUT": "time limit",
    "NODE_FAIL": "node failed", "OUT_OF_MEMORY": "no memory", "COMPLETING": "ending",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Waits:
    """Times of the launcher in seconds."""

    queue: float = 10.0  # for the trainer's job to start, before `up` continues without it
    stop: float = 60.0  # for a worker to end after SIGTERM, before its job is cancelled
    poll: float = 3.0  # between two calls of squeue while logs are printed
    follow: float = 0.5  # between two reads of logs and states


class SlurmLauncher:
    """Commands of bin/lan for the jobs of a [slurm] table (see lan.Launcher)."""

    def __init__(
        self,
        settings: Slurm,
        hosts_file: Path,
        *,
        dry_run: bool = False,
        waits: Waits | None = None,
    ) -> None:
        """Raises ConfigError if Slurm's commands are missing on this machine."""
        self._settings = settings
        self._hosts_file = hosts_file
        self._dry_run = dry_run
        self._waits = waits or Waits()
        self._log_sizes: dict[str, int] = {}  # before the jobs were submitted, by worker
        self._record_file = FOLDER / f"slurm-{hosts_file.stem}.json"
        missing = [name for name in slurm_commands.COMMANDS if not shutil.which(name)]
        if missing and not dry_run:
            raise ConfigError(
                f"there is no {missing[0]} on this machine; run {program_name('lan')} on a login "
                "node of the Slurm cluster"
            )

    # Starting.

    def up(self, config: Config) -> int:
        """Submit the jobs of all workers that have no waiting or running job.

        Waits until the trainer's job is queued, or has written its state to the run folder.
        """
        config = slurm_commands.cluster_config(config)
        earlier_config(config, config.run_folder)  # raises ConfigError for other settings
        plan = slurm_commands.plan_run(self._settings, config)
        if self._dry_run:
            for name, script in plan.scripts.items():
                command = ssh.Command(("sbatch", *plan.arguments[name])).shown
                sys.stdout.write(f"# {name}\n{command} <<'END'\n{script}END\n")
            return 0
        count = self._settings.generators.count
        slurm_commands.check_array_size(count)
        jobs = self._active_jobs(plan)
        generators = [generator_name(index) for index in range(count)]
        names = [name for name in (TRAINER, *generators) if name not in jobs]
        # Nothing is submitted if Slurm refuses one of the jobs.
        if TRAINER in names:
            sbatch(self._settings, plan, TRAINER, "--test-only")
        if array := _array_option(names):
            sbatch(self._settings, plan, GENERATORS, "--test-only", *array)
        slurm_commands.prepare_folder(config, generators)
        logs = {name: log_file(Path(plan.run_folder), name) for name in names}
        self._log_sizes = {name: log.stat().st_size for name, log in logs.items() if log.exists()}
        return self._wait_for_trainer(self._submit(replace(plan, jobs=jobs), names))

    def sync(self, config: Config) -> int:
        """Raises ConfigError: nothing is copied."""
        raise ConfigError(
            "sync copies code to hosts with ssh, but jobs of Slurm run in this folder; restart "
            "the workers that should use the new code"
        )

    def _active_jobs(self, plan: SubmittedRun) -> dict[str, str]:
        """Ids of the waiting and running jobs, by worker.

        Raises ConfigError if they were submitted with other settings than those of `plan`.
        """
        try:
            run = self._read_record()
        except FileNotFoundError:
            return {}
        statuses = find_jobs(run.jobs.values())
        active = {
            name: job
            for name, job in run.jobs.items()
            if job in statuses and not statuses[job].has_ended
        }
        if active and replace(run, jobs={}) != plan:
            raise ConfigError(
                f"{next(iter(active))} is already queued or running with other settings; "
                f"{program_name('lan')} down --hosts {self._hosts_file} first"
            )
        return active

    def _submit(self, run: SubmittedRun, names: Sequence[str]) -> SubmittedRun:
        """Submit jobs for these workers; returns the run with their ids, which are recorded."""
        if TRAINER in names:
            # Generators that start before this job would end if the file shows an ended run.
            state_file(Path(run.run_folder), TRAINER).unlink(missing_ok=True)
            job = sbatch(self._settings, run, TRAINER, "--parsable")
            run = self._record(run, {TRAINER: job})
        if array := _array_option(names):
            # Generators occupy no nodes before the trainer has started.
            wait = (f"--dependency=after:{run.jobs[TRAINER]}",) if TRAINER in names else ()
            job = sbatch(self._settings, run, GENERATORS, "--parsable", *array, *wait)
            tasks = {name: f"{job}_{_index(name)}" for name in names if name != TRAINER}
            run = self._record(run, tasks)
        for name in names:
            sys.stdout.write(f"{name}: submitted as job {run.jobs[name]}\n")
        return run

    def _wait_for_trainer(self, run: SubmittedRun) -> int:
        """Wait until the trainer's job is queued or has written its state; else cancel all jobs."""
        job = run.jobs[TRAINER]
        folder = Path(run.run_folder)
        started = time.monotonic()
        while read_state(folder, TRAINER, job) is None:
            status = find_jobs([job]).get(job)
            log = log_file(folder, TRAINER)
            if log.exists() and log.stat().st_size > self._log_sizes.get(TRAINER, 0):
                return 0  # Slurm writes it on the node
            if not status or status.has_ended or is_unshared(status, None):
                break
            if status.state == "PENDING" and time.monotonic() - started > self._waits.queue:
                sys.stdout.write(f"{TRAINER}: queued, {printable(status.reason)}\n")
                return 0
            time.sleep(self._waits.follow)
        else:
            return 0
        slurm_commands.cancel(*slurm_commands.array_ids(run.jobs.values()))
        node = f" on {status.node}" if status and status.node else ""
        sys.stderr.write(
            f"{TRAINER}: job {job}{node}: {_unshared_text(log_file(folder, TRAINER))}\n"
        )
        return 1

    # A run in progress.

    def rows(self) -> list[Row]:
        folder = Path(self._submitted().run_folder)
        rows = self._states()
        for row in rows:
            tail = cast("list[str]", row["tail"]) or tail_of(log_file(folder, str(row["name"])))
            row["tail"] = tail
            if row["state"] == "running":
                row["state"] = activity_of(folder if row["name"] == TRAINER else None, tail)
        return rows

    def _states(self) -> list[Row]:
        run = self._submitted()
        statuses = find_jobs(run.jobs.values())
        folder = Path(run.run_folder)
        return [
            worker_row(folder, name, statuses.get(job), read_state(folder, name, job))
            for name, job in run.jobs.items()
        ]

    def exit_code(self) -> int:
        """The exit code of the trainer; 1 if it has none."""
        run = self._submitted()
        state = read_state(Path(run.run_folder), TRAINER, run.jobs[TRAINER])
        return 1 if state is None or state.code is None else state.code

    def follow_logs(self, names: Sequence[str], *, lines: int) -> bool:
        run = self._submitted()
        reported = set[str]()
        selected = self._select(run, names)
        logs = {name: log_file(Path(run.run_folder), name) for name in selected}
        printer = LogPrinter(logs, lines=lines)
        printer.offsets |= self._log_sizes
        polled_at = float("-inf")
        have_ended = False
        try:
            while not have_ended:
                if time.monotonic() - polled_at > self._waits.poll:
                    rows = [row for row in self._states() if row["name"] in selected]
                    have_ended = not any(row["is_active"] for row in rows)
                    unshared = {str(row["name"]) for row in rows if row["state"] == UNSHARED}
                    for name in unshared - reported:
                        sys.stdout.write(f"{name}: {_unshared_text(logs[name])}\n")
                    polled_at = time.monotonic()
                    reported = reported | unshared
                printer.print_new()
                time.sleep(self._waits.follow)
        except KeyboardInterrupt:
            print_detached(self._hosts_file)
            return False
        return True

    def control(self, command: str, names: Sequence[str]) -> int:
        """Stop or restart workers; Slurm itself queues the jobs of a node that boots."""
        run = self._submitted()
        selected = self._select(run, names)
        if command == "restart":
            return self._restart(run, selected)
        if command in ("stop", "down"):
            return self._stop({name: run.jobs[name] for name in selected})
        raise ConfigError(f"{command} is for hosts with ssh; Slurm starts its jobs after a boot")

    def _stop(self, jobs: Mapping[str, str]) -> int:
        """Send SIGTERM, and cancel the jobs that have not ended in time."""
        statuses = find_jobs(jobs.values())
        if waiting := [job for job, status in statuses.items() if status.state == "PENDING"]:
            slurm_commands.cancel(*waiting)
        slurm_commands.signal_jobs(jobs.values(), "TERM")
        active = slurm_commands.wait_for_end(jobs.values(), self._waits.stop)
        if active:
            slurm_commands.cancel(*active)
            active = slurm_commands.wait_for_end(active, self._waits.stop)
        for name, job in jobs.items():
            sys.stdout.write(f"{name}: {'still running' if job in active else 'stopped'}\n")
        return int(bool(active))

    def _restart(self, run: SubmittedRun, names: Sequence[str]) -> int:
        """Restart running workers within their jobs; submit new jobs for ended workers."""
        folder = Path(run.run_folder)
        statuses = find_jobs(run.jobs.values())
        found = {name: statuses[run.jobs[name]] for name in names if run.jobs[name] in statuses}
        ended = [name for name in names if name not in found or found[name].has_ended]
        running = [name for name in found if found[name].state == "RUNNING"]
        before = {name: read_state(folder, name, run.jobs[name]) for name in running}
        slurm_commands.signal_jobs([run.jobs[name] for name in running], "USR2")
        self._submit(run, ended)
        deadline = time.monotonic() + self._waits.stop
        waiting = set(running)
        while waiting and time.monotonic() < deadline:
            time.sleep(self._waits.follow)
            waiting = {
                name for name in waiting if read_state(folder, name, run.jobs[name]) == before[name]
            }
        for name in found.keys() - set(ended):
            result = "not restarted" if name in waiting else "restarted"
            sys.stdout.write(f"{name}: {result if name in running else 'queued'}\n")
        return int(bool(waiting))

    def _select(self, run: SubmittedRun, names: Sequence[str]) -> list[str]:
        for name in names:
            if name not in (*run.jobs, GENERATORS):
                choices = ", ".join((GENERATORS, *run.jobs))
                raise ConfigError(f"no worker {name!r}; there are {choices}")
        every_generator = not names or GENERATORS in names
        return [
            name
            for name in run.jobs
            if name in names or (every_generator if name != TRAINER else not names)
        ]

    # The record of the jobs.

    def _submitted(self) -> SubmittedRun:
        """The jobs of the latest `up`. Raises ConfigError if there was none."""
        try:
            return self._read_record()
        except FileNotFoundError:
            raise ConfigError(
                f"no jobs were submitted with --hosts {self._hosts_file} in this folder; "
                f"run {program_name('lan')} up"
            ) from None

    def _read_record(self) -> SubmittedRun:
        return SubmittedRun(**json.loads(self._record_file.read_text("utf-8")))

    def _record(self, run: SubmittedRun, jobs: Mapping[str, str]) -> SubmittedRun:
        run = replace(run, jobs={**run.jobs, **jobs})
        FOLDER.mkdir(exist_ok=True)
        replace_file(self._record_file, json.dumps(asdict(run)).encode(), mode=0o600)
        return run


def _array_option(names: Sequence[str]) -> list[str]:
    indexes = ",".join(_index(name) for name in names if name != TRAINER)
    return [f"--array={indexes}"] if indexes else []


def _index(generator: str) -> str:
    return generator.rpartition("-")[2]


def worker_row(folder: Path, name: str, status: JobStatus | None, state: State | None) -> Row:
    """The row of the status table for a worker; `state` is None if its job has written none."""
    is_active = status is not None and not status.has_ended
    node = status.node if status else state.node if state else ""
    row: Row = {
        "name": name,
        "host": node or "-",
        "state": _state_name(status, None if is_active else state),
        "since": None,
        "restarts": state.restarts if state else 0,
        "is_active": is_active,
        "code": state.code if state and not is_active else None,
        "tail": [],
    }
    if status and status.state == "PENDING":
        row["tail"] = [f"waiting: {status.reason}"]
    if status and status.state == "RUNNING":
        row["since"] = time.time() - status.seconds
    if status and is_unshared(status, state):
        row.update(state=UNSHARED, tail=[_unshared_text(log_file(folder, name))])
    return row


def is_unshared(status: JobStatus, state: State | None) -> bool:
    """Whether the state of a running or failed job should have appeared in the run folder.

    A job fails at once on a node that lacks the folder of its log or the current folder.
    """
    is_late = status.state == "RUNNING" and status.seconds > SHARED_SECONDS
    return state is None and (is_late or status.state == "FAILED")


def _state_name(status: JobStatus | None, state: State | None) -> str:
    if state and (state.stopped or state.code is not None):
        return name_of(state)
    return STATE_NAMES.get(status.state, status.state.lower()) if status else "ended"


def _unshared_text(log: Path) -> str:
    return (
        f"the job has written nothing to {log.parents[1]}; all nodes must share that folder and "
        f"{Path.cwd()}, under the same paths: set run.dir to a shared folder (see {log})"
    )
