"""What runs where, asked of every host at once and said as a table.

Knows what a keeper answers; knows nothing of training.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from peralta_zmq.operate import host_setup
from peralta_zmq.operate.ssh import on, run, unreachable

if TYPE_CHECKING:
    from peralta_zmq.config.hosts import Host, Hosts

Row: TypeAlias = "dict[str, object]"
BAD_STATES = ("given up", "refused", "killed with its supervisor")


def show(hosts: Hosts) -> int:
    """Print a line for each worker, and the log's end of those that gave up; an exit code.

    1 when a host does not answer, or a worker failed.
    """
    sys.stdout.write(_line("worker", "host", "state", "since", "restarts", "last words"))
    bad = False
    for host, (rows, problem) in zip(hosts.host, _ask_all(hosts), strict=True):
        for name in host.workers if problem else ():
            sys.stdout.write(_line(name, host.name, "unknown", "", "", problem or ""))
        for row in rows:
            bad = bad or row["state"] in BAD_STATES
            sys.stdout.write(_described(host, row))
        bad = bad or bool(problem)
    return int(bad)


def running(hosts: Hosts) -> list[str]:
    """Names of the workers that run, on the hosts that answer."""
    rows = [row for answered, _ in _ask_all(hosts) for row in answered]
    return [str(row["name"]) for row in rows if row["state"] == "running"]


def trainer_code(hosts: Hosts) -> int:
    """The exit code of the trainer; 1 when it runs on, or nobody knows."""
    rows, _ = _ask(hosts.trainer)
    code = rows[0]["code"] if rows else None
    return code if isinstance(code, int) else 1


def _ask_all(hosts: Hosts) -> list[tuple[list[Row], str | None]]:
    with ThreadPoolExecutor(max_workers=len(hosts.host)) as pool:
        return list(pool.map(_ask, hosts.host))


def _ask(host: Host) -> tuple[list[Row], str | None]:
    """What the keeper says of each worker, or why it says nothing."""
    script = host_setup.inside(host, " ".join([host_setup.KEEPER, "status", *host.workers]))
    result = run(on(host, script))
    if result.code:
        return [], unreachable(host, result) or f"{result.last_words}; run bin/lan up"
    return [json.loads(line) for line in result.out.splitlines()], None


def _described(host: Host, row: Row) -> str:
    tail = row["tail"]
    lines = [str(each) for each in tail] if isinstance(tail, list) else []
    since = row["since"] if isinstance(row["since"], float) else None
    age = "" if since is None else _age(time.time() - since)
    last = lines[-1] if lines else ""
    first = _line(str(row["name"]), host.name, str(row["state"]), age, str(row["restarts"]), last)
    more: Sequence[str] = lines[:-1] if row["state"] in BAD_STATES else ()
    return first + "".join(f"    {line}\n" for line in more)


def _line(name: str, host: str, state: str, since: str, restarts: str, last: str) -> str:
    text = f"{name:<16} {host:<10} {state:<12} {since:>9} {restarts:>9}  {last}"
    return f"{text.rstrip()}\n"


def _age(seconds: float) -> str:
    """12 s, 5 min, 3.5 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{max(0.0, seconds):.0f} s"
