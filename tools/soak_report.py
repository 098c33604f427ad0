"""Figures of a soak, and the report that it prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from peralta_zmq.observe.metrics import number
from tools.promise_checker import Check, outcomes_of
from tools.run_history import History

LONG_MINUTES, MIN_KILLS = 30.0, 200  # a soak of at least 30 minutes makes 200 SIGKILLs
FLIP, OUTAGE, HOSTILE = "flip ", "disk ", "hostile "  # beginnings of the kinds of faults
WITH_RESTART = ", with a restart of the trainer"  # end of the kind of an outage


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


def report(figures: Figures, checks: Sequence[Check]) -> str:
    """Figures and checks as lines of text."""
    kills = figures.kills
    recovery = "none"
    if seconds := figures.recoveries:
        recovery = f"median {median(seconds):.1f} s, at most {seconds[-1]:.1f} s"
    return "\n".join(
        [
            f"SIGKILLs: {kills.total()}, {kills['trainer']} of them of the trainer",
            f"other faults: {_counts(figures.faults)}",
            f"time from a SIGKILL of the trainer to its next step: {recovery}",
            f"training steps: {figures.steps}; the trainer resumed {figures.resumes} times",
            f"groups: {_counts(figures.outcomes)}",
            f"loads of weight versions: {figures.loads}; {figures.unpublished} publications failed",
            *(result.line for result in checks),
        ]
    )


def _counts(counted: Counter[str]) -> str:
    """Each name with its number, sorted by name."""
    return "; ".join(f"{count} x {name}" for name, count in sorted(counted.items())) or "none"
