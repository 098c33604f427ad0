"""Status table and merged logs of the workers on all hosts of a run, read over ssh."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

from peralta_zmq.config.hosts import Host, Hosts
from peralta_zmq.config.programs import NO_READER
from peralta_zmq.errors import printable, program_name
from peralta_zmq.observe.run_state import format_duration
from peralta_zmq.operate import host_setup, ssh

# States of workers that have failed, or whose state cannot be queried (unknown).
FAILED_STATES = (
    *("gave up", "failed", "crashed", "unknown"),
    *("unshared", "node failed", "no memory"),
)
# Status of one worker: the JSON object of `supervisor.print_status` plus the host's name. The keys
# are name, host, state, since, restarts, code (exit code) and tail (last lines of the log).
Row: TypeAlias = dict[str, object]
T = TypeVar("T")
R = TypeVar("R")


def print_status(rows: Sequence[Row]) -> int:
    """Print a line for each worker; returns 1 if one failed or a host cannot be reached, else 0."""
    sys.stdout.write(_line("worker", "host", "state", "since", "restarts", "last line"))
    sys.stdout.writelines(map(_status_text, rows))
    return int(any(row["state"] in FAILED_STATES for row in rows))


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
    """Rows of the workers of a host; with the problem instead of a log if the query fails."""
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
    lines = cast("list[str]", row["tail"])
    since = row["since"]
    state = str(row["state"])
    age = format_duration(max(0.0, time.time() - since)) if isinstance(since, float) else ""
    last_line = lines[-1] if lines else ""
    text = _line(row["name"], row["host"], state, age, row["restarts"], last_line)
    earlier_lines = lines[:-1] if state in FAILED_STATES else []
    return text + "".join(f"    {printable(line)}\n" for line in earlier_lines)


def _line(*columns: object) -> str:
    text = "{!s:<16} {!s:<10} {!s:<12} {!s:>9} {!s:>9}  {}".format(*columns)
    return f"{printable(text.rstrip())}\n"


def print_detached(hosts_file: Path) -> None:
    lan = program_name("lan")
    hosts = f"--hosts {hosts_file}"
    sys.stdout.write(f"\nthe run continues; logs: {lan} logs {hosts}, stop: {lan} down {hosts}\n")


def follow_logs(
    selected: Sequence[tuple[Host, list[str]]], hosts_file: Path, *, lines: int
) -> bool:
    """Print `lines` earlier lines of each log, then new ones until the workers end.

    Returns False if Ctrl-C came first.
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
        print_detached(hosts_file)
    finally:
        for reader in readers:
            reader.close()
    return not stopped.is_set()


@dataclass
class LogReader:
    """Prints the logs of one host's workers; reconnects when the connection is lost.

    Once `stopped` is set, it neither prints nor reconnects.
    """

    host: Host
    names: Sequence[str]
    num_earlier_lines: int
    stopped: threading.Event
    reconnect_seconds: float = 5.0
    process: subprocess.Popen[str] | None = None

    def run(self) -> None:
        # A host without `ssh` is this machine, which has no connection to lose.
        while self._read() == ssh.SSH_FAILED and self.host.ssh:
            self.print_line(
                f"{self.host.name}: connection lost, its workers continue; "
                f"reconnecting in {self.reconnect_seconds:.0f} s"
            )
            if self.stopped.wait(self.reconnect_seconds):
                return
            # Print no earlier lines again; lines written while disconnected are never printed.
            self.num_earlier_lines = 0

    def close(self) -> None:
        """End the connection; the workers continue."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def _read(self) -> int:
        words = ("follow", str(self.num_earlier_lines), *self.names)
        script = host_setup.supervisor_script(self.host, *words)
        with ssh.start(ssh.on_host(self.host, script)) as process:
            self.process = process
            assert process.stdout
            for line in process.stdout:
                self.print_line(line.rstrip("\n"))
            return process.wait()

    def print_line(self, line: str) -> None:
        if not self.stopped.is_set():
            try:
                sys.stdout.write(f"{printable(line)}\n")
                sys.stdout.flush()
            except BrokenPipeError:
                os._exit(NO_READER)  # this thread cannot end the program otherwise
