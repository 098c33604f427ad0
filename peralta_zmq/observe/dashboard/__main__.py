"""bin/dashboard: the page of runs that are under way, finished or crashed, or one file of it.

Knows a command line; knows nothing of pages.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from peralta_zmq.atomic_files import read_private_token
from peralta_zmq.errors import ConfigError, PeraltaError
from peralta_zmq.observe.dashboard.export import write_report
from peralta_zmq.observe.dashboard.server import Dashboard
from peralta_zmq.observe.metrics import EVENTS, METRICS

PORT = 8470
USAGE = """\
bin/dashboard RUN [RUN ...] [--host ADDRESS] [--port N] [--token-file FILE]
       bin/dashboard RUN [RUN ...] --export FILE.html"""
OPTIONS = ("--export", "--host", "--port", "--token-file")
CONFIG = "config.toml"


def main(arguments: Sequence[str]) -> int:
    """Show the runs until Ctrl-C, or write one file. Raises ConfigError for a folder of no run."""
    parser = argparse.ArgumentParser(prog="bin/dashboard", usage=USAGE, allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the page into one file")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="port, or the next (%(default)s)")
    parser.add_argument("--token-file", help="file of mode 0600 with the password of the page")
    asked, strange = parser.parse_known_args(arguments)
    if strange:
        near = get_close_matches(strange[0].partition("=")[0], OPTIONS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(OPTIONS)}"
        raise ConfigError(f"{strange[0]} is no option; {hint}")
    for folder in asked.runs:
        _check(folder)
    if asked.export:
        return _export(asked.runs, asked.export)
    token = read_private_token(asked.token_file, option="--token-file")
    page = Dashboard(asked.runs, host=asked.host, port=asked.port, token=token)
    with contextlib.closing(page), contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write("".join(f"{line}\n" for line in page.greeting))
        sys.stdout.flush()
        page.run()
    return 0


def start() -> int:
    """The same as a program; an error is one line and code 2."""
    logging.basicConfig(format="%(message)s")
    try:
        return main(sys.argv[1:])
    except PeraltaError as error:
        sys.stderr.write(f"dashboard: error: {error}\n")
        return 2


def _check(folder: Path) -> None:
    if not any((folder / name).exists() for name in (METRICS, EVENTS, CONFIG)):
        raise ConfigError(f"{folder} is no folder of a run; runs/NAME is one, with {METRICS}")


def _export(folders: Sequence[Path], path: Path) -> int:
    try:
        write_report(folders, path)
    except OSError as error:
        raise ConfigError(f"--export {path} cannot be written ({error.strerror})") from None
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(start())
