"""What a verdict looks at: the newest rows of a run that count, and its generators in them.

Knows metric names and events; knows nothing of what is good or bad.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeAlias

from peralta_zmq.observe.metrics import number

Known: TypeAlias = Mapping[str, object]

WINDOW = 20  # rows that count
ENOUGH = 3  # rows before we speak of balance
BEGINS, ENDS = ("start", "resume"), ("stop", "complete")  # events of a session

EVALUATES = ("evaluate", "evaluated")  # events of the trainer's own answers: begun, done


@dataclass(frozen=True, slots=True)
class GeneratorStats:
    """How a generator that still reports did in these rows; 0 for what it did not report."""

    name: str
    tokens_per_s: float
    blocked: float  # share of its time without a turn, or without room in its queue
    queue: float  # the latter part of it
    reload_seconds: float  # of one change of weights
    step: float  # of its newest weights

    @property
    def speed(self) -> float:
        """Tokens per second of the time in which it may sample."""
        return self.tokens_per_s / max(0.01, 1.0 - self.blocked)


@dataclass(frozen=True, slots=True)
class Session:
    """What the events of the newest session say."""

    begun: float  # unix seconds; NaN when they do not say
    awake: float  # the same, or since the trainer has answered held-out problems itself
    evaluates: bool  # it does so now, and takes no step meanwhile
    up: Mapping[str, float]  # generators that joined and did not leave, by name: when
    left: Sequence[str]


@dataclass(frozen=True, slots=True)
class View:
    """What the findings look at."""

    rows: Sequence[Known]  # the newest, oldest first, at least one
    fares: Sequence[GeneratorStats]  # of the generators that report, by name
    gone: Sequence[str]  # generators heard in these rows, and no more
    events: Sequence[Known]
    session: Session
    quiet_seconds: float  # since the newest row; NaN when the caller has no clock

    def total(self, key: str) -> float:
        """Sum over the rows; a row without the key counts 0."""
        return sum(figure(row, key, 0.0) for row in self.rows)

    def share(self, key: str) -> float:
        """Part of all step time that `key` (seconds) took."""
        return self.total(key) / max(1e-9, self.total("step_time"))

    def growth(self, key: str) -> float:
        """By how much a count that only grows has grown; a restart may set it back."""
        return max(0.0, figure(self.rows[-1], key, 0.0) - figure(self.rows[0], key, 0.0))

    @property
    def step_seconds(self) -> float:
        """Of the median step."""
        return median(figure(row, "step_time", 0.0) for row in self.rows)

    @property
    def waiting(self) -> float:
        """Share of its time that the trainer waits for groups."""
        return self.share("time/wait_for_batch")

    @property
    def num_groups(self) -> float:
        """Groups that these rows' steps took, after the first row."""
        return sum(
            figure(row, key, 0.0)
            for row in self.rows[1:]
            for key in row
            if key.startswith("gen/") and key.endswith("/groups")
        )


def observed(
    rows: Sequence[Known], events: Sequence[Known], *, now: float | None = None
) -> View | None:
    """What counts of rows and events, oldest first; None before the first step.

    `now` (unix seconds) is for a run that is under way.
    """
    counted = _counted(rows, events)
    if not counted:
        return None
    gone = [] if is_over(events) else _gone(counted, events)
    quiet_seconds = _quiet_seconds(counted[-1], events, now)
    fares = _fares(counted, but=gone)
    return View(counted, fares, gone, events, session_of(events), quiet_seconds)


def session_of(events: Sequence[Known]) -> Session:
    """The newest session, of events oldest first."""
    begins = [place for place, each in enumerate(events) if each.get("event") in BEGINS]
    begun = figure(events[begins[-1]], "time") if begins else math.nan
    told = events[begins[-1] :] if begins else events
    up, left = _attendance(told)
    evaluations = [each for each in told if each.get("event") in EVALUATES]
    evaluates = bool(evaluations) and evaluations[-1].get("event") == EVALUATES[0]
    awake = figure(evaluations[-1], "time") if evaluations else begun
    return Session(begun, awake, evaluates, up, sorted(left))


