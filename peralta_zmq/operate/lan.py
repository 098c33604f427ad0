"""`bin/lan up` and the others: one run on several machines, started here, going on without us.

    up       look at every host, copy, install, check, start, then show the logs
    sync     only look, copy and install
    status   what runs where
    logs, restart, stop, enable, disable   [NAME ...]: a host, or one worker
    down     stop all

Knows the hosts file and the order of the steps; knows nothing of what they do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from peralta_zmq.config import load_config
from peralta_zmq.config.programs import LAN_COMMANDS
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import host_setup, lan_status, log_viewer
from peralta_zmq.operate.ssh import Standing, on, run, unreachable

if TYPE_CHECKING:
    from peralta_zmq.config import Config
    from peralta_zmq.config.hosts import Host, Hosts
    from peralta_zmq.operate.host_setup import Step

PROGRAM = "bin/lan"
HOSTS_FILE, EXAMPLE = Path("configs/hosts.toml"), Path("configs/hosts.example.toml")
DOCTOR_ANSWERS = "answering the doctors"
START = "start"
LOOPBACK = ("127.0.0.1", "localhost")
Phase: TypeAlias = tuple[str, "Mapping[str, list[Step]]"]  # its title, and steps by host's name


def main(arguments: Sequence[str]) -> int:
    """Read the arguments and the hosts file, and do it. Raises ConfigError."""
    from peralta_zmq.config.hosts import load_hosts

    options, settings = _parser().parse_known_args(arguments)
    if settings and options.command not in ("up", "sync"):
        raise ConfigError(f"{options.command} takes no {settings[0]}; settings are for bin/lan up")
    path = options.hosts or (HOSTS_FILE if HOSTS_FILE.exists() else EXAMPLE)
    hosts = load_hosts(path)
    again = f"--hosts {path}"
    if options.command in ("up", "sync"):
        config = load_config(f"{PROGRAM} up", ["@", hosts.config, *settings])
        check_places(hosts, config)
        crew = Fleet(hosts, config, again=again, partial=options.partial, dry_run=options.dry_run)
        if options.command == "sync":
            return crew.sync()
        return crew.up() or (0 if options.dry_run else _show(hosts, again, log_viewer.FROM_NOW))
    if options.command == "status":
        return lan_status.show(hosts)
    chosen = select(hosts, options.names)
    if options.command == "logs":
        log_viewer.follow(chosen, again, lines=log_viewer.SOME)
        return 0
    return _order(options.command, chosen)


def select(hosts: Hosts, names: Sequence[str]) -> list[tuple[Host, list[str]]]:
    """The workers that are meant, by host; a name is a host's or a worker's, none means all.

    Raises ConfigError.
    """
    known = {name for host in hosts.host for name in (host.name, *host.workers)}
    for name in names:
        if name not in known:
            raise ConfigError(f"no host or worker {name!r}; there are {', '.join(sorted(known))}")
    chosen = [
        (host, [each for each in host.workers if not names or {host.name, each} & set(names)])
        for host in hosts.host
    ]
    return [(host, workers) for host, workers in chosen if workers]


@dataclass
class Fleet:
    """The hosts on their way up; one that fails drops out, or stops all."""

    hosts: Hosts
    config: Config
    again: str = ""  # the options with which bin/lan finds the same hosts
    partial: bool = False
    dry_run: bool = False
    failed: dict[str, str] = field(default_factory=dict[str, str])  # problem by host's name

    def sync(self) -> int:
        """Copy and install, start nothing; an exit code."""
        return int(not all(map(self._pass, self._prepared())) or bool(self.failed))

    def up(self) -> int:
        """Everything up to running workers; an exit code."""
        ready = all(map(self._pass, [*self._prepared(), *self._agreed()])) and self._examine()
        return int(not (ready and self._pass((START, self._each(self._told("start"))))))

    def _prepared(self) -> Iterator[Phase]:
        yield "look", self._each(host_setup.probe)
        yield "copy", self._each(lambda host: host_setup.sync(host, self.config))
        yield "install", self._each(host_setup.install)

    def _agreed(self) -> Iterator[Phase]:
        keys = self.config.keys_folder
        if keys and not self.dry_run:
            _make_keys(keys, self.hosts.generators)
        yield "hand over", self._each(lambda host: host_setup.hand_over(host, self.config))
        yield "check", self._each(self._told("check"))

    def _examine(self) -> bool:
        """The doctors: the trainer's answers the others, so it begins first and ends last."""
        trainer, config = self.hosts.trainer, self.config
        others = {host.name: [host_setup.doctor(host, config)]
                  for host in self.hosts.host if host is not trainer}  # fmt: skip
        if self.dry_run:
            self._pass(("doctor", {trainer.name: [host_setup.doctor(trainer, config)]}))
            return self._pass(("doctor", others))
        step = host_setup.doctor(trainer, config)
        with Standing(step.command, DOCTOR_ANSWERS) as standing:
            passed = not standing.serves or self._pass(("doctor", others))
            result = standing.end()
        self._note(trainer, "doctor", unreachable(trainer, result) or step.judge(result))
        if standing.serves or self.failed:
            return passed and self._may_go_on()
        return self._pass(("doctor", others))  # a trainer that runs already answers them itself

    def _told(self, word: str) -> Callable[[Host], list[Step]]:
        return lambda host: host_setup.tell(
            host, word, host_setup.jobs_of(host, self.hosts, self.config)
        )

    def _each(self, steps_of: Callable[[Host], list[Step]]) -> Mapping[str, list[Step]]:
        return {host.name: steps_of(host) for host in self.hosts.host}

    def _pass(self, phase: Phase) -> bool:
        """Run or print one phase on all hosts at once; whether to go on."""
        title, work = phase
        hosts = [host for host in self.hosts.host if work.get(host.name)]
        hosts = [host for host in hosts if host.name not in self.failed]
        if self.dry_run:
            for host in hosts:
                lines = [step.command.shown for step in work[host.name]]
                sys.stdout.write("\n".join([f"# {host.name}: {title}", *lines]) + "\n")
            return True
        with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
            problems = list(pool.map(_do, hosts, [work[host.name] for host in hosts]))
        for host, problem in zip(hosts, problems, strict=True):
            self._note(host, title, problem)
        return self._started() if title == START else self._may_go_on()

    def _note(self, host: Host, title: str, problem: str | None) -> bool:
        if problem:
            self.failed[host.name] = problem
            sys.stderr.write(f"{host.name}: {title}: {problem}\n")
        else:
            sys.stdout.write(f"{host.name}: {title}: ok\n")
        sys.stdout.flush()
        return not problem

    def _may_go_on(self) -> bool:
        if not self.failed:
            return True
        names = ", ".join(self.failed)
        if self.hosts.trainer.name in self.failed:
            sys.stderr.write(f"nothing was started: {names} failed, and that is the trainer\n")
            return False
        left = any(host.generators for host in self.hosts.host if host.name not in self.failed)
        if self.partial and left:
            return True
        hint = "" if self.partial else "; --partial goes on without"
        sys.stderr.write(f"nothing was started: {names} failed{hint}\n")
        return False

    def _started(self) -> bool:
        """Whether the run goes; else say what of it runs, for some of it may."""
        if not self.failed or (self.partial and self.hosts.trainer.name not in self.failed):
            return True
        running = ", ".join(lan_status.running(self.hosts)) or "nobody"
        sys.stderr.write(
            f"{', '.join(self.failed)} did not start whole; running now: {running}; "
            f"bin/lan down {self.again} ends all\n"
        )
        return False


