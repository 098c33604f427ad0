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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.config import Config, earlier_config
from peralta_zmq.config.hosts import Slurm
from peralta_zmq.errors import ConfigError, program_name
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
from peralta_zmq.operate.supervisor import FOLDER, State, activity_of, name_of
from peralta_zmq.operate.worker_logs import LogPrinter, tail_of

UNSHARED = "unshared"  # state of a worker whose started job has not written its state
STATE_NAMES = {  # names of Slurm's states in the status table; the others are in lower case
    "PENDING": "queued", "COMPLETED": "done", "CANCELLED": "stopped", "TIMEOUT": "time limit",
    "NODE_FAIL": "node failed", "OUT_OF_MEMORY": "no memory", "COMPLETING": "ending",
}  # fmt: skip


@dataclass
class SlurmLauncher:
    """Commands of bin/lan for the jobs of a [slurm] table, with the methods of lan.SshLauncher."""

    settings: Slurm
    hosts_file: Path
    dry_run: bool = False
    stop_seconds: float = 60.0  # from SIGTERM to the cancellation of a job
    poll_seconds: float = 3.0  # between two calls of squeue
    log_sizes: dict[str, int] = field(default_factory=dict[str, int])  # before `up`, by worker

    def __post_init__(self) -> None:
        """Raises ConfigError if Slurm's commands are missing on this machine."""
        if not (self.dry_run or shutil.which("sbatch")):
            raise ConfigError(
                f"there is no sbatch on this machine; run {program_name('lan')} on a login node of "
                "the Slurm cluster"
            )
        self._record_file = FOLDER / f"slurm-{self.hosts_file.stem}.json"

    # Starting.

    def up(self, config: Config) -> int:
        """Submit the jobs of all workers that have no waiting or running job."""
        config = slurm_commands.cluster_config(config)
        earlier_config(config, config.run_folder)  # raises ConfigError for other settings
        plan = slurm_commands.plan_run(self.settings, config)
        if self.dry_run:
            for name, script in plan.scripts.items():
                command = ssh.Command(("sbatch", *plan.arguments[name])).shown
                sys.stdout.write(f"# {name}\n{command} <<'END'\n{script}END\n")
            return 0
        jobs = self._active_jobs(plan)
        generators = [generator_name(index) for index in range(self.settings.generators.count)]
        names = [name for name in (TRAINER, *generators) if name not in jobs]
        # Nothing is submitted if Slurm refuses one of the jobs.
        if TRAINER in names:
            sbatch(plan, TRAINER, "--test-only")
        if array := _array_option(names):
            sbatch(plan, GENERATORS, "--test-only", *array)
        slurm_commands.prepare_folder(config, generators)
        logs = {name: log_file(Path(plan.run_folder), name) for name in names}
        self.log_sizes = {name: log.stat().st_size for name, log in logs.items() if log.exists()}
        self._submit(replace(plan, jobs=jobs), names)
        return 0

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
        if not self._record_file.exists():
            return {}
        run = self._submitted()
        statuses = find_jobs(run.jobs.values())
        active = {
            name: job
            for name, job in run.jobs.items()
            if job in statuses and not statuses[job].has_ended
        }
        if active and replace(run, jobs={}) != plan:
            raise ConfigError(
                f"{next(iter(active))} is already queued or running with other settings; "
                f"{program_name('lan')} down --hosts {self.hosts_file} first"
            )
        return active

    def _submit(self, run: SubmittedRun, names: Sequence[str]) -> None:
        """Submit jobs for these workers, and record their ids."""
        if TRAINER in names:
            # Generators that start before this job would end if the file shows an ended run.
            state_file(Path(run.run_folder), TRAINER).unlink(missing_ok=True)
            run = self._record(run, {TRAINER: sbatch(run, TRAINER, "--parsable")})
        if array := _array_option(names):
            # Generators occupy no nodes before the trainer has started.
            wait = (f"--dependency=after:{run.jobs[TRAINER]}",) if TRAINER in names else ()
            job = sbatch(run, GENERATORS, "--parsable", *array, *wait)
            tasks = {name: f"{job}_{_index(name)}" for name in names if name != TRAINER}
            run = self._record(run, tasks)
        for name in names:
            sys.stdout.write(f"{name}: submitted as job {run.jobs[name]}\n")

    # A run in progress.

    def rows(self) -> list[Row]:
        """The status of every worker."""
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
        """Print the logs of these workers (all without names); False after Ctrl-C."""
        run = self._submitted()
        selected = self._select(run, names)
        logs = {name: log_file(Path(run.run_folder), name) for name in selected}
        printer = LogPrinter(logs, lines=lines)
        printer.offsets |= self.log_sizes
        reported = set[str]()
        polled_at = float("-inf")
        have_ended = False
        try:
            while not have_ended:
                if time.monotonic() - polled_at > self.poll_seconds:
                    polled_at = time.monotonic()
                    rows = [row for row in self._states() if row["name"] in selected]
                    have_ended = not any(row["is_active"] for row in rows)
                    unshared = {str(row["name"]) for row in rows if row["state"] == UNSHARED}
                    for name in unshared - reported:
                        sys.stdout.write(f"{name}: {_unshared_text(logs[name])}\n")
                    reported |= unshared
                printer.print_new()
                time.sleep(min(0.5, self.poll_seconds))
        except KeyboardInterrupt:
            print_detached(self.hosts_file)
            return False
        return True

    def control(self, command: str, names: Sequence[str]) -> int:
        """Stop or restart these workers (all without names); returns an exit code."""
        run = self._submitted()
        selected = self._select(run, names)
        if command == "restart":
            self._restart(run, selected)
        elif command in ("stop", "down"):
            self._stop({name: run.jobs[name] for name in selected})
        else:
            raise ConfigError(
                f"{command} is for hosts with ssh; Slurm starts its jobs after a boot"
            )
        return 0

    def _stop(self, jobs: Mapping[str, str]) -> None:
        """Send SIGTERM, and cancel the jobs that have not ended in time."""
        statuses = find_jobs(jobs.values())
        if waiting := [job for job, status in statuses.items() if status.state == "PENDING"]:
            slurm_commands.cancel(*waiting)
        slurm_commands.signal_jobs(jobs.values(), "TERM")
        active = slurm_commands.wait_for_end(jobs.values(), self.stop_seconds)
        if active:
            slurm_commands.cancel(*active)
        for name, job in jobs.items():
            sys.stdout.write(f"{name}: {'cancelled' if job in active else 'stopped'}\n")

    def _restart(self, run: SubmittedRun, names: Sequence[str]) -> None:
        """Restart running workers within their jobs; submit new jobs for ended workers."""
        statuses = find_jobs(run.jobs.values())
        ended = list[str]()
        for name in names:
            status = statuses.get(run.jobs[name])
            if status is None or status.has_ended:
                ended.append(name)
            else:
                state = "restarting" if status.state == "RUNNING" else "queued"
                sys.stdout.write(f"{name}: {state}\n")
        slurm_commands.signal_jobs([run.jobs[name] for name in names if name not in ended], "USR2")
        self._submit(run, ended)

    def _select(self, run: SubmittedRun, names: Sequence[str]) -> list[str]:
        """The workers with these names; all without names. Raises ConfigError."""
        for name in names:
            if name not in (*run.jobs, GENERATORS):
                choices = ", ".join((GENERATORS, *run.jobs))
                raise ConfigError(f"no worker {name!r}; there are {choices}")
        return [
            name
            for name in run.jobs
            if not names or name in names or (GENERATORS in names and name != TRAINER)
        ]

    # The record of the jobs.

    def _submitted(self) -> SubmittedRun:
        """The jobs of the latest `up`. Raises ConfigError if there was none."""
        try:
            return SubmittedRun(**json.loads(self._record_file.read_text("utf-8")))
        except FileNotFoundError:
            raise ConfigError(
                f"no jobs were submitted with --hosts {self.hosts_file} in this folder; "
                f"run {program_name('lan')} up"
            ) from None

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
    ended = None if is_active else state
    tail = list[str]()
    if ended and (ended.stopped or ended.code is not None):
        shown = name_of(ended)
    elif status is None:
        shown = "ended"
    else:
        shown = STATE_NAMES.get(status.state, status.state.lower())
    if status and status.state == "PENDING":
        tail = [f"waiting: {status.reason}"]
    if status and state is None and _should_have_written(status):
        shown = UNSHARED
        tail = [_unshared_text(log_file(folder, name))]
    node = status.node if status else state.node if state else ""
    return {
        "name": name,
        "host": node or "-",
        "state": shown,
        "since": status.started if status and status.state == "RUNNING" else None,
        "restarts": state.restarts if state else 0,
        "is_active": is_active,
        "code": ended.code if ended else None,
        "tail": tail,
    }


def _should_have_written(status: JobStatus) -> bool:
    """Whether the state of a running or failed job should have appeared in the run folder.

    It may take a minute on a network file system. A job fails at once on a node that lacks the
    folder of its log or the current folder.
    """
    since = time.time() if status.started is None else status.started
    is_late = status.state == "RUNNING" and time.time() - since > 60.0
    return is_late or status.state == "FAILED"


def _unshared_text(log: Path) -> str:
    return (
        f"the job has written nothing to {log.parents[1]}; all nodes must share that folder and "
        f"{Path.cwd()}, under the same paths: set run.dir to a shared folder (see {log})"
    )
