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
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from peralta_zmq.config import load_config, run_door, run_plain_door, toml_text
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import status, steps, tail
from peralta_zmq.operate.shell import on, run, unreachable

if TYPE_CHECKING:
    from peralta_zmq.config import Config
    from peralta_zmq.config.hosts import Host, Hosts
    from peralta_zmq.operate.steps import Step

PROGRAM = "bin/lan"
LOCAL = ("local", "chaos")
EVERYWHERE = ("up", "sync", "status", "logs", "restart", "stop", "down", "enable", "disable")
HOSTS_FILE, EXAMPLE = Path("configs/hosts.toml"), Path("configs/hosts.example.toml")
LOOPBACK = ("127.0.0.1", "localhost")
Phase: TypeAlias = tuple[str, "Mapping[str, list[Step]]"]  # its title, and steps by host's name


def door() -> int:
    """All of bin/lan: local and chaos take settings, the others hosts; an exit code."""
    if sys.argv[1:2] and sys.argv[1] in EVERYWHERE:
        return run_plain_door(main, PROGRAM)
    if sys.argv[1:2] and sys.argv[1] in LOCAL:
        return run_door("peralta_zmq.operate.supervise:main", PROGRAM, commands=LOCAL)
    return run_door("", PROGRAM, commands=(*LOCAL, *EVERYWHERE))  # help, or what is missing


def main(arguments: Sequence[str]) -> int:
    """Read the arguments and the hosts file, and do it. Raises ConfigError."""
    from peralta_zmq.config.hosts import load_hosts

    options, settings = _parser().parse_known_args(arguments)
    if settings and options.command not in ("up", "sync"):
        raise ConfigError(f"{options.command} takes no {settings[0]}; settings belong to bin/lan up")
    path = options.hosts or (HOSTS_FILE if HOSTS_FILE.exists() else EXAMPLE)
    hosts = load_hosts(path)
    again = f"--hosts {path}"
    if options.command in ("up", "sync"):
        config = load_config(f"{PROGRAM} up", ["@", hosts.config, *settings])
        _check_places(hosts, config)
        crew = Fleet(hosts, config, partial=options.partial, dry_run=options.dry_run)
        if options.command == "sync":
            return crew.sync()
        return crew.up() or (0 if options.dry_run else _show(hosts, again, tail.FROM_NOW))
    if options.command == "status":
        return status.show(hosts)
    chosen = select(hosts, options.names)
    if options.command == "logs":
        tail.follow(chosen, again, lines=tail.SOME)
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
    partial: bool = False
    dry_run: bool = False
    failed: dict[str, str] = field(default_factory=dict[str, str])  # problem by host's name

    def sync(self) -> int:
        """Copy and install, start nothing; an exit code."""
        return int(not all(map(self._pass, self._prepared())) or bool(self.failed))

    def up(self) -> int:
        """Everything up to running workers; an exit code."""
        for phase in [*self._prepared(), *self._checked()]:
            if not self._pass(phase):
                self._clean_up()
                return 1
        self._clean_up()
        return int(not self._pass(("start", {
            host.name: steps.start(host, steps.jobs_of(host, self.hosts, self.config))
            for host in self.hosts.host
        })))  # fmt: skip

    def _prepared(self) -> Iterator[Phase]:
        yield "look", self._each(steps.probe)
        yield "copy", self._each(steps.sync)
        yield "install", self._each(steps.install)

    def _checked(self) -> Iterator[Phase]:
        config, trainer, keys = self.config, self.hosts.trainer, self.config.keys_folder
        settings = toml_text(config)
        if keys and not self.dry_run:
            _make_keys(keys, self.hosts.generators)
        yield "hand over", self._each(lambda host: steps.hand_over(host, settings, keys))
        yield "ports", {trainer.name: steps.ports(trainer, config)}
        folders = self._shared_folders()
        if folders:
            first = folders[trainer.name]
            yield "token", {trainer.name: steps.leave_token(trainer, first, self._token)}
            yield "same weights folder", {
                host.name: steps.find_token(host, folders[host.name], self._token, trainer)
                for host in self.hosts.host if host is not trainer
            }  # fmt: skip
        yield "doctor", self._each(lambda host: steps.doctor(host, config))

    def _clean_up(self) -> None:
        folders, trainer = self._shared_folders(), self.hosts.trainer
        if folders and trainer.name not in self.failed:
            gone = steps.remove_token(trainer, folders[trainer.name], self._token)
            self._pass(("remove token", {trainer.name: gone}))

    @property
    def _token(self) -> str:
        return f".same-folder-{os.getpid()}"

    def _shared_folders(self) -> dict[str, str]:
        """The weights folder by host, when several machines share one."""
        folders = {host.name: host.weights_dir or self.config.weights.dir or ""
                   for host in self.hosts.host}  # fmt: skip
        is_folder = all(folders.values()) and not any("://" in each for each in folders.values())
        return folders if is_folder and len(folders) > 1 else {}

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
            problems = list(pool.map(lambda host: _do(host, work[host.name]), hosts))
        for host, problem in zip(hosts, problems, strict=True):
            if problem:
                self.failed[host.name] = problem
                sys.stderr.write(f"{host.name}: {title}: {problem}\n")
            else:
                sys.stdout.write(f"{host.name}: {title}: ok\n")
        sys.stdout.flush()
        return self._may_go_on()

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


def _do(host: Host, work: Sequence[Step]) -> str | None:
    """Run the steps until one fails; what is wrong."""
    for step in work:
        result = run(step.command)
        if problem := unreachable(host, result) or step.judge(result):
            return problem
    return None


def _order(command: str, chosen: Sequence[tuple[Host, list[str]]]) -> int:
    """A word to the keepers of these workers; prints what they answer, returns an exit code."""
    commands = {"restart": ("stop", "start"), "down": ("stop",)}.get(command, (command,))

    def obey(host: Host, names: Sequence[str]) -> str | None:
        for each in commands:
            script = steps.inside(host, " ".join([steps.KEEPER, each, *names]))
            result = run(on(host, script, seconds=steps.LONG))
            sys.stdout.write(result.out)
            if result.code:
                return unreachable(host, result) or result.last_words
        return None

    with ThreadPoolExecutor(max_workers=len(chosen)) as pool:
        problems = list(pool.map(lambda pair: obey(*pair), chosen))
    for (host, _), problem in zip(chosen, problems, strict=True):
        if problem:
            sys.stderr.write(f"{host.name}: {command}: {problem}\n")
    return int(any(problems))


def _show(hosts: Hosts, again: str, lines: int) -> int:
    """The logs until all is over, and then how the trainer ended; 0 when nobody waits for it."""
    over = tail.follow(select(hosts, ()), again, lines=lines)
    return status.trainer_code(hosts) if over else 0


def _make_keys(folder: Path, generators: Sequence[str]) -> None:
    from peralta_zmq.wire import keys

    for name in (keys.TRAINER, *generators):
        if keys.make_keys(folder, name):
            sys.stdout.write(f"key of {name}: made in {folder}\n")


def _check_places(hosts: Hosts, config: Config) -> None:
    """Raise ConfigError for hosts that could not find the weights, or the trainer."""
    for host in hosts.host:
        if len(hosts.host) > 1 and not (host.weights_dir or config.weights.dir):
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
    parser = argparse.ArgumentParser(PROGRAM, allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    for name in EVERYWHERE:
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("--hosts", type=Path, metavar="FILE", help="default: configs/hosts.toml")
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
