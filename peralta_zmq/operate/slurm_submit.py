"""Jobs of a run on a Slurm cluster: settings, scripts and options of sbatch.

The trainer is one job, on one or several nodes; the generators are the tasks of a job array, which
may be preempted and queued again at any time. Every job runs operate/slurm_job.py in the current
folder. This folder and the run folder must be shared by all nodes, under the same path. In the run
folder are

    slurm/config-HASH.toml  the settings of all jobs; HASH is of the content
    slurm/keys/             CURVE keys, if the settings name no other folder
    slurm/addresses/        the address of the newest trainer (wire.address_dir)
    slurm/NAME.json         state of a worker, written by its job (slurm_job.JobState)
    logs/NAME.log           output of a worker's job
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.config import Config
from peralta_zmq.config.hosts import Slurm, SlurmJob
from peralta_zmq.config.resolved import toml_text
from peralta_zmq.errors import ConfigError
from peralta_zmq.http_server import is_loopback
from peralta_zmq.operate import host_setup, slurm_job, slurm_queue, ssh
from peralta_zmq.operate.slurm_job import (
    TRAINER,
    WARNING_SECONDS,
    generator_name,
    log_file,
    state_file,
)

GENERATORS = "generators"  # name of the job array, and of all generators as an argument
# Part of an error of sbatch, the settings that may cause it, and the remedy. The first one counts:
# "Invalid account or account/partition combination" is about the account.
REFUSALS = (
    (
        "qos policy",
        ("count", "nodes", "cpus", "gpus", "time"),
        "lower them to your limits (sacctmgr show associations, sacctmgr show qos)",
    ),
    ("account", ("account",), "choose one of sacctmgr show associations"),
    ("partition", ("partition",), "choose one that sinfo lists as up"),
    ("time", ("time",), "lower it to the limit of the partition (sinfo)"),
    ("gres", ("gpus",), "sinfo --format='%P %G' lists the GPUs of each partition"),
    ("node co", ("nodes", "cpus", "gpus"), "sinfo --Node --long lists what the nodes have"),
)


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """The jobs of a run, as recorded in the file .lan/slurm-NAME.json."""

    run_folder: str
    arguments: dict[str, list[str]]  # of sbatch, by TRAINER and GENERATORS
    scripts: dict[str, str]
    jobs: dict[str, str] = field(default_factory=dict[str, str])  # id by name of the worker


def plan_run(settings: Slurm, config: Config) -> SubmittedRun:
    """The jobs of a run before they are submitted; `config` is from `cluster_config`."""
    folder = config.run_folder.resolve()
    trainer, generators = settings.trainer, settings.generators
    ranks = max(1, trainer.gpus)
    log = log_file(folder, TRAINER)
    common = [
        *("--requeue", "--open-mode=append", f"--signal=B:USR1@{WARNING_SECONDS}"),
        *("--ntasks-per-node=1", f"--job-name={config.run.name}"),
    ]
    arguments = {
        TRAINER: [
            *(*common, f"--nodes={trainer.nodes}", f"--output={log}"),
            *_resources(trainer, processes=ranks),
        ],
        GENERATORS: [
            *(*common, "--nodes=1", f"--output={log.with_name('generator-%a.log')}"),
            *_resources(generators),
        ],
    }
    scripts = {
        TRAINER: job_script(settings, config, (TRAINER, str(ranks))),
        GENERATORS: job_script(settings, config, ("generator", str(generators.count))),
    }
    return SubmittedRun(str(folder), arguments, scripts)


def check_array_size(count: int) -> None:
    """Raise ConfigError if there are more generators than a job array may have."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", slurm_queue.read_settings(), re.MULTILINE)
    if match and count > int(match[1]):
        raise ConfigError(
            f"slurm.generators.count {count} is more than a job array of this cluster may "
            f"have (MaxArraySize); set it to {match[1]} or less"
        )


def sbatch(settings: Slurm, run: SubmittedRun, name: str, *options: str) -> str:
    """Submit the job `name`, TRAINER or GENERATORS; returns the job's id.

    With the option --test-only, nothing is submitted and returned. Raises ConfigError, with the
    setting that causes it, if Slurm refuses the job.
    """
    words = ("sbatch", *options, *run.arguments[name])
    result = ssh.run(ssh.Command(words, run.scripts[name]))
    if result.returncode:
        job = settings.trainer if name == TRAINER else settings.generators
        raise ConfigError(_refusal(name, job, ssh.last_line(result)))
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


def job_script(settings: Slurm, config: Config, worker: Sequence[str]) -> str:
    """The script of a job; `worker` are the last arguments of operate/slurm_job.py."""
    command = (
        *(sys.executable, "-m", "peralta_zmq.operate.slurm_job"),
        *(str(config.run_folder.resolve()), str(settings_file(config)), *worker),
    )
    # srun starts a process on each node; it ignores the number of cores of the job.
    has_nodes = worker[0] == TRAINER and settings.trainer.nodes > 1
    srun = 'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" '
    srun = srun if has_nodes else ""
    name, job = TRAINER, "$SLURM_JOB_ID"
    if worker[0] != TRAINER:
        task = "$SLURM_ARRAY_TASK_ID"
        name, job = generator_name(task), f"${{SLURM_ARRAY_JOB_ID}}_{task}"
    folder = shlex.quote(str(config.run_folder.resolve()))
    state = f'{folder}/"{state_file(Path(), name)}"'
    lines = [
        "#!/bin/bash",
        f"cd {shlex.quote(str(Path.cwd()))} || exit",
        # A first state (JobState) before `setup`: it shows that the run folder is shared.
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
    """Options of sbatch for the resources of a job with `processes` on each node."""
    options = {
        "partition": job.partition,
        "account": job.account,
        "cpus-per-task": job.cpus * processes,
        "gpus-per-node": job.gpus or None,
        "time": job.time,
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*given, *job.options]


def prepare_folder(config: Config, generators: Sequence[str]) -> None:
    """Write the files in the run folder that the jobs need. Raises ConfigError."""
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


def _refusal(name: str, job: SlurmJob, error: str) -> str:
    """Message for a job that sbatch refuses with `error`."""
    for part, settings, remedy in REFUSALS:
        if part in error.lower():
            values = {each: getattr(job, each) for each in settings if hasattr(job, each)}
            shown = ", ".join(
                each if value is None else f"{each} {value}" for each, value in values.items()
            )
            return f"slurm.{name}.{shown}: {error}; {remedy}"
    return f"slurm.{name}: {error}; correct the settings of the job in the hosts file"
