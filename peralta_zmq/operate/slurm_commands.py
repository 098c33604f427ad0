"""Jobs of a run on a Slurm cluster: scripts and options of sbatch; states, signals, cancellation.

The trainer is one job, on one or several nodes; the generators are the tasks of a job array, which
may be preempted and queued again at any time. Every job runs operate/slurm_job.py in the current
folder, which all nodes must share under the same path, like the run folder. In the run folder are

    slurm/config-HASH.toml  the settings of all jobs; HASH is of the content
    slurm/keys/             CURVE keys, if the settings name no other folder
    slurm/addresses/        the address of the newest trainer (wire.address_dir)
    slurm/NAME.json         state of a worker (supervisor.State), written by its job
    logs/NAME.log           output of a worker's job
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from peralta_zmq.addresses import is_loopback
from peralta_zmq.atomic_files import replace_file
from peralta_zmq.config import Config
from peralta_zmq.config.hosts import Slurm, SlurmJob
from peralta_zmq.config.resolved import toml_text
from peralta_zmq.errors import ConfigError, printable
from peralta_zmq.operate import host_setup, slurm_job, ssh
from peralta_zmq.operate.slurm_job import (
    TRAINER,
    WARNING_SECONDS,
    generator_name,
    log_file,
    state_file,
)

ENDED = {
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"),
    *("DEADLINE", "OUT_OF_MEMORY", "REVOKED"),
}
GENERATORS = "generators"  # name of the job array, and of all generators as an argument


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """The jobs of a run, as recorded in the file .lan/slurm-NAME.json."""

    run_folder: str
    arguments: dict[str, list[str]]  # options of sbatch, by TRAINER and GENERATORS
    scripts: dict[str, str]
    jobs: dict[str, str] = field(default_factory=dict[str, str])  # id by name of the worker


def plan_run(settings: Slurm, config: Config) -> SubmittedRun:
    """The jobs of a run before they are submitted; `config` is from `cluster_config`."""
    folder = config.run_folder.resolve()
    trainer = settings.trainer
    generators = settings.generators
    ranks = max(1, trainer.gpus)
    log = log_file(folder, TRAINER)
    common = (
        *("--requeue", "--open-mode=append", f"--signal=B:USR1@{WARNING_SECONDS}"),
        *("--ntasks-per-node=1", f"--job-name={config.run.name}"),
    )
    arguments = {
        TRAINER: [
            *(*_resources(trainer, processes=ranks), *common),
            *(f"--nodes={trainer.nodes}", f"--output={log}"),
        ],
        GENERATORS: [
            *(*_resources(generators), *common),
            *("--nodes=1", f"--output={log.with_name('generator-%a.log')}"),
        ],
    }
    scripts = {
        TRAINER: job_script(settings, config, TRAINER, str(ranks)),
        GENERATORS: job_script(settings, config, "generator"),
    }
    return SubmittedRun(str(folder), arguments, scripts)


def sbatch(run: SubmittedRun, name: str, *options: str) -> str:
    """Submit the job `name`, TRAINER or GENERATORS; returns its id, or nothing with --test-only.

    Raises ConfigError if Slurm refuses the job.
    """
    words = ("sbatch", *run.arguments[name], *options)  # the last of two equal options counts
    result = ssh.run(ssh.Command(words, run.scripts[name]))
    if result.returncode:
        raise ConfigError(
            f"slurm.{name}: {ssh.last_line(result)}; correct its settings in the hosts file"
        )
    return result.stdout.strip().split(";")[0]  # ID or ID;CLUSTER


def cluster_config(config: Config) -> Config:
    """The settings of all jobs: generators find the trainer and the keys in the run folder."""
    folder = config.run_folder.resolve() / slurm_job.STATES
    wire = {"address_dir": config.wire.address_dir or str(folder / "addresses")}
    if is_loopback(config.wire.bind):
        wire["bind"] = "0.0.0.0"
    security = {}
    if not (config.security.keys or config.security.insecure):
        security["keys"] = str(folder / "keys")
    return config.model_copy(
        update={
            "wire": config.wire.model_copy(update=wire),
            "security": config.security.model_copy(update=security),
        }
    )


def settings_file(config: Config) -> Path:
    """Path of the settings file of the jobs; jobs of other settings have another."""
    name = host_setup.settings_file(config).name
    return config.run_folder.resolve() / slurm_job.STATES / name


def job_script(settings: Slurm, config: Config, *worker: str) -> str:
    """The script of a job; `worker` are the last arguments of operate/slurm_job.py."""
    folder = config.run_folder.resolve()
    command = (
        *(sys.executable, "-m", "peralta_zmq.operate.slurm_job"),
        *(str(folder), str(settings_file(config)), *worker),
    )
    name = TRAINER
    job = "$SLURM_JOB_ID"
    srun = ""
    if worker[0] != TRAINER:
        task = "$SLURM_ARRAY_TASK_ID"
        name = generator_name(task)
        job = f"${{SLURM_ARRAY_JOB_ID}}_{task}"
    elif settings.trainer.nodes > 1:
        # srun starts a process on each node; it ignores the number of cores of the job.
        srun = 'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" '
    state = f'{shlex.quote(str(folder))}/"{state_file(Path(), name)}"'
    lines = [
        "#!/bin/bash",
        f"cd {shlex.quote(str(Path.cwd()))} || exit",
        "export PYTHONSAFEPATH=1",  # a random.py there hides no module
        # A first State before `setup`: it shows that the run folder is shared.
        f"""printf '{{"job": "%s", "node": "%s"}}' "{job}" "$SLURMD_NODENAME" > {state}""",
        # The script runs on the first node, which has the trainer's rank 0.
        'PERALTA_ADDRESS=$(scontrol show node "$SLURMD_NODENAME" |',
        "  sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
        'export PERALTA_ADDRESS="${PERALTA_ADDRESS:-$SLURMD_NODENAME}"',
        *([settings.setup] if settings.setup else []),
        f"exec {srun}{shlex.join(command)}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _resources(job: SlurmJob, *, processes: int = 1) -> list[str]:
    options = {
        "partition": job.partition,
        "account": job.account,
        "cpus-per-task": job.cpus * processes,
        "gpus-per-node": job.gpus or None,
        "time": job.time,
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*job.options, *given]  # sbatch uses the last one of two equal options


def prepare_folder(config: Config, generators: Sequence[str]) -> None:
    """Write the settings of the jobs, and make missing keys. Raises ConfigError."""
    file = settings_file(config)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        log_file(config.run_folder, TRAINER).parent.mkdir(exist_ok=True)
        replace_file(file, toml_text(config).encode(), mode=0o600)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written ({error.strerror}); choose another --run.dir"
        ) from None
    if keys := config.keys_folder:
        host_setup.make_keys(keys, generators)


# Submitted jobs.


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A line of squeue."""

    state: str  # as Slurm names it
    node: str
    reason: str  # why the job waits
    started: float | None = None  # unix seconds

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def find_jobs(jobs: Collection[str]) -> dict[str, JobStatus]:
    """Status by id of those jobs that Slurm lists, also for some minutes after their end.

    Raises ConfigError if squeue fails. Its JSON output would need a plugin that not all clusters
    have.
    """
    if not jobs:
        return {}
    words = ("squeue", "--noheader", "--array", "--states=all", "--format=%F|%K|%T|%N|%r|%S")
    result = ssh.run(ssh.Command((*words, f"--jobs={','.join(array_ids(jobs))}")))
    if result.returncode and "Invalid job id" not in result.stderr:  # none is listed
        raise ConfigError(f"squeue: {ssh.last_line(result)}; is the Slurm controller running?")
    statuses = parse_squeue(result.stdout)
    return {job: statuses[job] for job in jobs if job in statuses}