def _do(host: Host, work: Sequence[Step]) -> str | None:
    """Run the steps until one fails; what is wrong."""
    for step in work:
        result = run(step.command)
        if problem := unreachable(host, result) or step.judge(result):
            return problem
    return None


def _order(command: str, chosen: Sequence[tuple[Host, list[str]]]) -> int:
    """A word to the keepers of these workers; prints what they answer, returns an exit code."""
    word = "stop" if command == "down" else command

    def obey(host: Host, names: Sequence[str]) -> str | None:
        script = host_setup.inside(host, " ".join([host_setup.KEEPER, word, *names]))
        result = run(on(host, script, seconds=host_setup.LONG))
        sys.stdout.write(result.out)
        return unreachable(host, result) or result.last_words if result.code else None

    with ThreadPoolExecutor(max_workers=len(chosen)) as pool:
        problems = list(
            pool.map(obey, [host for host, _ in chosen], [names for _, names in chosen])
        )
    for (host, _), problem in zip(chosen, problems, strict=True):
        if problem:
            sys.stderr.write(f"{host.name}: {command}: {problem}\n")
    return int(any(problems))


def _show(hosts: Hosts, again: str, lines: int) -> int:
    """The logs until all is over, and then how the trainer ended; 0 when nobody waits for it."""
    over = log_viewer.follow(select(hosts, ()), again, lines=lines)
    return lan_status.trainer_code(hosts) if over else 0


def _make_keys(folder: Path, generators: Sequence[str]) -> None:
    from peralta_zmq.wire import auth

    for name in (auth.TRAINER, *generators):
        if auth.make_keys(folder, name):
            sys.stdout.write(f"key of {name}: made in {folder}\n")


def check_places(hosts: Hosts, config: Config) -> None:
    """Raise ConfigError for hosts that could not find the weights, or the trainer."""
    others = [host for host in hosts.host if host is not hosts.trainer]
    served = all("://" in (host.weights_dir or "") for host in others)  # the trainer's own will do
    for host in others if served else hosts.host:
        if others and not (host.weights_dir or config.weights.dir):
            raise ConfigError(
                f"host {host.name}: weights_dir is missing; set it to the shared folder as "
                "that machine has it mounted"
            )
    if len({host.ssh for host in hosts.host}) > 1 and config.wire.host in LOOPBACK:
        raise ConfigError(
            f"wire.host {config.wire.host} is every machine's own; set wire.host in "
            f"{hosts.config} to the address of {hosts.trainer.name}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in LAN_COMMANDS:
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("--hosts", type=Path, metavar="FILE", help=f"default: {HOSTS_FILE}")
        if name in ("up", "sync"):
            command.add_argument("--dry-run", action="store_true", help="print every command")
            command.add_argument("--partial", action="store_true",
                                 help="go on without the generators' hosts that fail")  # fmt: skip
            command.usage = f"{PROGRAM} {name} [--hosts FILE] [--dry-run] [--partial] [SETTINGS]"
        elif name not in ("status", "down"):
            command.add_argument("names", nargs="*", metavar="NAME", help="a host or a worker")
        else:
            command.set_defaults(names=[])
    return parser
