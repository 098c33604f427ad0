"""Checks of bin/doctor: result of a check, and the report that prints the results."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import ParamSpec

from peralta_zmq.errors import PeraltaError, described, printable

# Remedies of a check that raised an unexpected exception, and of a check that did not return.
CRASHED = "this is a bug of the doctor, or of the code that it called; the other checks still ran"
HANGS = "a mount hangs: is the NAS on? Unmount it (umount -l) and mount it again"
# Start of the line that the trainer's doctor prints when the doctors of generators can connect.
SERVING = "waiting for the checks of generators"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a check; the remedy of a check that passed is only advice."""

    ok: bool
    detail: str
    remedy: str = ""


P = ParamSpec("P")


class Report:
    """Runs checks, prints each result at once, and counts the failures."""

    def __init__(self, *, mount_seconds: float = 120.0) -> None:
        self.checks: list[tuple[str, Check]] = []  # with their names
        self._mount_seconds = mount_seconds  # time limit of a check on a mount that may be dead

    def add(self, name: str, check: Check) -> bool:
        """Print a result; returns True if the check passed."""
        self.checks.append((name, check))
        # A check that passed may have a remedy as advice; its line is then a note.
        level = "FAIL" if not check.ok else "note" if check.remedy else "ok"
        remedy = f". {check.remedy[0].upper()}{check.remedy[1:]}" if check.remedy else ""
        text = printable(f"{check.detail}{remedy}", keep="\n")  # may be text of another machine
        sys.stdout.write(f"{level:<5} {name:<9} {text}\n")
        sys.stdout.flush()
        return check.ok

    def run(
        self, name: str, check: Callable[P, Check | None], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Run a check, print its result; True if it passed or does not apply (None)."""
        result = run_check(partial(check, *args, **kwargs))
        return result is None or self.add(name, result)

    def run_with_timeout(
        self, name: str, check: Callable[P, Check], *args: P.args, **kwargs: P.kwargs
    ) -> bool:
        """Like `run`, in a thread, for a check that a dead mount may block."""
        results: SimpleQueue[Check | None] = SimpleQueue()
        call = partial(check, *args, **kwargs)
        threading.Thread(target=lambda: results.put(run_check(call)), daemon=True).start()
        try:
            result = results.get(timeout=self._mount_seconds)
        except Empty:
            result = Check(False, f"no answer within {self._mount_seconds:g} s", HANGS)
        return result is None or self.add(name, result)

    def close(self, *, as_json: bool) -> int:
        """Print the summary, and all results as JSON if `as_json`; returns the exit code."""
        num_failed = sum(not check.ok for _, check in self.checks)
        summary = f"{num_failed} of {len(self.checks)} checks failed"
        sys.stdout.write(f"{summary if num_failed else 'all checks passed'}\n")
        if as_json:
            rows = [{"name": name, **asdict(check)} for name, check in self.checks]
            sys.stdout.write(json.dumps({"checks": rows}) + "\n")
        sys.stdout.flush()
        return int(num_failed > 0)


def run_check(check: Callable[[], Check | None]) -> Check | None:
    """The result of a check; an exception that it raises is a failed check."""
    try:
        return check()
    except PeraltaError as error:
        return failed_check(error)
    except Exception as error:  # noqa: BLE001  a broken check must not stop the others
        return Check(False, described(error), CRASHED)


def failed_check(error: PeraltaError, remedy: str = "see docs/troubleshooting.md") -> Check:
    """The failed check for an error with the message "detail; remedy", or only a detail."""
    detail, _, own_remedy = str(error).partition("; ")
    return Check(False, detail, own_remedy or remedy)
