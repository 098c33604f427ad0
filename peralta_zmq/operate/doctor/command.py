"""Command line of bin/doctor: checks of a machine, `doctor plan`, and `keygen` of CURVE keys."""

from __future__ import annotations

import argparse
import os
import select
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import ConfigError, program_name
from peralta_zmq.operate.doctor.checks import SERVING, Check, Report, failed_check

PROGRAM = program_name("doctor")
USAGE = f"""\
usage: {PROGRAM} [--json] [--role trainer|generator] [--wait SECONDS] [@ FILE.toml ...] [OPTIONS]
       {PROGRAM} plan [--role ROLE] [--memory GIB] [@ FILE.toml ...] [OPTIONS]
       {PROGRAM} keygen --security.keys DIR [--generator.name NAME]

Checks this machine with the settings of a run; exit code 1 if a check fails. `plan` only computes
the memory that the run needs, and which settings need less ({PROGRAM} plan --help).
  --json          the last line is {{"checks": [{{"name", "ok", "detail", "remedy"}}]}}
  --role ROLE     role of this machine; default: trainer if wire.host is this machine, else
                  generator
  --wait SECONDS  trainer: answer the doctors of generators for this long, or until a pipe at
                  standard input ends; generator: retry this long to reach the trainer's machine

"""


def main(arguments: Sequence[str]) -> int:
    """Run `bin/doctor ARGUMENTS`; returns the exit code.

    Invalid settings are a failed check, except for plan and keygen, which raise ConfigError.
    """
    if arguments[:1] == ["plan"]:
        from peralta_zmq.operate.doctor import plan

        return plan.main(*_parse(plan.PROGRAM, plan.USAGE, arguments[1:], number="--memory"))
    if arguments[:1] == ["keygen"]:
        keygen(load_config(f"{PROGRAM} keygen", arguments[1:]))
        return 0
    options, settings = _parse(PROGRAM, USAGE, arguments, number="--wait")
    wait_seconds = options.wait or 0.0
    report = Report()
    try:
        config = load_config(PROGRAM, settings)
    except ConfigError as error:
        report.add("config", failed_check(error, f"see {PROGRAM} --help"))
        return report.close(as_json=options.json)
    from peralta_zmq.operate.doctor import role_checks  # imports numpy, too slow for --help

    role = options.role or role_checks.default_role(config)
    report.add("config", Check(True, f"run {config.run.name}, checked as its {role}"))
    with ExitStack() as stack:
        if role == "generator":
            role_checks.check_generator(config, report, stack, wait_seconds=wait_seconds)
        elif role_checks.check_trainer(config, report, stack, serve=wait_seconds > 0):
            _serve(wait_seconds)
    return report.close(as_json=options.json)


def _parse(
    program: str, usage: str, arguments: Sequence[str], *, number: str
) -> tuple[argparse.Namespace, list[str]]:
    """The options of the doctor or of its plan, and the other arguments, which are settings."""
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(usage)
    parser = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    if program == PROGRAM:
        parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=("trainer", "generator"))
    parser.add_argument(number, type=float)
    return parser.parse_known_args(arguments)


def _serve(seconds: float) -> None:
    """Wait while a thread (of check_trainer) answers the doctors of generators.

    Returns early if standard input is a pipe and its writer (bin/lan) closes it.
    """
    sys.stdout.write(f"{SERVING} for {seconds:g} s\n")
    sys.stdout.flush()
    deadline = time.monotonic() + seconds
    mode = os.fstat(sys.stdin.fileno()).st_mode
    pipes = [sys.stdin.fileno()] if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else []
    while (remaining := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(pipes, [], [], remaining)
        if ready and not os.read(ready[0], 4096):
            return


def keygen(config: Config) -> None:
    """Make missing keys of trainer and `generator.name`; print which files to copy."""
    from peralta_zmq.wire import auth

    folder = config.keys_folder
    name = config.generator.name
    if folder is None:
        raise ConfigError("keygen needs a folder for the keys; add --security.keys DIR")
    if name == auth.TRAINER:
        raise ConfigError(f"generator.name {name!r} is reserved for the trainer; choose another")
    for owner in filter(None, (auth.TRAINER, name)):
        is_new = auth.make_keys(folder, owner)
        sys.stdout.write(f"{owner}: {'made' if is_new else 'kept'} in {folder}\n")
    if name is None:
        sys.stdout.write("for the key of a generator, add --generator.name NAME\n")
        return
    sys.stdout.write(
        f"copy {auth.TRAINER}{auth.PUBLIC} and {name}{auth.SECRET} to {folder} on the generator's "
        f"machine (chmod 600 {name}{auth.SECRET}), start the generator with --generator.name "
        f"{name},\nand leave {name}{auth.PUBLIC} and {auth.TRAINER}{auth.SECRET} on this machine, "
        "with the trainer\n"
    )
