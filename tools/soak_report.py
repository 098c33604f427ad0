"""Figures of a soak, and the section of docs/reliability.md that reports them."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.report import commit
from peralta_zmq.atomic_files import replace_file
from peralta_zmq.observe.metrics import number
from tools.promise_checker import Check, outcomes_of
from tools.run_history import History

LONG_MINUTES, MIN_KILLS = 30.0, 200  # a soak of at least 30 minutes makes 200 SIGKILLs
FLIP, OUTAGE, HOSTILE = "flip ", "disk ", "hostile "  # beginnings of the kinds of faults
WITH_RESTART = ", with a restart of the trainer"  # end of the kind of an outage
BEGIN, END = "<!-- written by make soak: begin -->", "<!-- written by make soak: end -->"


@dataclass(frozen=True, slots=True)
class Figures:
    """Faults of a soak and their effects."""

    kills: Counter[str]  # by worker
    faults: Counter[str]  # by kind
    recoveries: list[float]  # seconds from a kill of the trainer to the next trained step
    outcomes: Counter[str]
    steps: int
    resumes: int
    loads: int
    unpublished: int  # versions that could not be written during an outage


def figures_of(history: History) -> Figures:
    """Count the events, steps and groups of a run."""
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
        outcomes=Counter(outcomes_of(history).values()),
        steps=len({row.get("step") for row in history.rows}),
        resumes=events["resume"],
        loads=len(history.logs.loads),
        unpublished=events["publish_failed"],
    )


def check_faults(figures: Figures, *, minutes: float) -> Check:
    """Check that a long soak has made enough kills, and started the trainer during outages."""
    kills = figures.kills.total()
    restarts = sum(count for kind, count in figures.faults.items() if kind.endswith(WITH_RESTART))
    missing: list[str] = []
    if minutes >= LONG_MINUTES and kills < MIN_KILLS:
        missing.append(f"fewer than {MIN_KILLS} SIGKILLs")
    if minutes >= LONG_MINUTES and restarts == 0:
        missing.append("no start of the trainer during an outage")
    result = f"{kills} SIGKILLs, {restarts} starts of the trainer during an outage"
    return Check("faults", result, tuple(missing))


def section(figures: Figures, checks: Sequence[Check], *, minutes: float, seed: int) -> str:
    """The generated section, in Markdown."""
    kills, faults = figures.kills, figures.faults
    outcomes = ", ".join(f"{count} {name}" for name, count in figures.outcomes.most_common())
    generators = kills.total() - kills["trainer"]
    recovery = ""
    if seconds := figures.recoveries:
        recovery = f"median {median(seconds):.1f} s, at most {seconds[-1]:.1f} s"
    rows = [
        ("SIGKILLs", f"{kills.total()}: {kills['trainer']} trainer, {generators} generators"),
        ("flipped bits", _counts(faults, FLIP)),
        ("outages of a disk", _counts(faults, OUTAGE)),
        ("invalid and poisoned groups", _counts(faults, HOSTILE)),
        ("other faults", _counts(faults, "")),
        ("time from a SIGKILL of the trainer to its next step", recovery),
        ("training steps", f"{figures.steps}; the trainer resumed {figures.resumes} times"),
        ("groups", outcomes),
        ("loads of weight versions", f"{figures.loads}; {figures.unpublished} publications failed"),
    ]
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return "\n".join(
        [
            BEGIN,
            f"{time.strftime('%Y-%m-%d')}, {minutes:g} minutes, seed {seed}, {machine}, "
            f"commit {commit() or 'unknown'}:",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {text or 'none'} |" for name, text in rows),
            "",
            "```",
            *(result.line for result in checks),
            "```",
            END,
        ]
    )


def _counts(faults: Counter[str], prefix: str) -> str:
    """Number of faults by kind, of the kinds with this prefix; with "", of those without one."""
    kinds = {
        kind: next((known for known in (FLIP, OUTAGE, HOSTILE) if kind.startswith(known)), "")
        for kind in sorted(faults)
    }
    counts = [
        f"{faults[kind]} x {kind.removeprefix(prefix)}"
        for kind, known in kinds.items()
        if known == prefix
    ]
    return "; ".join(counts)


def write_section(text: str, document: Path) -> None:
    """Replace the section of the document. Raises ValueError if its markers are missing."""
    whole = document.read_text("utf-8")
    before, begin, remaining = whole.partition(BEGIN)
    _, end, after = remaining.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no place for the report: {BEGIN} ... {END}")
    replace_file(document, f"{before}{text}{after}".encode())
