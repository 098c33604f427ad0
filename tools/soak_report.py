"""The figures of a soak, and the section of docs/reliability.md that says them.

Knows a history and one file of text; knows nothing of how the faults were made.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.observe.metrics import number
from tools.promise_checker import Check, fates_of
from tools.run_history import History

HALF_AN_HOUR, ENOUGH = 30.0, 200  # minutes, and the SIGKILLs that so long a soak has at least
BEGIN, END = "<!-- written by make soak: begin -->", "<!-- written by make soak: end -->"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a soak has done and what came of it."""

    kills: Counter[str]  # by worker
    faults: Counter[str]  # by kind
    recoveries: list[float]  # seconds from a kill of the trainer to the next trained step
    fates: Counter[str]
    steps: int
    resumes: int
    loads: int
    unpublished: int  # versions that could not be written while the folder was away


def figures_of(history: History) -> Figures:
    """Count everything once."""
    events = Counter(str(row.get("event")) for row in history.events)
    killed = [row for row in history.events if row.get("event") == "killed"]
    moments = [number(row, "time") for row in killed if row.get("worker") == "trainer"]
    steps = sorted(number(row, "time") for row in history.rows)
    after = [next((step for step in steps if step > moment), None) for moment in moments]
    recoveries = [
        step - moment for moment, step in zip(moments, after, strict=True) if step is not None
    ]
    return Figures(
        kills=Counter(str(row.get("worker")) for row in killed),
        faults=Counter(
            str(row.get("kind")) for row in history.events if row.get("event") == "fault"
        ),
        recoveries=sorted(recoveries),
        fates=Counter(fates_of(history).values()),
        steps=len({row.get("step") for row in history.rows}),
        resumes=events["resume"],
        loads=len(history.logs.loads),
        unpublished=events["publish_failed"],
    )


def struck_enough(figures: Figures, *, minutes: float) -> Check:
    """Whether a soak of half an hour or more has done what it is for."""
    count = figures.kills.total()
    lacks = minutes >= HALF_AN_HOUR and count < ENOUGH
    return Check("kills", f"{count} SIGKILLs", (f"fewer than {ENOUGH}",) if lacks else ())


def section(figures: Figures, checks: Sequence[Check], *, minutes: float, seed: int) -> str:
    """The generated section, in Markdown."""
    kills, faults = figures.kills, figures.faults
    generators = kills.total() - kills["trainer"]
    slow = f"{median(figures.recoveries):.1f} s, at most {figures.recoveries[-1]:.1f} s" if (
        figures.recoveries
    ) else "none was killed"  # fmt: skip
    rows = [
        ("SIGKILLs", f"{kills.total()}: {kills['trainer']} trainer, {generators} generators"),
        ("other faults", ", ".join(f"{count} x {kind}" for kind, count in sorted(faults.items()))),
        ("from a trainer's SIGKILL to its next step", f"median {slow}"),
        ("optimizer steps", f"{figures.steps}, the trainer started again {figures.resumes} times"),
        ("groups", ", ".join(f"{count} {fate}" for fate, count in figures.fates.most_common())),
        ("versions loaded", f"{figures.loads}; {figures.unpublished} could not be published"),
    ]
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return "\n".join(
        [
            BEGIN,
            f"{time.strftime('%Y-%m-%d')}, {minutes:g} minutes, seed {seed}, {machine}, "
            f"commit {_commit() or 'unknown'}:",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {text or 'none'} |" for name, text in rows),
            "",
            "```",
            *(each.line for each in checks),
            "```",
            END,
        ]
    )


def _commit() -> str:
    """Of this checkout, with a + when files of it have changed since; empty outside of git."""
    here = str(Path(__file__).resolve().parent)
    command = ["git", "-C", here, "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_section(text: str, document: Path) -> None:
    """Put the section in its place in the document. Raises ValueError when there is none."""
    whole = document.read_text("utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no place for the report: {BEGIN} ... {END}")
    replace_file(document, f"{before}{text}{after}".encode())
