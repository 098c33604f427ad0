"""Schema of a hosts file, which lists the machines (hosts) of a run.

The program bin/lan copies the project to these hosts and starts their workers: one trainer, and
generators. The docstring under a field explains that setting of the file. `load_hosts` reads and
checks a hosts file; each error is one line with the remedy.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator
from pydantic_config import ConfigFileError, cli  # pyright: ignore[reportMissingTypeStubs]

from peralta_zmq.config.load import FILE_SIGN, check_files, reason_of
from peralta_zmq.config.sections import PlainName, Section, Text
from peralta_zmq.errors import ConfigError, program_name

# A path may have no spaces or special characters, because the local shell and the shell on the host
# expand it.
PLAIN_FOLDER = re.compile(r"(~/|/)?[A-Za-z0-9_][A-Za-z0-9._+/-]*")
HOME_FOLDER = "~/peralta_zmq"


class Host(Section):
    """One machine and its workers."""

    name: PlainName
    """name of the host in logs; the workers of the host are NAME-trainer and NAME-0, NAME-1 ..."""
    ssh: Text | None = None
    """arguments for ssh, e.g. -p 2222 me@box; None = this machine, without ssh"""
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
    weights_dir: Text | None = None
    """path of the weights folder on this host; None = weights.dir of the config"""
    env: dict[str, str] = Field(default={})
    """environment variables of the workers on this host"""

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


class Hosts(Section):
    """All machines of a run."""

    config: Text = "configs/demo.toml"
    """config file on this machine; options of bin/lan override it"""
    host: tuple[Host, ...] = ()
    """the machines, one table [[host]] for each"""

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
        words = shlex.split(host.ssh or "")
    except ValueError as error:
        raise ConfigError(
            f"host {host.name}: ssh {host.ssh!r}: {error}; quote arguments as in -o 'A B'"
        ) from None
    if host.ssh and (not words or words[-1].startswith("-")):
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
        location = (host.ssh or "", (host.folder or "").rstrip("/"))
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
