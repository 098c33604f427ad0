"""`bin/doctor`: looks at everything that a run needs of a machine, one line for each thing.

    check      a finding, and a look that may fail
    visit      which looks belong to which role
    machine    versions, device, sleep, the local network of a Mac
    work       the model and the reward
    network    ports, the way to the trainer, clocks, keys
    weights    the weights folder

Here are its command line and what it prints.
"""

from __future__ import annotations

import argparse
import os
import select
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from peralta_zmq.config import load_config
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.doctor.check import Check, Report, failed

PROGRAM = "bin/doctor"
USAGE = """\
usage: bin/doctor [--json] [--role trainer|generator] [--wait SECONDS] [@ FILE.toml ...] [OPTIONS]
       bin/doctor keygen --security.keys DIR [--generator.name NAME]

Looks at this machine with the settings of a run; exit code 1 when something is amiss.
  --json          the last line is {"checks": [{"name", "ok", "detail", "remedy"}]}
  --role ROLE     what the machine is to be; by default the trainer where wire.host is this
                  machine, else a generator
  --wait SECONDS  trainer: answer the doctors of generators so long, or until a pipe at standard
                  input ends; generator: try so long to reach the trainer's machine

"""


def main(arguments: Sequence[str]) -> int:
    """`bin/doctor ARGUMENTS`; the exit code. Raises ConfigError for bad arguments of keygen."""
    from peralta_zmq.operate.doctor import roles

    if arguments[:1] == ["keygen"]:
        from peralta_zmq.operate import keygen

        keygen.main(load_config(f"{PROGRAM} keygen", arguments[1:]))
        return 0
    options, rest = _options(arguments)
    book = Report()
    try:
        config = load_config(PROGRAM, rest)
    except ConfigError as error:
        book.write(failed("config", error, "see bin/doctor --help"))
        return book.close(as_json=options.json)
    role = options.role or roles.role_of(config)
    book.write(Check("config", True, f"run {config.run.name}, seen as its {role}"))
    with ExitStack() as stack:
        if role == "generator":
            roles.visit_generator(config, book, stack, patience=options.wait)
        elif roles.visit_trainer(config, book, stack, answers=options.wait > 0):
            _stay(options.wait)
    return book.close(as_json=options.json)


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Ours, and the rest for the config."""
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(USAGE)
    parser = argparse.ArgumentParser(PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", nargs="?", const="")
    parser.add_argument("--wait", nargs="?", default="0")
    options, rest = parser.parse_known_args(arguments)
    if options.role not in (None, "trainer", "generator"):
        raise ConfigError(f"--role is {options.role or 'empty'}; choose trainer or generator")
    try:
        options.wait = float(options.wait or "")
    except ValueError:
        raise ConfigError("--wait has no number of seconds; write --wait 60") from None
    return options, rest


def _stay(seconds: float) -> None:
    """Stay so long, or until standard input ends if it is a pipe: who started us is gone."""
    sys.stdout.write(f"answering the doctors of generators for {seconds:g} s\n")
    sys.stdout.flush()
    ends = time.monotonic() + seconds
    descriptor = sys.stdin.fileno()
    kind = os.fstat(descriptor).st_mode
    pipes = [descriptor] if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) else []
    while (left := ends - time.monotonic()) > 0:
        ready, _, _ = select.select(pipes, [], [], left)
        if ready and not os.read(descriptor, 4096):
            return
