"""`bin/lan`: start and control a run on the machines of a hosts file, or on a cluster.

The run continues when bin/lan ends: each worker has a supervisor on its host (supervisor.py), or is
a job of Slurm. docs/lan.md describes the commands.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from peralta_zmq.config import Config, check_memory_fractions, load_config
from peralta_zmq.config.hosts import Host, Hosts, Slurm, load_hosts
from peralta_zmq.config.programs import LAN_COMMANDS
from peralta_zmq.errors import ConfigError, printable, program_name
from peralta_zmq.operate import host_setup, lan_monitor, ssh
from peralta_zmq.operate.doctor.checks import SERVING
from peralta_zmq.operate.lan_monitor import Row, in_parallel
from peralta_zmq.operate.slurm import SlurmLauncher

PROGRAM = program_name("lan")
STARTING = ("up", "sync")  # commands that need the code and the settings
HOSTS_FILE = host_setup.HOSTS_FILE
EXAMPLE = Path("configs/hosts.example.toml")
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # not 127.0.0.2, which tests use for another machine
FIRST_GPU = ("auto", "cuda", "cuda:0", "mps")  # names of the same GPU, on a machine that has one
StepsOf: TypeAlias = Callable[[Host], list[ssh.Command]]  # commands of one phase for a host


def main(arguments: Sequence[str]) -> int:
    options, settings = _parser().parse_known_args(arguments)
    command: str = options.command
    if settings and command not in STARTING:
        raise ConfigError(f"{command} takes no {settings[0]}; only up and sync take settings")
    path = options.hosts or (HOSTS_FILE if HOSTS_FILE.exists() else EXAMPLE)
    hosts = load_hosts(path)
    launcher = choose_launcher(hosts, path, options)
    if command in STARTING:
        config = load_config(f"{PROGRAM} up", ["@", hosts.config, *settings])
        code = launcher.up(config) if command == "up" else launcher.sync(config)
        if code or command == "sync" or options.dry_run:
            return code
        return launcher.exit_code() if launcher.follow_logs((), lines=0) else 0
    if command == "status":
        return lan_monitor.print_status(launcher.rows())
    if command == "logs":
        launcher.follow_logs(options.names, lines=20)
        return 0
    return launcher.control(command, options.names)


def choose_launcher(
    hosts: Hosts, path: Path, options: argparse.Namespace
) -> SshLauncher | SlurmLauncher:
    """The launcher that --launcher names; by default that of the tables of the hosts file."""
    by_default = "slurm" if hosts.slurm and not hosts.host else "ssh"
    if (options.launcher or by_default) == "slurm":
        if options.partial:
            raise ConfigError(
                "--partial is for hosts with ssh; leave it out: Slurm starts each generator as "
                "soon as its job can run"
            )
        return SlurmLauncher(hosts.slurm or Slurm(), path, dry_run=options.dry_run)
    if not hosts.host:
        raise ConfigError(
            f"{path} has no [[host]] for --launcher ssh; add the machines, or leave "
            "out --launcher to use [slurm]"
        )
    return SshLauncher(hosts, path, options.partial, options.dry_run)


@dataclass
class SshLauncher:
    """Starts and controls the workers on the hosts of a hosts file, in phases on all hosts.

    Every method may raise ConfigError. Without names, workers are all of them.
    """

    hosts: Hosts
    hosts_file: Path = HOSTS_FILE
    partial: bool = False  # True: continue without a generator host that fails a phase
    dry_run: bool = False  # True: print the commands instead of running them
    failed: dict[str, str] = field(default_factory=dict[str, str])  # problem by host name

    def rows(self) -> list[Row]:
        """The status of every worker."""
        return lan_monitor.query_all(self.hosts)

    def exit_code(self) -> int:
        """The exit code of the trainer; 1 if it still runs or cannot be reached."""
        return lan_monitor.trainer_exit_code(self.hosts)

    def follow_logs(self, names: Sequence[str], *, lines: int) -> bool:
        """Print the logs of these workers; False after Ctrl-C."""
        selected = select_workers(self.hosts, names)
        return lan_monitor.follow_logs(selected, self.hosts_file, lines=lines)

    def control(self, command: str, names: Sequence[str]) -> int:
        """Restart, stop, enable or disable these workers; returns an exit code."""
        verb = "stop" if command == "down" else command

        def send(step: ssh.Command) -> str | None:
            result = ssh.run(step)
            sys.stdout.write(printable(result.stdout, keep="\n"))
            return step.find_problem(result)

        steps = {
            host.name: ssh.on_host(
                host, host_setup.supervisor_script(host, verb, *workers), seconds=ssh.LONG_SECONDS
            )
            for host, workers in select_workers(self.hosts, names)
        }
        problems = in_parallel(send, steps)
        for name, problem in problems.items():
            if problem:
                sys.stderr.write(f"{name}: {command}: {printable(problem)}\n")
        return int(any(problems.values()))

    # Starting.

    def sync(self, config: Config) -> int:
        """Only copy and install; returns an exit code."""
        is_installed = self._copy_and_install("sync", config)
        return int(not is_installed or bool(self.failed))

    def up(self, config: Config) -> int:
        """Start the workers, except those that run already; returns an exit code."""
        if not self._copy_and_install("up", config):
            return 1
        if config.keys_folder and not self.dry_run:
            host_setup.make_keys(config.keys_folder, self.hosts.generators)

        def supervisor(command: str) -> StepsOf:
            return lambda host: host_setup.supervisor_steps(host, command, config)

        is_ready = (
            self._phase("settings", lambda host: host_setup.send_settings(host, config))
            and self._phase("check", supervisor("check"))
            and self._run_doctors(config)
        )
        if not is_ready:
            return 1
        self._run_steps("start", supervisor("start"), self.hosts.host)
        if not self.failed or (self.partial and self.hosts.trainer.name not in self.failed):
            return 0
        sys.stderr.write(
            f"{', '.join(self.failed)} did not start completely; bin/lan status shows what runs, "
            f"bin/lan down --hosts {self.hosts_file} stops all\n"
        )
        return 1

    def _copy_and_install(self, command: str, config: Config) -> bool:
        if not (host_setup.REPO / "bin").exists():
            raise ConfigError(
                f"{command} copies a checkout of the project to the hosts, and this is an "
                "installed package; clone the project and run bin/lan there"
            )
        check_addresses(self.hosts, config)
        check_memory(self.hosts, config)
        return (
            self._phase("probe", host_setup.probe)
            and self._phase("copy", lambda host: host_setup.sync(host, config, self.hosts_file))
            and self._phase("install", host_setup.install)
        )

    def _run_doctors(self, config: Config) -> bool:
        """Run bin/doctor on all hosts; returns True if the next phase may follow.

        The trainer's doctor answers the probes of the generators' doctors, so it starts first and
        ends last. If the trainer already runs, the trainer answers them.
        """
        trainer = self.hosts.trainer
        others = [host for host in self.hosts.host if host is not trainer]

        def run_doctors(hosts: Sequence[Host]) -> None:
            self._run_steps("doctor", lambda host: [host_setup.doctor(host, config)], hosts)

        if self.dry_run:
            run_doctors([trainer, *others])
            return True
        step = host_setup.doctor(trainer, config)
        with ssh.run_in_background(step, SERVING) as doctor:
            if doctor.is_ready:
                run_doctors(others)
            problem = step.find_problem(doctor.end())
        self.report(trainer.name, "doctor", problem)
        if not doctor.is_ready and not problem:
            run_doctors(others)  # answered by the running trainer
        return self._can_continue()

    def _phase(self, title: str, steps_of: StepsOf) -> bool:
        self._run_steps(title, steps_of, self.hosts.host)
        return self._can_continue()

    def _run_steps(self, title: str, steps_of: StepsOf, hosts: Sequence[Host]) -> None:
        """Run, or print in a dry run, the steps of those `hosts` that have not failed."""
        active = [host for host in hosts if host.name not in self.failed]
        if self.dry_run:  # print no values of environment variables, which may be passwords
            active = [
                host.model_copy(update={"env": dict.fromkeys(host.env, "...")}) for host in active
            ]
        steps_by_host = {host.name: steps for host in active if (steps := steps_of(host))}
        if self.dry_run:
            for name, steps in steps_by_host.items():
                lines = [f"# {name}: {title}", *(step.shown for step in steps)]
                sys.stdout.writelines(f"{line}\n" for line in lines)
            return

        def first_problem(steps: list[ssh.Command]) -> str | None:
            problems = (step.find_problem(ssh.run(step)) for step in steps)
            return next(filter(None, problems), None)

        for name, problem in in_parallel(first_problem, steps_by_host).items():
            self.report(name, title, problem)

    def report(self, name: str, title: str, problem: str | None) -> None:
        if problem:
            self.failed[name] = problem
            sys.stderr.write(f"{name}: {title}: {printable(problem)}\n")
        else:
            sys.stdout.write(f"{name}: {title}: ok\n")
        sys.stdout.flush()

    def _can_continue(self) -> bool:
        """True if the next phase may follow; otherwise says which hosts failed."""
        if not self.failed:
            return True
        remaining = [host for host in self.hosts.host if host.name not in self.failed]
        hint = "" if self.partial else "; --partial continues without it"
        if self.hosts.trainer not in remaining:
            hint = ", which includes the trainer's host"
        elif self.partial and any(host.generators for host in remaining):
            return True
        sys.stderr.write(f"nothing was started: {', '.join(self.failed)} failed{hint}\n")
        return False


def select_workers(hosts: Hosts, names: Sequence[str]) -> list[tuple[Host, list[str]]]:
    """The hosts and workers with these names; all without names. Raises ConfigError."""
    known = {name for host in hosts.host for name in (host.name, *host.workers)}
    for name in names:
        if name not in known:
            raise ConfigError(f"no host or worker {name!r}; there are {', '.join(sorted(known))}")
    selected = [
        (host, [worker for worker in host.workers if not names or {host.name, worker} & set(names)])
        for host in hosts.host
    ]
    return [(host, workers) for host, workers in selected if workers]


def check_addresses(hosts: Hosts, config: Config) -> None:
    """Raise ConfigError for a missing weights folder, or a loopback address of the trainer."""
    others = [host for host in hosts.host if host is not hosts.trainer]
    # If all other hosts load the weights from a URL, the trainer may publish to its run folder.
    have_urls = all("://" in (host.weights_dir or "") for host in others)
    for host in others if have_urls else hosts.host:
        if others and not (host.weights_dir or config.weights.dir):
            raise ConfigError(
                f"host {host.name}: weights_dir is missing; set it to the path at which "
                "that machine mounts the shared folder"
            )
    if len({host.ssh for host in hosts.host}) > 1 and config.wire.host in LOOPBACK:
        raise ConfigError(
            f"wire.host {config.wire.host} is the loopback address; set wire.host in "
            f"{hosts.config} to the address of {hosts.trainer.name}"
        )


def check_memory(hosts: Hosts, config: Config) -> None:
    """Raise ConfigError if the workers of one device are given more than its memory."""
    by_device = defaultdict[tuple[str, str, str], list[Host]](list)
    for host in hosts.host:
        visible = host.env.get("CUDA_VISIBLE_DEVICES", "")
        device = host.device or config.model.device
        by_device[host.ssh or "", "auto" if device in FIRST_GPU else device, visible].append(host)
    for together in by_device.values():
        check_memory_fractions(
            config,
            has_trainer=hosts.trainer in together,
            num_generators=sum(host.num_generators for host in together),
            machine=f"host {' and '.join(host.name for host in together)}",
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in LAN_COMMANDS:
        command = commands.add_parser(name, allow_abbrev=False)
        command.set_defaults(names=[], dry_run=False, partial=False)
        command.add_argument("--hosts", type=Path, metavar="FILE", help=f"default: {HOSTS_FILE}")
        command.add_argument(
            "--launcher",
            choices=("ssh", "slurm"),
            help="default: slurm, if the hosts file has a table [slurm] and no [[host]]; else ssh",
        )
        if name in STARTING:
            command.add_argument("--dry-run", action="store_true", help="print every command")
            command.add_argument(
                "--partial", action="store_true", help="continue without generator hosts that fail"
            )
            command.usage = (
                f"{PROGRAM} {name} [--hosts FILE] [--launcher ssh|slurm] [--dry-run] [--partial] "
                "[SETTINGS]"
            )
        elif name not in ("status", "down"):
            command.add_argument("names", nargs="*", metavar="NAME", help="a host or a worker")
    return parser
