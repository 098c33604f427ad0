"""Entry points of the console scripts of the wheel and of the files in bin/.

`run_program` parses the settings before it imports the program, so that `--help` and errors in the
settings do not wait for the import of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import pkgutil
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from peralta_zmq import errors
from peralta_zmq.config.load import FILE_SIGN, load_config
from peralta_zmq.config.schema import Config
from peralta_zmq.errors import EXIT_ERROR, ConfigError, PeraltaError, printable, program_name

NO_READER = 141  # exit code that a shell reports for SIGPIPE
CHECKOUT_BIN = Path(__file__).resolve().parents[2] / "bin"
# First arguments of peralta-lan that refer to the machines of a hosts file.
LAN_COMMANDS = ("up", "sync", "status", "logs", "restart", "stop", "down", "enable", "disable")
VERSION = "--version"
EVALUATE_USAGE = """\
usage: {program} RUN [--step N] [--section.name VALUE ...]
       {program} MODEL [@ FILE.toml ...] [--section.name VALUE ...]

Answers the held-out problems (data.eval, [eval], [sampling]) with the weights of a run, the newest
or those of a step, or with a model, and prints the mean reward. RUN is the folder of a run, whose
settings are used; MODEL is as in model.name. Nothing is trained.

"""
REPLAY_USAGE = """\
{program} RUN [--from K] [--to N] [--section.name VALUE ...]
       {program} export RUN STEP FOLDER"""


def trainer() -> int:
    """peralta-trainer: collect groups, train the model on them, publish its weights."""
    _end_process_on_interrupt()
    raise_open_files_limit()  # generators and other clients may open thousands of connections
    return run_program("peralta_zmq.trainer.trainer:run", program_name("trainer"))


def generator() -> int:
    """peralta-generator: sample completions with the newest weights; score, send."""
    _end_process_on_interrupt()
    return run_program("peralta_zmq.generator.generator:run", program_name("generator"))


def verifier() -> int:
    """peralta-verifier: serve problems and rewards to generators on other machines."""
    raise_open_files_limit()
    return run_program("peralta_zmq.environments.verifier_service:run", program_name("verifier"))


def lan() -> int:
    """peralta-lan: manage a run on this machine (local) or on several (hosts file)."""
    program = program_name("lan")
    if sys.argv[1:2] and sys.argv[1] in LAN_COMMANDS:
        return run_plain_program("peralta_zmq.operate.lan:main", program)
    commands = ["local", *LAN_COMMANDS]  # the help and error messages list all commands
    return run_program("peralta_zmq.operate.local:main", program, commands=commands)


def evaluate() -> int:
    """peralta-evaluate: answer the held-out problems with a run's weights or a model."""
    main = "peralta_zmq.trainer.evaluate_model:main"
    return run_plain_program(main, program_name("evaluate"), check=evaluate_options)


def replay() -> int:
    """peralta-replay: repeat a run's training from its journal, or export weights."""
    main = "peralta_zmq.trainer.replay:main"
    return run_plain_program(main, program_name("replay"), check=replay_options)


def dashboard() -> int:
    """peralta-dashboard: show runs in a browser, or write the dashboard into one file."""
    return run_plain_program(
        "peralta_zmq.observe.dashboard.__main__:main", program_name("dashboard")
    )


def doctor() -> int:
    """peralta-doctor: check if this machine is ready for a run, plan its memory, or make keys."""
    return run_plain_program("peralta_zmq.operate.doctor:main", program_name("doctor"))


def evaluate_options(arguments: Sequence[str]) -> tuple[str, int | None, list[str]]:
    """Run folder or model, the step, and the other arguments, which are settings."""
    program = program_name("evaluate")
    parser = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    parser.add_argument("--step", type=int)
    options, words = parser.parse_known_args(arguments)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(EVALUATE_USAGE.format(program=program))
        load_config(program, words)  # prints the help of the settings and exits
    if not words or words[0].startswith(("-", FILE_SIGN)):
        raise ConfigError(
            f"the run folder or the model must come first: {program} runs/demo, or {program} MODEL"
        )
    return words[0], options.step, words[1:]