def seconds_left(rows: Sequence[Known], steps_left: float) -> float:
    """Seconds that so many steps take, at the pace of the newest WINDOW steps.

    `rows` are of one session, oldest first: a pause is no pace. The first step speaks for itself;
    NaN before it.
    """
    lived = [row for row in rows if figure(row, "step_time", 0.0) > 0.0][-WINDOW - 1 :]
    if not lived:
        return math.nan
    num_steps = figure(lived[-1], "step") - figure(lived[0], "step")
    seconds = figure(lived[-1], "time") - figure(lived[0], "time")
    runs = num_steps > 0 and seconds > 0  # a clock may have been set back
    pace = seconds / num_steps if runs else figure(lived[-1], "step_time")
    return pace * max(0.0, steps_left)


def figure(row: Known, key: str, default: float = math.nan) -> float:
    """A field as a finite number; `default` for all else."""
    value = number(row, key, default)
    return value if math.isfinite(value) else default


def _counted(rows: Sequence[Known], events: Sequence[Known]) -> list[Known]:
    """The newest rows that were trained live; a session's first one has its start in it."""
    lived = [row for row in rows[-2 * WINDOW :] if figure(row, "step_time", 0.0) > 0.0]
    firsts = {figure(each, "step") + 1 for each in events if each.get("event") in BEGINS}
    later = [row for row in lived if figure(row, "step") not in firsts]
    return (later if len(later) >= ENOUGH else lived)[-WINDOW:]


def _names(row: Known) -> set[str]:
    """Generators that report in this row."""
    ends = "/tokens_per_s"
    return {key[4 : -len(ends)] for key in row if key.startswith("gen/") and key.endswith(ends)}


def _fares(rows: Sequence[Known], *, but: Sequence[str]) -> list[GeneratorStats]:
    """A report covers two seconds only, so shares and speeds are means over the rows."""

    def mean(name: str, kind: str) -> float:
        told = [figure(row, f"gen/{name}/{kind}") for row in rows]
        return fmean([value for value in told if math.isfinite(value)] or [0.0])

    return [
        GeneratorStats(
            name,
            tokens_per_s=mean(name, "tokens_per_s"),
            blocked=mean(name, "blocked_frac"),
            queue=mean(name, "queue_frac"),
            reload_seconds=mean(name, "reload_s"),
            step=figure(rows[-1], f"gen/{name}/step"),
        )
        for name in sorted(_names(rows[-1]) - set(but))
    ]


def _gone(rows: Sequence[Known], events: Sequence[Known]) -> list[str]:
    """Generators that were heard in these rows or left since, and are not heard now."""
    up, left = _attendance(events)
    silent = {name for row in rows for name in _names(row)} - _names(rows[-1])
    since = figure(rows[0], "time")
    return sorted(silent - up.keys() | {name for name, moment in left.items() if moment >= since})


def _attendance(events: Sequence[Known]) -> tuple[dict[str, float], dict[str, float]]:
    """Who is up of those who joined, and who left: each with the moment."""
    up: dict[str, float] = {}
    left: dict[str, float] = {}
    boots: dict[str, object] = {}  # of the newest start of each
    for each in events:
        name, incarnation = str(each.get("generator")), each.get("incarnation")
        if each.get("event") == "join":
            up[name], boots[name] = figure(each, "time"), incarnation
            left.pop(name, None)
        elif each.get("event") == "leave" and boots.get(name, incarnation) == incarnation:
            up.pop(name, None)
            left[name] = figure(each, "time")
    return up, left


def _quiet_seconds(row: Known, events: Sequence[Known], now: float | None) -> float:
    """Since a step could have come; NaN for a run that takes none now."""
    session = session_of(events)
    if now is None or is_over(events) or session.evaluates:
        return math.nan
    moments = [figure(row, "time"), session.awake]
    return now - max((each for each in moments if math.isfinite(each)), default=now)


def is_over(events: Sequence[Known]) -> bool:
    """Whether the newest session was ended; nobody hears its generators any more."""
    sessions = [each.get("event") for each in events if each.get("event") in (*BEGINS, *ENDS)]
    return bool(sessions) and sessions[-1] in ENDS
