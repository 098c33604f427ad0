"""From a command line to a Config, and from a door to its loop.

Knows argv, TOML files and exit codes; whatever is wrong with them becomes one line.
"""

from __future__ import annotations

import gc
import logging
import pkgutil
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError
from pydantic_config import (  # pyright: ignore[reportMissingTypeStubs]
    ConfigFileError,
    cli,
)

from peralta_zmq.config.help import help_text
from peralta_zmq.config.names import shown
from peralta_zmq.config.settings import Config, known_fields
from peralta_zmq.errors import ConfigError, PeraltaError

FILE_SIGN = "@"
INTERRUPTED = 130  # as a shell reports SIGINT


def run_program(
    main: Callable[[Config], int | None] | str, program: str, *, commands: Sequence[str] = ()
) -> int:
    """Parse the command line, run `main`, and return the exit code.

    A dotted name is imported only when the command line is known to be right. With `commands`,
    the first argument must be one of them. An error that a person can cause is one line on
    stderr and code 2.
    """
    usage = f"{program} {{{','.join(commands)}}}" if commands else program

    def start(arguments: Sequence[str]) -> int | None:
        config = load_config(usage, _without_command(program, arguments, commands))
        _set_up_logs(program, config.log.level)
        return _imported(main)(config)

    return run_plain_program(start, program)


def run_plain_program(main: Callable[[Sequence[str]], int | None] | str, program: str) -> int:
    """The same for a program that reads its arguments itself."""
    try:
        return _imported(main)(sys.argv[1:]) or 0
    except PeraltaError as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _imported(main: Callable[..., int | None] | str) -> Callable[..., int | None]:
    """What a dotted name stands for.

    No garbage is collected meanwhile, and what was imported is never looked at for any again:
    very many objects that all stay, and to look at them takes long while torch is imported.
    """
    if not isinstance(main, str):
        return main
    gc.disable()
    try:
        return pkgutil.resolve_name(main)
    finally:
        gc.freeze()
        gc.enable()


def load_config(program: str, arguments: Sequence[str]) -> Config:
    """The settings that `arguments` (without the program's name) describe.

    `--help` prints and exits. Raises ConfigError, always one line, for anything else.
    """
    words = _with_separate_signs(arguments)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(help_text(program))
        raise SystemExit(0)
    try:
        check_files(words)
        _check_missing_values(words)
        return cli(Config, args=words)
    except (ConfigError, ConfigFileError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(" ".join(reason_of(error, program).split())) from None


def files_given(arguments: Sequence[str] | None = None) -> str:
    """The files on our command line, as they follow a door's name: ' @ configs/lan.toml'."""
    words = _with_separate_signs(sys.argv[1:] if arguments is None else arguments)
    return "".join(f" @ {name}" for sign, name in pairwise(words) if sign == FILE_SIGN)


def _with_separate_signs(arguments: Sequence[str]) -> list[str]:
    words: list[str] = []
    for argument in arguments:
        stuck = argument.startswith(FILE_SIGN) and argument != FILE_SIGN
        words += [FILE_SIGN, argument[1:]] if stuck else _with_separate_table(argument)
    return words


def _with_separate_table(argument: str) -> list[str]:
    """--loss.kwargs={...} as two words, as pydantic_config wants tables and what is in them."""
    flag, equals, written = argument.partition("=")
    is_table = written[:1] in ("{", "[") or flag.startswith("--filter.")
    return [flag, written] if flag.startswith("--") and equals and is_table else [argument]


def check_files(words: Sequence[str]) -> None:
    """Raise ConfigError for a file that is not there, or no TOML."""
    for sign, name in pairwise(words):
        path = Path(name)
        if sign != FILE_SIGN:
            continue
        if path.suffix != ".toml":
            raise ConfigError(f"config file {name} is not a TOML file; name one that ends in .toml")
        if not path.is_file():
            raise ConfigError(f"config file {name} does not exist; {_files_beside(path)}")


def _files_beside(path: Path) -> str:
    there = sorted(file.name for file in path.parent.glob("*.toml"))
    if near := get_close_matches(path.name, there, n=1):
        return f"did you mean {path.parent / near[0]}?"
    return f"{path.parent}/ has {', '.join(there) or 'no .toml file'}"


def _check_missing_values(words: Sequence[str]) -> None:
    known = known_fields()
    for flag, following in pairwise([*words, "--"]):
        section, _, leaf = flag.removeprefix("--").replace("-", "_").partition(".")
        kind = known.get(section, {}).get(leaf)
        may_stand_alone = kind in (None, bool) or section == "filter"  # a bare one only counts
        if flag.startswith("--") and not may_stand_alone and following.startswith("--"):
            raise ConfigError(f"{flag} has no value; write {flag} VALUE (or {flag}=VALUE)")


def reason_of(error: Exception, program: str) -> str:
    """What is wrong with a command line or a file, for a person."""
    if isinstance(error.__cause__, ValidationError):
        return _refusal(error.__cause__)
    if isinstance(error, ConfigFileError):
        return f"{error}; {program} --help lists all settings"
    if isinstance(error, OSError):
        return f"config file {error.filename}: {error.strerror}; make it readable"
    if isinstance(error, UnicodeDecodeError):
        return f"a config file is not UTF-8 text ({error}); save it as UTF-8"
    return str(error)


def _refusal(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))} = {shown(each['input'])} is wrong: "
        f"{each['msg'].removeprefix('Input ')}"
        for each in error.errors(include_url=False)
    )


def _without_command(
    program: str, arguments: Sequence[str], commands: Sequence[str]
) -> Sequence[str]:
    if not commands or {"-h", "--help"} & set(arguments):
        return [each for each in arguments if each not in commands]
    if not arguments or arguments[0] not in commands:
        given = f"{arguments[0]!r} is not a command" if arguments else "the command is missing"
        raise ConfigError(f"{given}; write {' or '.join(f'{program} {each}' for each in commands)}")
    return arguments[1:]


def _set_up_logs(program: str, level: str) -> None:
    logging.basicConfig(format=f"%(asctime)s {program} %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("peralta_zmq").setLevel(level.upper())
