"""What the page says of a run: everything above, below and between its charts, as JSON.

Knows what a run's files hold; knows nothing of HTTP. Numbers become text here and nowhere else, so
that the page, the exported file and the tests cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from decimal import ROUND_HALF_UP, Decimal
from heapq import merge
from statistics import fmean
from typing import Any, TypeAlias, cast

import numpy as np

from peralta_zmq.observe.dashboard.charts import drawn
from peralta_zmq.observe.dashboard.run_files import RunFiles
from peralta_zmq.observe.dashboard.samples import sample
from peralta_zmq.observe.metrics import Row, number
from peralta_zmq.observe.run_state import (
    EVALUATION_EVENTS,
    Session,
    format_duration,
    seconds_left,
    session_of,
)
from peralta_zmq.observe.verdict import verdict, waiting

Json: TypeAlias = dict[str, Any]
NUM_CHANGE = 20  # newest steps whose reward is told against as many before them
QUIET_SECONDS, QUIET_STEPS = 30.0, 10.0  # without a row, whichever is longer
NUM_EVENTS_SHOWN, NUM_MARKERS, NUM_GENERATORS, NUM_SAMPLES_SENT = 60, 80, 200, 12
EXACT = 1e15  # beyond, a float has no decimals
MAX_TEXT = 300  # characters of an event
MARKED = {"start", "resume", "join", "leave", "restart", "killed", "skip", "roll_back",
          "publish_failed", "checkpoint_failed", "journal_failed", "stop", "complete"}  # fmt: skip
ENDED = {"finished", "stopped"}
UNHEARD = {*ENDED, "crashed", "silent"}  # nobody hears generators, so what was heard says nothing
STATES = {
    "loading": "reading the files of this run",
    "empty": "waiting for the first step",
    "training": "training",
    "quiet": "no news",
    "silent": "no sign of life",
    "crashed": "ended without a word",
    "stopped": "stopped",
    "finished": "finished",
}


def answer(run: RunFiles, *, cursor: str = "", now: float) -> Json:
    """All that the page needs beyond what it has: `cursor` is the one of the answer before."""
    generation, rows, evaluations = _place(cursor)
    sent = (len(run.table.steps), len(run.evaluations))
    anew = generation != run.generation or rows > sent[0]
    grown = anew or sent != (rows, evaluations)
    accuracies = {step: number(row, "accuracy") for step, row in run.evaluations.items()}
    return {
        "cursor": f"{run.generation}:{sent[0]}:{sent[1]}",
        "anew": anew,
        "loading": run.loading,
        "charts": drawn(run.table, accuracies, after=0 if anew else rows) if grown else [],
        "num_steps": sent[0],
        "state": state(run, now=now),
    }


def state(run: RunFiles, *, now: float) -> Json:
    """Header, verdict, cards, generators, events and markers."""
    config, condition = run.config(), condition_of(run, now=now)
    events, over = _in_order(run), condition in ENDED
    if condition in UNHEARD:  # what was under way then is no longer
        events = [each for each in events if each.get("event") not in EVALUATION_EVENTS]
        over = over or not run.rows
    judged = verdict(list(run.rows), events, now=None if over else now)
    known = generators(run, condition)
    return {
        "header": _header(run, config, condition, now),
        "verdict": {"sentence": judged.sentence, "advice": judged.advice, "level": judged.level},
        "cards": _cards(run, known),
        "generators": known[:NUM_GENERATORS],
        "events": [_event(row) for row in list(run.events)[: -NUM_EVENTS_SHOWN - 1 : -1]],
        "markers": _markers(run),
        "num_samples": run.samples[-1][0] if run.samples else 0,
    }


def samples(run: RunFiles, *, after: int = 0) -> list[Json]:
    """The newest whole groups beyond number `after`, oldest first."""
    newest = [each for each in run.samples if each[0] > after][-NUM_SAMPLES_SENT:]
    return [sample(count, row) for count, row in newest]


def condition_of(run: RunFiles, *, now: float) -> str:
    """One of STATES."""
    if run.loading:
        return "loading"
    sessions = [row.get("event") for row in run.events]
    said = [each for each in sessions if each in ("start", "resume", "stop", "complete")]
    if said[-1:] == ["complete"] or _is_complete(run):
        return "finished"
    if said[-1:] == ["stop"]:
        return "stopped"
    quiet = now - run.newest_time
    if not quiet > max(QUIET_SECONDS, QUIET_STEPS * number(run.last, "step_time", 0.0)):
        return "training" if run.rows else "empty"
    held = run.is_held()
    if held:  # a first step, or what is evaluated before it, may take minutes
        return "quiet" if run.rows else "empty"
    return "silent" if held is None else "crashed"


def generators(run: RunFiles, condition: str) -> list[Json]:
    """One line for each generator ever heard of, by name; `condition` of the run, one of STATES."""
    names = {key.split("/")[1] for key in run.table.columns if key.startswith("gen/")}
    boots = {str(row.get("generator")): row for row in run.events if row.get("event") == "join"}
    left = {_boot(row) for row in run.events if row.get("event") == "leave"}
    return [
        _generator(name, run, boots.get(name, {}), left=left, is_heard=condition not in UNHEARD)
        for name in sorted(names | set(boots))
    ]


def _boot(row: Mapping[str, object]) -> tuple[str, str]:
    """Which start of which generator joined or left."""
    return str(row.get("generator")), str(row.get("incarnation", 0))


def _generator(
    name: str, run: RunFiles, joined: Mapping[str, object], *,
    left: Set[tuple[str, str]], is_heard: bool,
) -> Json:  # fmt: skip
    row = run.last

    def told(kind: str) -> float:
        return number(row, f"gen/{name}/{kind}")

    heard = any(math.isfinite(told(kind)) for kind in ("tokens_per_s", "groups"))
    fresh = number(joined, "time", -math.inf) > number(row, "time", -math.inf)
    is_gone = _boot({**joined, "generator": name}) in left or not (heard or fresh)
    behind = number(row, "step") - told("step")
    return {
        "name": name,
        "state": "gone" if is_gone else "unknown" if not is_heard else "up" if heard else "new",
        "step": text(told("step"), 0),
        "behind": text(behind, 0),
        "tokens_per_s": text(told("tokens_per_s"), 0),
        "blocked": text(100 * told("blocked_frac"), 0, "%"),
        "reload_s": text(told("reload_s"), 3, " s"),
        "groups": text(told("groups"), 0),
    }


def _header(run: RunFiles, config: Mapping[str, Any], condition: str, now: float) -> Json:
    train, model = config.get("train", {}), config.get("model", {})
    tasks = [str(each.get("task")) for each in config.get("env", [])]
    max_steps, step = number(train, "max_steps"), number(run.last, "step", 0.0)
    return {
        "run": run.name,
        "folder": str(run.folder),
        "model": str(model.get("name", "")),
        "task": ", ".join(tasks) or str(config.get("task", {}).get("name", "")),
        "condition": condition,
        "condition_text": STATES[condition],
        "explanation": _explanation(run, condition, now),
        "step": text(step, 0),
        "max_steps": text(max_steps, 0),
        "share": step / max_steps if max_steps > 0 else None,
        "eta": _eta(run, max_steps - step) if condition == "training" else "",
        "age": _finite(now - run.newest_time),
    }


def _explanation(run: RunFiles, condition: str, now: float) -> str:
    quiet = format_duration(now - run.newest_time)
    summary = run.summary()
    return {
        "empty": _awaited(session_of(list(run.events))),
        "quiet": f"The trainer runs and has taken no step for {quiet}.",
        "silent": f"Nothing new for {quiet}: the trainer waits, or it was killed. "
        "The same command resumes it with nothing lost.",
        "crashed": f"Nothing new for {quiet}, and no trainer of this machine works here: it was "
        "killed or crashed, unless it runs elsewhere. "
        "The same command resumes it with nothing lost.",
        "stopped": "Stopped by hand and saved. The same command resumes it.",
        "finished": f"{text(number(summary, 'steps'), 0)} steps in "
        f"{format_duration(number(summary, 'seconds'))}; held-out accuracy "
        f"{text(number(summary, 'eval_before'), 3)} -> {text(number(summary, 'eval_after'), 3)}.",
    }.get(condition, "")


def _awaited(session: Session) -> str:
    """Who is there before the first step."""
    joined = len(session.up)
    if not joined:
        who = "All who joined have left" if session.left else "No generator has joined yet"
        return f"{who}. Start one: bin/generator @ CONFIG"
    have = "s have" if joined > 1 else " has"
    return f"{joined} generator{have} joined; charts appear with the first step."


def _eta(run: RunFiles, steps_left: float) -> str:
    """Empty before the first step of the newest session."""
    begun = session_of(list(run.events)).start
    rows = [row for row in run.rows if not number(row, "time") < begun]
    seconds = seconds_left(rows, steps_left)
    return format_duration(seconds) if math.isfinite(seconds) else ""


def _cards(run: RunFiles, known: Sequence[Json]) -> list[Json]:
    row = run.last
    values = {
        key: run.table.values(key, after=max(0, len(run.table.steps) - 1))
        for key in ("rollouts_per_s", "tokens_per_s", "dropped")
    }
    newest = {key: float(value[-1]) if len(value) else math.nan for key, value in values.items()}
    share, num_steps = waiting(list(run.rows), _in_order(run))
    mean, worst = number(row, "staleness/mean"), number(row, "staleness/max")

    def of_steps(note: str) -> str:
        return note if run.rows else "no step yet"

    states = [each["state"] for each in known]
    up = math.nan if "unknown" in states else sum(state != "gone" for state in states)
    return [
        _card("reward", "Reward", text(number(row, "reward"), 3), _change(run)),
        _card("eval", "Held-out accuracy", *_evaluated(run)),
        _card("rollouts", "Rollouts/s", text(newest["rollouts_per_s"], 0),
              of_steps(f"{text(newest['tokens_per_s'], 0)} generated tokens/s")),
        _card("wait", "Trainer waits", text(100 * share, 0, "%"),
              of_steps(f"of the last {num_steps} steps")),
        _card("queue", "Queue", text(number(row, "queue/depth"), 0), "groups waiting"),
        _card("staleness", "Staleness", text(mean, 1),
              of_steps(f"steps, at most {text(worst, 0)}")),
        _card("dropped", "Dropped", text(newest["dropped"], 0), "groups in all"),
        _card("generators", "Generators up", text(up, 0),
              f"of {len(known)} seen" if math.isfinite(up) else f"unknown, {len(known)} seen"),
    ]  # fmt: skip


def _card(name: str, label: str, value: str, note: str) -> Json:
    return {"id": name, "label": label, "value": value, "note": note}


def _change(run: RunFiles) -> str:
    """How the reward of the newest steps differs from as many before them."""
    rewards = run.table.values("reward", after=max(0, len(run.table.steps) - 2 * NUM_CHANGE))
    known = rewards[np.isfinite(rewards)]
    half = len(known) // 2
    if not half:
        return "no change to tell yet"
    change = fmean(known[-half:]) - fmean(known[-2 * half : -half])
    return f"{change:+.3f} in {half} step{'s' * (half > 1)}"


def _evaluated(run: RunFiles) -> tuple[str, str]:
    if not run.evaluations:
        return "-", "none yet"
    first, last = min(run.evaluations), max(run.evaluations)
    value = number(run.evaluations[last], "accuracy")
    note = f"step {last:.0f}"
    if first < last:
        note += f"; {text(number(run.evaluations[first], 'accuracy'), 3)} at {first:.0f}"
    return text(value, 3), note


def _event(row: Row) -> Json:
    rest = {key: value for key, value in row.items() if key not in ("time", "event", "incarnation")}
    told = "  ".join(f"{key}={_plain(value)}" for key, value in _flat(rest).items())
    return {
        "time": _finite(number(row, "time")),
        "event": str(row.get("event", ""))[:MAX_TEXT],
        "text": told[:MAX_TEXT],
    }


def _flat(row: Row) -> Row:
    """What a part of it holds stands beside the rest, by its own name."""
    parts = [(key, value) for key, value in row.items() if not isinstance(value, dict)]
    inner = [cast("Row", value) for value in row.values() if isinstance(value, dict)]
    return dict(parts) | {key: value for each in inner for key, value in each.items()}


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)[:MAX_TEXT]


def _markers(run: RunFiles) -> list[Json]:
    """Where in the charts something happened: at its step, or the one under way."""
    marked = [row for row in run.events if row.get("event") in MARKED][-NUM_MARKERS:]
    times, steps = run.table.values("time"), run.table.steps
    found: list[Json] = []
    for row in marked:
        step = number(row, "step")
        if not math.isfinite(step):
            place = int(np.searchsorted(times, number(row, "time")))
            step = steps[min(place, len(steps) - 1)] if steps else 0.0
        event = _event(row)
        found.append({"step": step, "event": event["event"], "text": event["text"]})
    return found


def _in_order(run: RunFiles) -> list[Row]:
    return list(merge(run.events, run.quiet_events, key=lambda row: number(row, "time", 0.0)))


def _is_complete(run: RunFiles) -> bool:
    if not run.summary():
        return False
    return number(run.last, "step", 0.0) >= number(run.config().get("train", {}), "max_steps")


def _place(cursor: str) -> tuple[str, int, int]:
    """The three parts of a cursor; one that is not ours is the beginning."""
    generation, *counts = cursor.rsplit(":", 2)
    if len(counts) == 2 and all(each.isdecimal() and len(each) < 12 for each in counts):
        return generation, int(counts[0]), int(counts[1])
    return "", 0, 0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def text(value: float, digits: int, unit: str = "") -> str:
    """A number as the page shows it; a dash for none. Halves go up, as in the charts' script."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= EXACT:
        return f"{value:,.0f}{unit}"
    return f"{Decimal(value).quantize(Decimal(10) ** -digits, ROUND_HALF_UP):,}{unit}"
