"""What a doctor finds: one line for each thing looked at. Knows nothing of what is looked at."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

from peralta_zmq.errors import PeraltaError, described

CRASHED = "this is a fault of bin/doctor, or of the code that it called; the rest was looked at"
HANGS = "a mount hangs: is the NAS on? Unmount it (umount -l) and mount it again"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. A remedy beside `ok` is advice: the run works without it."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """For a person."""
        verdict = "FAIL" if not self.ok else "note" if self.remedy else "ok"
        remedy = f". {self.remedy[0].upper()}{self.remedy[1:]}" if self.remedy else ""
        return f"{verdict:<5} {self.name:<9} {self.detail}{remedy}"


Look: TypeAlias = Callable[[], "Check | None"]  # None: there is nothing to be said here


class Report:
    """Takes findings, and prints each when it comes."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def write(self, check: Check) -> bool:
        """Whether it is in order."""
        self.checks.append(check)
        sys.stdout.write(check.line + "\n")
        sys.stdout.flush()
        return check.ok

    def look(self, name: str, look: Look, *, seconds: float | None = None) -> bool:
        """Write what a look finds, within so many seconds; False when it is not in order."""
        found = attempt(name, look) if seconds is None else bounded(name, look, seconds=seconds)
        return found is None or self.write(found)

    def close(self, *, as_json: bool) -> int:
        """The last words; returns the exit code."""
        wrong = sum(not each.ok for each in self.checks)
        said = f"{wrong} of {len(self.checks)} checks failed" if wrong else "all is well"
        sys.stdout.write(f"{said}\n")
        if as_json:
            sys.stdout.write(json.dumps({"checks": [asdict(each) for each in self.checks]}) + "\n")
        sys.stdout.flush()
        return int(wrong > 0)


def failed(name: str, error: PeraltaError, remedy: str = "see docs/troubleshooting.md") -> Check:
    """The finding that an error is: what it says after its semicolon is the remedy."""
    detail, _, own = str(error).partition("; ")
    return Check(name, False, detail, own or remedy)


def attempt(name: str, look: Look) -> Check | None:
    """What `look` finds; a look that fails is a finding too, and never ends the visit."""
    try:
        return look()
    except PeraltaError as error:
        return failed(name, error)
    except Exception as error:  # noqa: BLE001  one broken look must not hide what the others find
        return Check(name, False, described(error), CRASHED)


def bounded(name: str, look: Look, *, seconds: float) -> Check | None:
    """The same by a thread that is left behind when it hangs, as in a dead mount."""
    found: SimpleQueue[Check | None] = SimpleQueue()
    threading.Thread(target=lambda: found.put(attempt(name, look)), daemon=True).start()
    try:
        return found.get(timeout=seconds)
    except Empty:
        return Check(name, False, f"no answer within {seconds:g} s", HANGS)