def parse_squeue(text: str) -> dict[str, JobStatus]:
    """Parse lines ID|TASK|STATE|NODES|REASON|START of squeue; the key is ID or ID_TASK."""
    statuses: dict[str, JobStatus] = {}
    for line in text.splitlines():
        job, task, state, node, reason, start = line.split("|")
        key = f"{job}_{task}" if task.isdigit() else job
        started = None
        with suppress(ValueError):  # N/A, or in the user's SLURM_TIME_FORMAT
            started = datetime.fromisoformat(start).timestamp()
        statuses[key] = JobStatus(state, node, reason, started)
    return statuses


def array_ids(jobs: Collection[str]) -> list[str]:
    """Ids of jobs and of whole arrays: one command line cannot have thousands of ids."""
    return sorted({job.partition("_")[0] for job in jobs})


def wait_for_end(jobs: Collection[str], seconds: float) -> list[str]:
    """Wait up to `seconds` until the jobs have ended; returns those that have not."""
    deadline = time.monotonic() + seconds
    while True:
        statuses = find_jobs(jobs)
        active = [job for job, status in statuses.items() if not status.has_ended]
        if not active or time.monotonic() > deadline:
            return active
        time.sleep(0.5)


def signal_jobs(jobs: Collection[str], signal_name: str) -> None:
    statuses = find_jobs(jobs)
    if running := [job for job, status in statuses.items() if status.state == "RUNNING"]:
        cancel("--batch", f"--signal={signal_name}", *running)


def cancel(*arguments: str) -> None:
    result = ssh.run(ssh.Command(("scancel", *arguments)))
    if result.returncode:
        sys.stderr.write(f"scancel: {printable(ssh.last_line(result))}\n")
