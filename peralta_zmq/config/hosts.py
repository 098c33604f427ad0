"""Schema of a hosts file, which lists the machines (hosts) of a run or its jobs on a cluster.

bin/lan copies the project to these hosts and starts their workers. With a table [slurm] it submits
the workers as jobs of a Slurm cluster instead.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator
from pydantic_config import ConfigFileError, cli  # pyright: ignore[reportMissingTypeStubs]

from peralta_zmq.config.load import FILE_SIGN, check_files, reason_of
from peralta_zmq.config.sections import PlainName, Section, Store, Text
from peralta_zmq.errors import ConfigError, program_name

# A path may have no spaces or special characters, because the local shell and the shell on the host
# expand it.
PLAIN_FOLDER = re.compile(r"(~/|/)?[A-Za-z0-9_][A-Za-z0-9._+/-]*")
HOME_FOLDER = "~/peralta_zmq"
TIME_LIMIT = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")  # as sbatch accepts it: 30, 4:00:00, 2-12
MIN_MINUTES = 10  # of a time limit: a job is warned 2 to 3 minutes before it, and saves
# Options of sbatch that bin/lan sets itself, or that the jobs need; some have a short form.
OWN_OPTIONS = {
    **dict.fromkeys(("array", "a"), "slurm.generators.count"),
    **dict.fromkeys(("partition", "p"), "partition"),
    **dict.fromkeys(("account", "A"), "account"),
    **dict.fromkeys(("time", "t"), "time"),
    **dict.fromkeys(("nodes", "N"), "slurm.trainer.nodes"),
    **dict.fromkeys(("cpus-per-task", "c"), "cpus"),
    **dict.fromkeys(("gpus-per-node", "gpus", "G", "gres"), "gpus"),
    **dict.fromkeys(("output", "o", "error", "e", "open-mode", "requeue", "no-requeue"), ""),
    **dict.fromkeys(("dependency", "d", "job-name", "J", "parsable", "wrap", "chdir", "D"), ""),
    **dict.fromkeys(("signal", "ntasks-per-node", "ntasks", "n", "export", "export-file"), ""),
    **dict.fromkeys(("clusters", "cluster", "M", "test-only", "wait", "W"), ""),
}
# First letter of a short option, after flags without a value: -N4, -QN4.
SHORT_OPTION = re.compile(r"-[hHIkKOQsvV]*([^-])")


class Host(Section):
    """One machine and its workers."""

    name: PlainName
    """name of the host in logs; the workers of the host are NAME-trainer and NAME-0, NAME-1 ..."""
    ssh: Text | None = None
    """arguments for ssh, e.g. -p 2222 me@box or ssh://me@box:2222; None = this machine"""
    dir: Text | None = None
    """folder for a copy of the project; None = ~/peralta_zmq, or no copy if ssh is None"""
    python: Text = "python3"
    """Python 3.10 or later with which .venv is created on the host"""
    role: Literal["trainer", "generator"] = "generator"
    """trainer = this host runs the trainer; exactly one host has this role"""
    count: NonNegativeInt | None = None
    """number of generators; None = 1, or 0 on the trainer's host"""
    device: Text | None = None
    """cpu, cuda, cuda:1, mps or auto; None = model.device of the config"""
    weights_dir: Store | None = None
    """path of the weights folder on this host; None = weights.dir of the config"""
    env: dict[str, str] = Field(default={})
    """environment variables of the workers on this host"""

    @property
    def ssh_words(self) -> tuple[tuple[str, ...], str]:
        """Options of ssh, and the machine as [USER@]HOST, of IPv6 without brackets.

        -T: a terminal, which RequestTTY and -t ask for, would mix output and errors.
        """
        *options, machine = shlex.split(self.ssh or "") or [""]
        user, at, host = machine.removeprefix("ssh://").rstrip("/").rpartition("@")
        if "]:" in host or host.count(":") == 1:  # otherwise a colon is part of IPv6
            host, _, port = host.rpartition(":")
            options += ["-p", port]
        return (*options, "-T"), f"{user}{at}{host.strip('[]')}"

    @property
    def num_generators(self) -> int:
        """Number of generators on this host."""
        return self.count if self.count is not None else int(self.role == "generator")

    @property
    def workers(self) -> list[str]:
        """Names of the workers on this host."""
        trainers = [f"{self.name}-trainer"] if self.role == "trainer" else []
        return trainers + self.generators

    @property
    def generators(self) -> list[str]:
        """Names of the generators on this host."""
        return [f"{self.name}-{index}" for index in range(self.num_generators)]

    @property
    def folder(self) -> str | None:
        """Folder to which the project is copied; None = the workers run in this checkout."""
        return self.dir or (HOME_FOLDER if self.ssh else None)


