"""State of a run, computed from the newest rows of metrics.jsonl and events.jsonl.

A session is one process of the trainer: it begins with the event "start" or "resume" and ends with
"stop" or "complete". Before "resume", a trainer may replay steps from its journal: the event
"replay" begins that part, and these steps have step_time 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from peralta_zmq.observe.metrics import finite_mean, generator_numbers, number

Rows: TypeAlias = Sequence[Mapping[str, object]]  # metrics.jsonl or events.jsonl, oldest first
Activity: TypeAlias = Literal["training", "evaluating", "replaying", "waiting"]

WINDOW = 20  # number of newest rows that the state covers
MIN_ROWS = 3  # smallest number of rows from which the verdict computes means
REPORTED = "tokens_per_s"  # metric in every report of a generator
# Events.
REPLAY = "replay"
COMPLETE = "complete"
STORE_ERROR = "store_error"
SESSION_STARTS = ("start", "resume", REPLAY)
SESSION_ENDS = ("stop", COMPLETE)
EVALUATION_EVENTS = ("evaluate", "evaluated")  # begin and end of a held-out evaluation


@dataclass(frozen=True, slots=True)
class GeneratorStats:
    """Mean values of a generator over the recent rows; 0 for values never reported."""

    name: str
    tokens_per_s: float
    blocked: float  # share of its time in which it waits for the trainer or its send queue
    queue: float  # share of its time in which its send queue is full; included in `blocked`
    reload_seconds: float  # duration of one weight update
    step: float  # training step of its weights, from the newest row; NaN if unknown

    @property
    def speed(self) -> float:
        """Tokens per second while the generator is not blocked."""
        return self.tokens_per_s / max(0.01, 1.0 - self.blocked)


@dataclass(frozen=True, slots=True)
class SessionState:
    start: float  # unix seconds; NaN if unknown
    active_since: float  # newest begin or end of a held-out evaluation; `start` if there was none
    is_evaluating: bool  # a held-out evaluation is running; no step is expected until it ends
    is_replaying: bool  # steps are trained again from the journal, before the session resumes
    is_over: bool
    is_complete: bool  # it is over, and the run has all its steps
    up: Mapping[str, float]  # generators that joined and did not leave -> unix seconds
    left: Mapping[str, float]  # generators that left -> unix seconds
    store_errors: Mapping[str, str]  # generators that are up -> why they cannot read new weights

    def activity(self, newest_row: Mapping[str, object]) -> Activity:
        """What a running trainer does; `newest_row` is that of metrics.jsonl, or {}."""
        if self.is_replaying:
            return "replaying"
        if self.is_evaluating:
            return "evaluating"
        # Events of joins may be missing: the number of lines of an event is limited.
        has_trained = not self.left and number(newest_row, "time") > self.start
        is_training = self.up or has_trained or math.isnan(self.start)
        return "training" if is_training else "waiting"

    def why_no_generator(self, now: float) -> str:
        """Why no generator is up; empty if one is up or may still join soon."""
        if self.up:
            return ""
        if self.left:
            return f"{', '.join(sorted(self.left))} left"
        seconds = now - self.active_since
        reason = f"no generator has joined in {format_duration(seconds)}"
        return reason if seconds > stall_limit(0.0) else ""


@dataclass(frozen=True, slots=True)
class RunState:
    """The recent rows of a run, with its generators and session."""

    rows: Rows  # at most WINDOW; empty before the first step
    trained: Rows  # at most 2 WINDOW, with the first steps of sessions, which `rows` leaves out
    events: Rows
    session: SessionState
    generators: Sequence[GeneratorStats]  # generators in the newest row, sorted by name
    gone: Sequence[str]  # generators that left, or are silent and not up (see _gone)
    idle_seconds: float  # since the newest step; NaN if no step is expected

    def share(self, key: str) -> float:
        """Sum of the metric `key`, in seconds, as a share of the time of all steps; NaN if none."""
        seconds = sum(number(row, key, 0.0) for row in self.rows)
        total = sum(number(row, "step_time", 0.0) for row in self.rows)
        return seconds / total if total else math.nan

    def growth(self, key: str) -> float:
        """Increase of a cumulative count over the rows; too small if a restart has reset it."""
        return max(0.0, number(self.rows[-1], key, 0.0) - number(self.rows[0], key, 0.0))

    @property
    def step_seconds(self) -> float:
        """Median duration of a step; needs at least one row."""
        return median(number(row, "step_time", 0.0) for row in self.rows)

    @property
    def waiting(self) -> float:
        return self.share("time/wait_for_batch")

    @property
    def num_groups(self) -> float:
        """Groups consumed after the first row, in the steps that `growth` covers."""
        return sum(number(row, "num_groups", 0.0) for row in self.rows[1:])


def run_state(rows: Rows, events: Rows, *, now: float | None = None) -> RunState:
    """The state of a run; `now` (unix seconds) only for a trainer that should be running."""
    session = newest_session(events)
    trained = _without_replayed(rows[-2 * WINDOW :])
    recent = _recent(trained, events)
    if not recent:
        return RunState((), (), events, session, generators=(), gone=(), idle_seconds=math.nan)
    gone = [] if session.is_over else _gone(recent, events)
    idle_seconds = math.nan
    expects_step = not (session.is_over or session.is_evaluating or session.is_replaying)
    if now is not None and expects_step:
        times = [number(recent[-1], "time"), session.active_since]
        idle_seconds = now - max((time for time in times if math.isfinite(time)), default=now)
    names = generator_numbers(recent[-1], REPORTED).keys() - set(gone)
    generators = [_stats(recent, name) for name in sorted(names)]
    return RunState(recent, trained, events, session, generators, gone, idle_seconds)


def membership(events: Rows) -> tuple[dict[str, float], dict[str, float]]:
    """When each generator that is up joined, and when each of the others left.

    If an old process leaves after the generator's new process joined, the generator is up.
    """
    up: dict[str, float] = {}
    left: dict[str, float] = {}
    incarnations: dict[str, object] = {}  # newest incarnation of each generator
    for event in events:
        name = str(event.get("generator"))
        incarnation = event.get("incarnation")
        if event.get("event") == "join":
            up[name] = number(event, "time")
            incarnations[name] = incarnation
            left.pop(name, None)
        elif event.get("event") == "leave" and incarnations.get(name, incarnation) == incarnation:
            up.pop(name, None)
            left[name] = number(event, "time")
    return up, left


def stall_limit(step_seconds: float) -> float:
    """Seconds without a step after which a run counts as stalled."""
    return max(30.0, 10.0 * step_seconds)


def seconds_left(rows: Rows, steps_left: float) -> float:
    """Estimated seconds for `steps_left` steps; NaN before the first step of the session.

    All `rows` must be of one session, so that the pause between two sessions does not count.
    """
    trained = _without_replayed(rows)[-WINDOW - 1 :]
    if not trained:
        return math.nan
    num_steps = number(trained[-1], "step") - number(trained[0], "step")
    seconds = number(trained[-1], "time") - number(trained[0], "time")
    is_measured = num_steps > 0 and seconds > 0  # the clock may have been set back
    step_seconds = seconds / num_steps if is_measured else number(trained[-1], "step_time")
    return step_seconds * max(0.0, steps_left)


def format_duration(seconds: float) -> str:
    """Format seconds as 42s, 3m05s or 1h02m; a dash for NaN."""
    if math.isnan(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{second:02d}s" if minutes else f"{second}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def newest_session(events: Rows) -> SessionState:
    """The state of the newest session; `events` may begin in the middle of it."""
    starts = [index for index, event in enumerate(events) if event.get("event") in SESSION_STARTS]
    start = number(events[starts[-1]], "time") if starts else math.nan
    session = events[starts[-1] :] if starts else events
    evaluations = [event for event in session if event.get("event") in EVALUATION_EVENTS]
    up, left = membership(session)
    kinds = [event.get("event") for event in session]
    is_over = any(kind in SESSION_ENDS for kind in kinds)
    errors = [event for event in session if event.get("event") in (STORE_ERROR, "join")]
    reasons = {str(error.get("generator")): str(error.get("reason", "")) for error in errors}
    return SessionState(
        start=start,
        active_since=number(evaluations[-1], "time") if evaluations else start,
        is_evaluating=bool(evaluations) and evaluations[-1].get("event") == EVALUATION_EVENTS[0],
        is_replaying=kinds[:1] == [REPLAY] and not is_over,
        is_over=is_over,
        is_complete=COMPLETE in kinds,
        up=up,
        left=left,
        store_errors={name: reason for name, reason in reasons.items() if reason and name in up},
    )


def _recent(trained: Rows, events: Rows) -> Rows:
    """The newest WINDOW rows; without first steps of sessions, which include the start, if at
    least MIN_ROWS rows remain.
    """
    starts = [event for event in events if event.get("event") in SESSION_STARTS]
    first_steps = {number(event, "step") + 1 for event in starts}
    later = [row for row in trained if number(row, "step") not in first_steps]
    return (later if len(later) >= MIN_ROWS else trained)[-WINDOW:]


def _without_replayed(rows: Rows) -> Rows:
    return [row for row in rows if number(row, "step_time", 0.0) > 0.0]


def _stats(rows: Rows, name: str) -> GeneratorStats:
    """A generator's means over the rows: a single report covers only two seconds."""

    def mean(metric: str, *, without: float | None = None) -> float:
        values = (number(row, f"gen/{name}/{metric}") for row in rows)
        return finite_mean((value for value in values if value != without), default=0.0)

    return GeneratorStats(
        name,
        tokens_per_s=mean("tokens_per_s", without=0.0),  # 0 before the first finished group
        blocked=mean("blocked_frac"),
        queue=mean("queue_frac"),
        reload_seconds=mean("reload_s"),
        step=number(rows[-1], f"gen/{name}/step"),
    )


def _gone(rows: Rows, events: Rows) -> list[str]:
    """Generators that left since the first row, or are silent and not up."""
    up, left = membership(events)
    reported = [generator_numbers(row, REPORTED).keys() for row in rows]
    silent = set[str]().union(*reported) - reported[-1] - up.keys()
    since = number(rows[0], "time")
    return sorted(silent | {name for name, time in left.items() if time >= since})
