"""Result of a check, and the report that runs checks and prints their results."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

from peralta_zmq.errors import PeraltaError, described

CRASHED = "this is a bug of bin/doctor, or of the code that it called; the other checks still ran"
HANGS = "a mount hangs: is the NAS on? Unmount it (umount -l) and mount it again"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a check. If it is ok, a remedy is only advice."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The line that is printed."""
        level = "FAIL" if not self.ok else "note" if self.remedy else "ok"
        remedy = f". {self.remedy[0].upper()}{self.remedy[1:]}" if self.remedy else ""
        return f"{level:<5} {self.name:<9} {self.detail}{remedy}"


RunCheck: TypeAlias = Callable[[], "Check | None"]  # None: does not apply to this machine


class Report:
    """Runs checks and prints each result at once."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def add(self, check: Check) -> bool:
        """Print a result; True if it is ok."""
        self.checks.append(check)
        sys.stdout.write(check.line + "\n")
        sys.stdout.flush()
        return check.ok

    def run(self, name: str, check: RunCheck, *, timeout: float | None = None) -> bool:
        """Run a check and print its result; True if it is ok or does not apply.

        With a timeout the check runs in a thread that is abandoned if it hangs, as on a dead mount.
        """
        if timeout is None:
            result = run_check(name, check)
        else:
            results: SimpleQueue[Check | None] = SimpleQueue()
            threading.Thread(
                target=lambda: results.put(run_check(name, check)), daemon=True
            ).start()
            try:
                result = results.get(timeout=timeout)
            except Empty:
                result = Check(name, False, f"no answer within {timeout:g} s", HANGS)
        return result is None or self.add(result)

    def close(self, *, as_json: bool) -> int:
        """Print the summary; returns the exit code."""
        num_failed = sum(not check.ok for check in self.checks)
        total = len(self.checks)
        sys.stdout.write(
            f"{num_failed} of {total} checks failed\n" if num_failed else "all checks passed\n"
        )
        if as_json:
            sys.stdout.write(json.dumps({"checks": list(map(asdict, self.checks))}) + "\n")
        sys.stdout.flush()
        return int(num_failed > 0)


def run_check(name: str, check: RunCheck) -> Check | None:
    """The result of a check; an exception is a failed check."""
    try:
        return check()
    except PeraltaError as error:
        return failed_check(name, error)
    except Exception as error:  # noqa: BLE001  a broken check must not stop the others
        return Check(name, False, described(error), CRASHED)


def failed_check(
    name: str, error: PeraltaError, remedy: str = "see docs/troubleshooting.md"
) -> Check:
    """The failed check for an error; the text after its semicolon is the remedy."""
    detail, _, own_remedy = str(error).partition("; ")
    return Check(name, False, detail, own_remedy or remedy)
