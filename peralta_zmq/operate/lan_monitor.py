"""Status table and merged logs of the workers on all hosts of a run.

A worker is the trainer or one generator. Its supervisor on the host writes its state and its log
(operate/supervisor.py); this module reads state and log over ssh.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar, cast

from peralta_zmq.config.hosts import Host, Hosts
from peralta_zmq.config.programs import NO_READER
from peralta_zmq.errors import printable, program_name
from peralta_zmq.observe.run_state import format_duration
from peralta_zmq.operate import host_setup, ssh

# unknown: the query failed. From "unshared" on: only of jobs of a Slurm cluster.
FAILED_STATES = (
    *("gave up", "failed", "crashed", "unknown"),
    *("unshared", "node failed", "no memory"),
)
# replaying, evaluating: only of a trainer
RUNNING_STATES = ("running", "waiting", "replaying", "evaluating")
DEFAULT_LINES = 20  # earlier lines of each log that `bin/lan logs` prints
RECONNECT_SECONDS = 5.0
# Status of one worker: the JSON object of `supervisor.print_status` plus the host's name. The keys
# are name, host, state, since, restarts, code (exit code) and tail (last lines of the log).
Row: TypeAlias = dict[str, object]
T = TypeVar("T")
R = TypeVar("R")


def print_status(rows: Sequence[Row]) -> int:
    """Print a line for each worker, and the end of a failed worker's log.

    Returns an exit code: 1 if a worker failed or a host cannot be reached, else 0.
    """
    sys.stdout.write(_line("worker", "host", "state", "since", "restarts", "last line"))
    sys.stdout.writelines(map(_status_text, rows))
    return int(any(row["state"] in FAILED_STATES for row in rows))


def running_workers(hosts: Hosts) -> list[str]:
    """Names of the running workers on the hosts that can be reached."""
    return [str(row["name"]) for row in query_all(hosts) if row["state"] in RUNNING_STATES]


def trainer_exit_code(hosts: Hosts) -> int:
    """The exit code of the trainer; 1 if it still runs or its host cannot be reached."""
    # hosts.trainer is the trainer's host, and the trainer is the first worker there.
    code = _query(hosts.trainer)[0]["code"]
    return code if isinstance(code, int) else 1


def in_parallel(function: Callable[[T], R], arguments: Mapping[str, T]) -> dict[str, R]:
    """Call a function with each argument in a thread; returns the results by key."""
    with ThreadPoolExecutor(max_workers=max(1, len(arguments))) as pool:
        return dict(zip(arguments, pool.map(function, arguments.values()), strict=True))


def query_all(hosts: Hosts) -> list[Row]:
    """The status of all workers, in the order of the hosts."""
    rows_by_host = in_parallel(_query, {host.name: host for host in hosts.host})
    return [row for rows in rows_by_host.values() for row in rows]


def _query(host: Host) -> list[Row]:
    """Return a row for each worker of a host.

    If the query fails, the rows have the state "unknown", and the problem instead of a log.
    """
    script = host_setup.supervisor_script(host, "status", *host.workers)
    step = ssh.on_host(host, script, remedy="run bin/lan up")
    result = ssh.run(step)
    if problem := step.find_problem(result):
        unknown = {"state": "unknown", "since": None, "restarts": "", "code": None}
        rows = [{**unknown, "name": name, "tail": [problem]} for name in host.workers]
    else:
        # The user's shell may print text before the first row.
        rows = [json.loads(row) for row in re.findall('{"since": .*', result.stdout)]
    return [{**row, "host": host.name} for row in rows]


def _status_text(row: Row) -> str:
    """The line of the status table for a worker; more lines of its log if it failed."""
    lines = cast("list[str]", row["tail"])
    since, state = row["since"], str(row["state"])
    age = format_duration(max(0.0, time.time() - since)) if isinstance(since, float) else ""
    last_line = lines[-1] if lines else ""
    text = _line(row["name"], row["host"], state, age, row["restarts"], last_line)
    earlier_lines = lines[:-1] if state in FAILED_STATES else []
    return text + "".join(f"    {printable(line)}\n" for line in earlier_lines)


def _line(*columns: object) -> str:
    """A line of the status table, of six columns."""
    text = "{!s:<16} {!s:<10} {!s:<12} {!s:>9} {!s:>9}  {}".format(*columns)
    return f"{printable(text.rstrip())}\n"


def follow_logs(
    selected: Sequence[tuple[Host, list[str]]], hosts_option: str, *, lines: int
) -> bool:
    """Print the logs until the workers end; returns False if Ctrl-C came first.

    `lines` is the number of earlier lines of each log to print. `hosts_option` is `--hosts FILE`,
    for the commands that the message after Ctrl-C suggests.
    """
    stopped = threading.Event()
    readers = [LogReader(host, names, lines, stopped) for host, names in selected]
    threads = [threading.Thread(target=reader.run, daemon=True) for reader in readers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        stopped.set()
        sys.stdout.write(
            f"\nthe run continues; logs: {program_name('lan')} logs {hosts_option}, "
            f"stop: {program_name('lan')} down {hosts_option}\n"
        )
    finally:
        for reader in readers:
            reader.close()
    return not stopped.is_set()


class LogReader:
    """Prints the logs of one host's workers; reconnects when the connection is lost.

    It begins with the last `lines` lines of each log, and ends when the workers have ended. Once
    `stopped` is set, it neither prints nor reconnects.
    """

    def __init__(
        self, host: Host, names: Sequence[str], lines: int, stopped: threading.Event
    ) -> None:
        self._host, self._names, self._stopped = host, names, stopped
        self._num_earlier_lines = lines
        self._process: subprocess.Popen[str] | None = None

    def run(self) -> None:
        """Print the logs until the workers end."""
        # A host without `ssh` is this machine, which has no connection to lose.
        while self._read() == ssh.SSH_FAILED and self._host.ssh:
            self._print(
                f"{self._host.name}: connection lost, its workers continue; "
                f"reconnecting in {RECONNECT_SECONDS:.0f} s"
            )
            if self._stopped.wait(RECONNECT_SECONDS):
                return
            # Print no earlier lines again; lines written while disconnected are never printed.
            self._num_earlier_lines = 0

    def close(self) -> None:
        """End the connection; the workers continue."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def _read(self) -> int:
        """Print the logs until the connection ends; returns the exit code of ssh."""
        words = ("follow", str(self._num_earlier_lines), *self._names)
        script = host_setup.supervisor_script(self._host, *words)
        with ssh.start(ssh.on_host(self._host, script)) as process:
            self._process = process
            assert process.stdout
            for line in process.stdout:
                self._print(line.rstrip("\n"))
            return process.wait()

    def _print(self, line: str) -> None:
        """Print a line, unless Ctrl-C has stopped the output."""
        if not self._stopped.is_set():
            try:
                sys.stdout.write(f"{printable(line)}\n")
                sys.stdout.flush()
            except BrokenPipeError:
                os._exit(NO_READER)  # this thread cannot end the program otherwise