def replay_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of peralta-replay, and the other arguments, which are settings."""
    program = program_name("replay")
    usage = REPLAY_USAGE.format(program=program)
    parser = argparse.ArgumentParser(program, usage=usage, allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, help="folder of the run")
    if arguments[:1] == ["export"]:
        add("step", type=int, help="training step")
        add("folder", type=Path, help="where to write; must not exist")
        return parser.parse_args(arguments[1:]), []
    add("--from", dest="first", type=int, help="first step (default: the earliest)")
    add("--to", dest="last", type=int, help="last step (default: all there are)")
    return parser.parse_known_args(arguments)


def program_command(name: str) -> list[str]:
    """The command of bin/NAME in a checkout, otherwise of the installed console script."""
    if (file := CHECKOUT_BIN / name).exists():
        return [sys.executable, str(file)]
    return [str(Path(sys.executable).with_name(f"peralta-{name}"))]


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files, which connections are, towards the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (65_536, 10_240):  # macOS permits 10,240
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or limit <= soft:
            return
        with contextlib.suppress(OSError, ValueError):
            return resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run_program(
    main: Callable[[Config], int | None] | str, program: str, *, commands: Sequence[str] = ()
) -> int:
    """Load the settings, call `main` with them, and return the exit code.

    `main` may be a name (module:function), which is imported after the settings are checked. If
    `commands` is not empty, the first argument must be one of them.
    """

    def start(arguments: Sequence[str]) -> int | None:
        settings = _without_command(program, arguments, commands)
        config = load_config(program, settings, commands=commands)
        logging.getLogger("peralta_zmq").setLevel(config.log.level.upper())
        return _imported(main)(config)

    return run_plain_program(start, program)


def run_plain_program(
    main: Callable[[Sequence[str]], int | None] | str,
    program: str,
    *,
    check: Callable[[Sequence[str]], object] | None = None,
) -> int:
    """Run a `main` that parses the command line itself, and return the exit code.

    `check` parses it, too: it ends the program for --help before torch is imported. A PeraltaError
    is printed in one line, and the exit code is 2.
    """
    errors.prepare_streams()
    stderr = _PrintableStderr()
    log_format = f"%(asctime)s {program} %(message)s"
    logging.basicConfig(stream=stderr, format=log_format, datefmt="%H:%M:%S")
    try:
        if VERSION in sys.argv[1:]:
            return int(not sys.stdout.write(f"{program} {package_version()}\n"))
        if check is not None:
            check(sys.argv[1:])
        return _imported(main)(sys.argv[1:]) or 0
    except PeraltaError as error:
        stderr.write(f"{program}: error: {error}\n")
        return EXIT_ERROR
    except BrokenPipeError:  # the reader of the output has ended, as after `| head`
        return NO_READER
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    finally:
        errors.discard_unwritten_output()


def package_version() -> str:
    from importlib import metadata  # takes 20 ms

    try:
        return metadata.version("peralta_zmq")
    except metadata.PackageNotFoundError:
        return "(checkout that is not installed)"


class _PrintableStderr:
    """Standard error that escapes control characters in texts of other machines.

    On a terminal, a text first erases a line that is rewritten in place (observe/terminal.py).
    """

    def write(self, text: str) -> int:
        erase = "\x1b[K" if sys.stderr.isatty() else ""
        with contextlib.suppress(OSError):
            return sys.stderr.write(erase + printable(text, keep="\n\t"))
        return 0

    def flush(self) -> None:
        sys.stderr.flush()


def _imported(main: Callable[..., int | None] | str) -> Callable[..., int | None]:
    """The function `main`, imported if it is a name.

    Torch creates many objects, and each garbage collection would scan all of them.
    """
    if not isinstance(main, str):
        return main
    gc.disable()
    try:
        return pkgutil.resolve_name(main)
    finally:
        gc.freeze()
        gc.enable()


def _end_process_on_interrupt() -> None:
    """Let Ctrl-C end the process at once until the program installs its own handler.

    Python's handler raises KeyboardInterrupt, which a library could suppress during its import.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _without_command(
    program: str, arguments: Sequence[str], commands: Sequence[str]
) -> Sequence[str]:
    """The arguments after the command, which is one of `commands`, and optional with --help."""
    if not commands or {"-h", "--help"} & set(arguments):
        return arguments[1:] if arguments and arguments[0] in commands else arguments
    if not arguments or arguments[0] not in commands:
        problem = f"{arguments[0]!r} is not a command" if arguments else "the command is missing"
        choices = " or ".join(f"{program} {command}" for command in commands)
        raise ConfigError(f"{problem}; write {choices}")
    return arguments[1:]
