"""Monitor the workers of all hosts: a status table and their merged logs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from peralta_zmq.operate import host_setup, ssh

if TYPE_CHECKING:
    from peralta_zmq.config.hosts import Host, Hosts

FAILED_STATES = ("gave up", "bad config", "crashed", "unknown")  # unknown: host not reached
DEFAULT_LINES = 20  # of each log, for `bin/lan logs`
RECONNECT_SECONDS = 5.0
Row: TypeAlias = "dict[str, object]"  # one worker, as `supervisor.print_status` prints it


def print_status(hosts: Hosts) -> int:
    """Print a line for each worker, and the end of its log if it failed; returns an exit code.

    The exit code is 1 if a worker failed or a host cannot be reached.
    """
    sys.stdout.write(_line("worker", "host", "state", "since", "restarts", "last line"))
    rows_by_host = _query_all(hosts)
    for host, rows in zip(hosts.host, rows_by_host, strict=True):
        sys.stdout.writelines(_status_text(host, row) for row in rows)
    return int(any(row["state"] in FAILED_STATES for rows in rows_by_host for row in rows))


def running_workers(hosts: Hosts) -> list[str]:
    """Names of the running workers on the hosts that can be reached."""
    rows = [row for host_rows in _query_all(hosts) for row in host_rows]
    return [str(row["name"]) for row in rows if row["state"] == "running"]


def trainer_exit_code(hosts: Hosts) -> int:
    """The exit code of the trainer; 1 if it still runs or its host cannot be reached."""
    code = _query(hosts.trainer)[0]["code"]
    return code if isinstance(code, int) else 1


def _query_all(hosts: Hosts) -> list[list[Row]]:
    with ThreadPoolExecutor(max_workers=len(hosts.host)) as pool:
        return list(pool.map(_query, hosts.host))


def _query(host: Host) -> list[Row]:
    """The status of each worker of a host; if it cannot be reached, the problem as its log."""
    script = host_setup.supervisor_script(host, "status", *host.workers)
    step = ssh.on_host(host, script, find_problem=partial(ssh.failure, remedy="run bin/lan up"))
    result = ssh.run(step)
    if problem := step.find_problem(result):
        unknown = {"state": "unknown", "since": None, "restarts": "", "code": None}
        return [{**unknown, "name": name, "tail": [problem]} for name in host.workers]
    return [json.loads(line) for line in result.out.splitlines()]


def _status_text(host: Host, row: Row) -> str:
    lines = cast("list[str]", row["tail"])
    since, state = row["since"], str(row["state"])
    age = _age(time.time() - since) if isinstance(since, float) else ""
    last_line = lines[-1] if lines else ""
    text = _line(str(row["name"]), host.name, state, age, str(row["restarts"]), last_line)
    earlier_lines = lines[:-1] if state in FAILED_STATES else []
    return text + "".join(f"    {line}\n" for line in earlier_lines)


def _line(name: str, host: str, state: str, since: str, restarts: str, last_line: str) -> str:
    text = f"{name:<16} {host:<10} {state:<12} {since:>9} {restarts:>9}  {last_line}"
    return f"{text.rstrip()}\n"


def _age(seconds: float) -> str:
    """12 s, 5 min, 3.5 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def follow_logs(
    selected: Sequence[tuple[Host, list[str]]], hosts_option: str, *, lines: int
) -> bool:
    """Print the logs until these workers have ended; False if Ctrl-C came first.

    `hosts_option` is shown in the commands that continue after Ctrl-C.
    """
    stopped = threading.Event()
    readers = [LogReader(host, names, stopped) for host, names in selected]
    threads = [
        threading.Thread(target=reader.run, args=(lines,), daemon=True) for reader in readers
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        stopped.set()
        sys.stdout.write(
            f"\nthe run goes on; logs: bin/lan logs {hosts_option}, "
            f"stop: bin/lan down {hosts_option}\n"
        )
    finally:
        for reader in readers:
            reader.close()
    return not stopped.is_set()


class LogReader:
    """Prints the logs of one host's workers; reconnects when the connection is lost."""

    def __init__(self, host: Host, names: Sequence[str], stopped: threading.Event) -> None:
        self._host, self._names, self._stopped = host, names, stopped
        self._process: subprocess.Popen[str] | None = None

    def run(self, lines: int) -> None:
        """Print the last lines of the logs and all new ones."""
        code = self._read(lines)
        while code == ssh.SSH_FAILED and self._host.ssh and not self._stopped.is_set():
            self._print(
                f"{self._host.name}: connection lost, its workers continue; "
                f"reconnecting in {RECONNECT_SECONDS:.0f} s"
            )
            if not self._stopped.wait(RECONNECT_SECONDS):
                code = self._read(0)

    def close(self) -> None:
        """End the connection; the workers do not depend on it."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def _read(self, lines: int) -> int:
        script = host_setup.supervisor_script(self._host, "follow", str(lines), *self._names)
        with ssh.start(ssh.on_host(self._host, script)) as process:
            self._process = process
            assert process.stdout
            for line in process.stdout:
                self._print(line.rstrip("\n"))
            return process.wait()

    def _print(self, line: str) -> None:
        if not self._stopped.is_set():
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
