"""Program bin/dashboard: serve the dashboard of runs, or write one HTML file."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from peralta_zmq.addresses import read_private_token
from peralta_zmq.errors import ConfigError, did_you_mean, program_name
from peralta_zmq.observe.dashboard.run_files import runs_in
from peralta_zmq.observe.dashboard.view import write_report
from peralta_zmq.observe.metrics import METRICS

OPTIONS = ("--export", "--host", "--port", "--token-file")


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C, or with --export write one file. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog=program_name("dashboard"), allow_abbrev=False)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run folder, or a folder of run folders")
    add("--export", type=Path, metavar="FILE", help="write one HTML file instead of serving")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8470, help="first port to try (default: %(default)s)")
    add("--token-file", help="file of mode 0600 with the password of the dashboard")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        hint = did_you_mean(unknown[0].partition("=")[0], OPTIONS)
        hint = hint or f"choose from {', '.join(OPTIONS)}"
        raise ConfigError(f"unknown option {unknown[0]}; {hint}")
    for folder in options.runs:
        if not runs_in(folder):
            raise ConfigError(
                f"{folder} is not a run folder and has none; choose one with {METRICS}"
            )
    if file := options.export:
        try:
            runs = [run for folder in options.runs for run in runs_in(folder)]
            sys.stdout.write(f"{write_report(runs, file)}\n")
        except OSError as error:
            raise ConfigError(f"--export {file} cannot be written ({error.strerror})") from None
        return 0
    token = read_private_token(options.token_file, option="--token-file")

    from peralta_zmq.observe.dashboard.app import Dashboard

    dashboard = Dashboard(options.runs, host=options.host, port=options.port, token=token)
    with contextlib.closing(dashboard), contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write("".join(f"{line}\n" for line in dashboard.banner))
        sys.stdout.flush()
        dashboard.server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