class SlurmJob(Section):
    """Resources of the trainer's job, or of each generator's job."""

    partition: Text | None = None
    """partition (queue); None = the cluster's default"""
    account: Text | None = None
    """account that is charged; None = the user's default"""
    cpus: PositiveInt = 1
    """cores of each process: of the generator, or of each rank of the trainer"""
    gpus: NonNegativeInt = 0
    """GPUs on each node; the trainer has one rank on each of them"""
    time: Text | None = None
    """time limit, such as 4:00:00 or 2-00:00:00; the job is then queued again and continues; None =
    the partition's default"""
    options: tuple[Text, ...] = ()
    """more options of sbatch, such as --mem=16G or --constraint=a100"""

    @field_validator("time", mode="after")
    @classmethod
    def _check_time(cls, time: str | None) -> str | None:
        if time is not None and not TIME_LIMIT.fullmatch(time):
            raise ConfigError(
                f"time {time!r} is no time limit; write minutes, hours:minutes:seconds, or "
                "days-hours:minutes:seconds, such as 4:00:00"
            )
        if time is not None and _minutes(time) < MIN_MINUTES:
            raise ConfigError(
                f"time {time!r} is too short for a worker to start and save; "
                f"set it to {MIN_MINUTES} (minutes) or more"
            )
        return time

    @field_validator("options", mode="after")
    @classmethod
    def _check_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            name = option.split("=")[0]
            if not name.strip("-") or not name.startswith("-") or " " in option:
                raise ConfigError(
                    f"{option!r} in options is no single option of sbatch; write it as in "
                    '"--mem=16G", one string for each option'
                )
            if (setting := _setting_of(name)) is not None:
                remedy = f"set {setting} instead" if setting else "bin/lan sets it itself"
                raise ConfigError(f"{option!r} in options is not allowed: {remedy}")
        return options


def _setting_of(option: str) -> str | None:
    """The setting in place of an option of sbatch; None if the option is allowed.

    sbatch also accepts the beginning of a long name, and a value right after a short one.
    """
    if match := SHORT_OPTION.match(option):
        return OWN_OPTIONS.get(match[1])
    name = option.removeprefix("--")
    matches = (own for own in OWN_OPTIONS if len(own) > 1 and own.startswith(name))
    return next((OWN_OPTIONS[own] for own in matches), None)


class SlurmTrainer(SlurmJob):
    """Resources of the trainer's job."""

    nodes: PositiveInt = 1
    """machines of the trainer; with several, torchrun starts ranks on each of them"""


class SlurmGenerators(SlurmJob):
    """Resources of the generators, which are the tasks of one job array."""

    count: PositiveInt = 1
    """number of generators"""


class Slurm(Section):
    """The jobs of a run on a Slurm cluster."""

    setup: Text | None = None
    """line of shell that each job runs first, such as: module load cuda"""
    trainer: SlurmTrainer = SlurmTrainer()
    """the trainer's job, table [slurm.trainer]"""
    generators: SlurmGenerators = SlurmGenerators()
    """the array of generators, table [slurm.generators]"""


