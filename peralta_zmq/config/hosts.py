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
# Options of sbatch with which bin/lan could not start or control a job.
REFUSED_OPTIONS = (
    *("array", "clusters", "error", "export", "export-file", "ntasks", "test-only", "wait", "wrap"),
    *("a", "M", "e", "n", "W"),
)
# First letter of a short option, after flags without a value: -n8, -Qn8.
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
    """Python 3.11 or later with which .venv is created on the host"""
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
        return self.count if self.count is not None else int(self.role == "generator")

    @property
    def workers(self) -> list[str]:
        trainers = [f"{self.name}-trainer"] if self.role == "trainer" else []
        return trainers + self.generators

    @property
    def generators(self) -> list[str]:
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
    """time limit of 10 minutes or more, such as 4:00:00 or 2-00:00:00, after which the job is
    queued again; None = the partition's default"""
    options: tuple[Text, ...] = ()
    """more options of sbatch, such as --mem=16G or --constraint=a100; those that bin/lan itself
    sets have no effect here"""

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
            if _is_refused(name):
                raise ConfigError(
                    f"{option!r} in options is not allowed, because bin/lan could not control "
                    "the job; leave it out"
                )
        return options


def _is_refused(option: str) -> bool:
    """sbatch also accepts the beginning of a long name, and a value right after a short one."""
    if match := SHORT_OPTION.match(option):
        return match[1] in REFUSED_OPTIONS
    return any(name.startswith(option[2:]) for name in REFUSED_OPTIONS if len(name) > 1)


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
        return next(host for host in self.host if host.role == "trainer")

    @property
    def generators(self) -> list[str]:
        return [name for host in self.host for name in host.generators]

    @model_validator(mode="after")
    def _check(self) -> Hosts:
        for host in self.host:
            _check_host(host)
        _check_listed_once(self.host)
        if self.host or self.slurm is None:
            _check_roles(self.host)
        return self


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
    # Names of hosts and workers differ, because commands of bin/lan select by either of them.
    names = Counter(name for host in hosts for name in (host.name, *host.workers))
    for name, count in names.items():
        if count > 1:
            raise ConfigError(
                f"{name} is the name of {count} hosts or workers; rename a host, or list a machine "
                "once and set its count"
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
    if len(trainers) != 1:
        found = f"the hosts {' and '.join(trainers)} have" if trainers else "no host has"
        raise ConfigError(f'{found} the role trainer; give one host role = "trainer"')
    if not any(host.num_generators for host in hosts):
        raise ConfigError(
            f"there are no generators; add a host, or set count = 1 on host {trainers[0]} for a "
            "generator there"
        )