class Hosts(Section):
    """All machines of a run, or its jobs on a cluster."""

    config: Text = "configs/demo.toml"
    """config file on this machine; options of bin/lan override it"""
    host: tuple[Host, ...] = ()
    """the machines, one table [[host]] for each"""
    slurm: Slurm | None = None
    """jobs of a Slurm cluster, table [slurm]; instead of machines"""

    @property
    def trainer(self) -> Host:
        """The host with the trainer."""
        return next(host for host in self.host if host.role == "trainer")

    @property
    def generators(self) -> list[str]:
        """Names of all generators, in the order of the hosts."""
        return [name for host in self.host for name in host.generators]

    @model_validator(mode="after")
    def _check(self) -> Hosts:
        for host in self.host:
            _check_host(host)
        _check_listed_once(self.host)
        if self.host or self.slurm is None:
            _check_roles(self.host)
        return self


def _minutes(time: str) -> float:
    """Minutes of a time limit in sbatch's notation."""
    days, has_days, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if has_days or len(parts) == 3:  # hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:  # minutes[:seconds]
        hours = 0
        minutes, seconds = (*parts, 0)[:2]
    return 1440 * int(days or 0) + 60 * hours + minutes + seconds / 60


def load_hosts(path: Path) -> Hosts:
    """Read a hosts file. Raises ConfigError whose message begins with the file name."""
    arguments = [FILE_SIGN, str(path)]  # `cli` reads a file that is named on a command line
    try:
        check_files(arguments)
        return cli(Hosts, args=arguments)
    except (ConfigError, ConfigFileError, OSError, UnicodeDecodeError) as error:
        text = " ".join(reason_of(error, program_name("lan"), Hosts).split())
        raise ConfigError(f"{path}: {text}") from None


def _check_host(host: Host) -> None:
    """Raise ConfigError for an unusable dir, ssh or count of one host."""
    folder = host.dir or HOME_FOLDER
    if not PLAIN_FOLDER.fullmatch(folder) or ".." in folder.split("/"):
        raise ConfigError(
            f"host {host.name}: dir {folder!r} is not a plain path; use one like "
            f"{HOME_FOLDER}, of letters, digits, . _ + - and /"
        )
    try:
        _, machine = host.ssh_words
    except ValueError as error:
        raise ConfigError(
            f"host {host.name}: ssh {host.ssh!r}: {error}; quote arguments as in -o 'A B'"
        ) from None
    if host.ssh and (not machine or machine.startswith("-")):
        raise ConfigError(
            f"host {host.name}: ssh {host.ssh!r} must end with the host name, as in -p 2222 me@box"
        )
    if host.role == "generator" and host.count == 0:
        raise ConfigError(f"host {host.name}: count = 0 starts no worker; leave the host out")


def _check_listed_once(hosts: tuple[Host, ...]) -> None:
    """Raise ConfigError for equal names, and for equal machine and folder."""
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise ConfigError(
                f"host {name} is listed {count} times; list it once, and set count to its number "
                "of generators"
            )
    # Names of hosts and workers differ, because commands of bin/lan select by either of them.
    workers = {worker: host.name for host in hosts for worker in host.workers}
    for host in hosts:
        if host.name in workers:
            raise ConfigError(
                f"host {host.name} has the name of a worker of host {workers[host.name]}; "
                "rename one of the two hosts"
            )
    seen: dict[tuple[str, str], str] = {}
    for host in hosts:
        location = (str(host.ssh_words), (host.folder or "").rstrip("/"))
        if location in seen:
            raise ConfigError(
                f"hosts {seen[location]} and {host.name} are the same folder of the same machine; "
                "list that machine once and set its count, or give each host its own dir"
            )
        seen[location] = host.name


def _check_roles(hosts: tuple[Host, ...]) -> None:
    """Raise ConfigError unless there is exactly one trainer, and a generator."""
    trainers = [host.name for host in hosts if host.role == "trainer"]
    if len(trainers) > 1:
        raise ConfigError(
            f"hosts {' and '.join(trainers)} are both the trainer; a run has one, so give the "
            'others role = "generator"'
        )
    if not trainers:
        raise ConfigError('no host has the role trainer; give one of them role = "trainer"')
    if not any(host.num_generators for host in hosts):
        raise ConfigError(
            f"there are no generators; add a host, or set count = 1 on host {trainers[0]} for a "
            "generator there"
        )
