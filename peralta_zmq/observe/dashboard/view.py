"""Content of the dashboard as JSON: header, verdict, cards, charts, generators, events, samples.

All numbers are formatted here, so that the web page and the exported file show the same text.
NaN becomes null when the JSON is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from decimal import ROUND_HALF_UP, Decimal
from heapq import merge
from statistics import fmean
from typing import Any, TypeAlias, cast

import numpy as np

from peralta_zmq.observe.dashboard.charts import charts_of
from peralta_zmq.observe.dashboard.run_files import RunFiles
from peralta_zmq.observe.metrics import Row, number
from peralta_zmq.observe.run_state import (
    EVALUATION_EVENTS,
    SESSION_ENDS,
    SESSION_STARTS,
    Session,
    format_duration,
    seconds_left,
    session_of,
    stall_limit,
)
from peralta_zmq.observe.verdict import verdict, waiting

Json: TypeAlias = dict[str, Any]
NUM_CHANGE = 20  # number of newest steps that the change of the mean reward is computed over
MAX_EVENTS, MAX_MARKERS, MAX_GENERATORS, MAX_SAMPLES = (
    60,
    80,
    200,
    12,
)  # newest entries sent in one update
MAX_EVENT_TEXT = 300  # characters
MAX_ROLLOUTS, MAX_TEXT = 64, 6000  # of one group; characters of one text
MARKED_EVENTS = {"start", "resume", "join", "leave", "restart", "killed", "skip", "roll_back",
                 "publish_failed", "checkpoint_failed", "journal_failed", "stop",
                 "complete"}  # fmt: skip
STATUS_TEXTS = {
    "loading": "reading the run's files",
    "empty": "waiting for the first step",
    "training": "training",
    "stalled": "no recent step",
    "silent": "no recent data",
    "crashed": "crashed",
    "stopped": "stopped",
    "finished": "finished",
}
GENERATOR_STATS = ("step", "tokens_per_s", "blocked_frac", "reload_s", "groups")
ENDED = {"finished", "stopped"}
NOT_RUNNING = {*ENDED, "crashed", "silent"}  # reports of generators are no longer received


def update(run: RunFiles, *, cursor: str = "", now: float) -> Json:
    """Return the state of a run and the chart points added since the update with `cursor`."""
    generation, num_steps, num_evaluations = _parse_cursor(cursor)
    sent = (len(run.table.steps), len(run.evaluations))
    reset = generation != run.generation or num_steps > sent[0]
    is_new = reset or sent != (num_steps, num_evaluations)
    accuracies = {step: number(row, "accuracy") for step, row in run.evaluations.items()}
    after = 0 if reset else num_steps
    return {
        "cursor": f"{run.generation}:{sent[0]}:{sent[1]}",
        "reset": reset,
        "loading": run.loading,
        "charts": charts_of(run.table, accuracies, after=after) if is_new else [],
        "num_steps": sent[0],
        "state": state(run, now=now),
    }


def state(run: RunFiles, *, now: float) -> Json:
    """Return header, verdict, cards, generators, events and markers."""
    config, status = run.config(), status_of(run, now=now)
    events, is_over = _all_events(run), status in ENDED
    if status in NOT_RUNNING:  # an evaluation without an end was interrupted
        events = [row for row in events if row.get("event") not in EVALUATION_EVENTS]
        is_over = is_over or not run.rows
    current = verdict(list(run.rows), events, now=None if is_over else now)
    generators = generators_of(run, status)
    return {
        "header": _header(run, config, status, now),
        "verdict": asdict(current),
        "cards": _cards(run, generators),
        "generators": generators[:MAX_GENERATORS],
        "events": [_event(row) for row in list(run.events)[: -MAX_EVENTS - 1 : -1]],
        "markers": _markers(run),
        "num_samples": run.samples[-1][0] if run.samples else 0,
    }


def status_of(run: RunFiles, *, now: float) -> str:
    """Return the status of a run: a key of STATUS_TEXTS."""
    if run.loading:
        return "loading"
    kinds = [row.get("event") for row in run.events]
    newest = [kind for kind in kinds if kind in (*SESSION_STARTS, *SESSION_ENDS)][-1:]
    if newest == ["complete"] or _is_complete(run):
        return "finished"
    if newest == ["stop"]:
        return "stopped"
    seconds = now - run.newest_time
    if not seconds > stall_limit(number(run.last, "step_time", 0.0)):
        return "training" if run.rows else "empty"
    is_held = run.is_held()
    if is_held:  # before the first step: its evaluation may take minutes
        return "stalled" if run.rows else "empty"
    return "silent" if is_held is None else "crashed"


def generators_of(run: RunFiles, status: str) -> list[Json]:
    """Return all generators that ever reported or joined, sorted by name."""
    names = {key.split("/")[1] for key in run.table.columns if key.startswith("gen/")}
    joins = {str(row.get("generator")): row for row in run.events if row.get("event") == "join"}
    left = {_incarnation(row) for row in run.events if row.get("event") == "leave"}
    generators: list[Json] = []
    for name in sorted(names | set(joins)):
        stats = {key: number(run.last, f"gen/{name}/{key}") for key in GENERATOR_STATS}
        reports = math.isfinite(stats["tokens_per_s"]) or math.isfinite(stats["groups"])
        join = joins.get(name, {})
        is_new = number(join, "time", -math.inf) > number(run.last, "time", -math.inf)
        has_left = _incarnation({**join, "generator": name}) in left
        if has_left or not (reports or is_new):
            generator_state = "gone"
        elif status in NOT_RUNNING:
            generator_state = "unknown"
        else:
            generator_state = "up" if reports else "new"
        generators.append({"name": name, "state": generator_state, **_cells(run, stats)})
    return generators


def _cells(run: RunFiles, stats: Mapping[str, float]) -> dict[str, str]:
    return {
        "step": format_number(stats["step"], 0),
        "behind": format_number(number(run.last, "step") - stats["step"], 0),
        "tokens_per_s": format_number(stats["tokens_per_s"], 0),
        "blocked": format_number(100 * stats["blocked_frac"], 0, "%"),
        "reload_s": format_number(stats["reload_s"], 3, " s"),
        "groups": format_number(stats["groups"], 0),
    }


def _incarnation(row: Mapping[str, object]) -> tuple[str, str]:
    """Return generator and incarnation of a join or leave event."""
    return str(row.get("generator")), str(row.get("incarnation", 0))


def samples(run: RunFiles, *, after: int = 0) -> list[Json]:
    """Return the newest groups with a number above `after`, oldest first."""
    newest = [entry for entry in run.samples if entry[0] > after][-MAX_SAMPLES:]
    return [sample(index, row) for index, row in newest]


def sample(index: int, row: Row) -> Json:
    """Return one group of samples.jsonl, with number `index`; long texts are truncated."""
    texts, rewards, advantages = (
        cast("list[Any]", row.get(key, [])) for key in ("texts", "rewards", "advantages")
    )
    prompt = str(row.get("prompt", ""))
    finite = [reward for reward in rewards if reward is not None]
    rollouts = zip(texts[:MAX_ROLLOUTS], rewards, advantages, strict=False)
    return {
        "number": index,
        "step": number(row, "step", 0.0),
        "task": str(row.get("task", "")),
        "generator": str(row.get("generator", "")),
        "policy_step": number(row, "policy_step", 0.0),
        "mean": fmean(finite) if finite else None,
        "prompt": _truncate(prompt),
        "rollouts": [
            {"text": _truncate(text.removeprefix(prompt)), "reward": reward, "advantage": advantage}
            for text, reward, advantage in rollouts
        ],
    }


def format_number(value: float, digits: int, unit: str = "") -> str:
    """Format a number with `digits` decimals, halves rounded up as in charts.js; a dash for NaN."""
    if not math.isfinite(value):
        return "-"
    return f"{Decimal(value).quantize(Decimal(10) ** -digits, ROUND_HALF_UP):,}{unit}"


def _header(run: RunFiles, config: Mapping[str, Any], status: str, now: float) -> Json:
    train, model = config.get("train", {}), config.get("model", {})
    tasks = [str(env.get("task")) for env in config.get("env", [])]
    max_steps, step = number(train, "max_steps"), number(run.last, "step", 0.0)
    return {
        "run": run.name,
        "folder": str(run.folder),
        "model": str(model.get("name", "")),
        "task": ", ".join(tasks) or str(config.get("task", {}).get("name", "")),
        "status": status,
        "status_text": STATUS_TEXTS[status],
        "explanation": _explanation(run, status, now),
        "step": format_number(step, 0),
        "max_steps": format_number(max_steps, 0),
        "share": step / max_steps if max_steps > 0 else None,
        "eta": _eta(run, max_steps - step) if status == "training" else "",
        "age": now - run.newest_time,
    }


def _explanation(run: RunFiles, status: str, now: float) -> str:
    age, summary = format_duration(now - run.newest_time), run.summary()
    before, after = (format_number(number(summary, f"eval_{at}"), 3) for at in ("before", "after"))
    return {
        "empty": _no_step_text(session_of(list(run.events))),
        "stalled": f"The trainer is running and has taken no step for {age}.",
        "silent": f"No new data for {age}: the trainer is waiting or was killed. "
        "The same command resumes it without loss.",
        "crashed": f"No new data for {age}, and no trainer on this machine uses the run folder: it "
        "was killed or crashed, unless it runs on another machine. "
        "The same command resumes it without loss.",
        "stopped": "Stopped by the user and saved. The same command resumes it.",
        "finished": f"{format_number(number(summary, 'steps'), 0)} steps in "
        f"{format_duration(number(summary, 'seconds'))}; held-out accuracy {before} -> {after}.",
    }.get(status, "")


def _no_step_text(session: Session) -> str:
    """Explain why there is no first step yet."""
    if not session.up:
        reason = "All generators have left" if session.left else "No generator has joined yet"
        return f"{reason}. Start one: bin/generator @ CONFIG"
    noun = "generators have" if len(session.up) > 1 else "generator has"
    return f"{len(session.up)} {noun} joined; charts appear with the first step."


def _eta(run: RunFiles, steps_left: float) -> str:
    """Return the estimated time left; empty before the first step of the newest session."""
    start = session_of(list(run.events)).start
    rows = [row for row in run.rows if not number(row, "time") < start]
    seconds = seconds_left(rows, steps_left)
    return format_duration(seconds) if math.isfinite(seconds) else ""


def _cards(run: RunFiles, generators: Sequence[Json]) -> list[Json]:
    def newest(key: str, digits: int = 0) -> str:
        return format_number(number(run.last, key), digits)

    def derived(key: str) -> str:
        return format_number(run.table.value(key, len(run.table.steps) - 1), 0)

    share, num_steps = waiting(list(run.rows), _all_events(run))
    states = [generator["state"] for generator in generators]
    up, seen = str(sum(state != "gone" for state in states)), f"{len(generators)} seen"
    cards = (
        ("reward", "Reward", newest("reward", 3), _reward_change(run)),
        ("eval", "Held-out accuracy", *_evaluation(run)),
        ("rollouts", "Rollouts/s", derived("rollouts_per_s"),
         f"{derived('tokens_per_s')} generated tokens/s" if run.rows else "no step yet"),
        ("wait", "Trainer waits", format_number(100 * share, 0, "%"),
         f"of the last {num_steps} steps" if run.rows else "no step yet"),
        ("queue", "Queue", newest("queue/depth"), "groups waiting"),
        ("staleness", "Staleness", newest("staleness/mean", 1),
         f"steps, at most {newest('staleness/max')}" if run.rows else "no step yet"),
        ("dropped", "Dropped", derived("dropped"), "groups in total"),
        ("generators", "Generators up", *(("-", f"unknown, {seen}") if "unknown" in states
                                          else (up, f"of {seen}"))),
    )  # fmt: skip
    return [dict(zip(("id", "label", "value", "note"), card, strict=True)) for card in cards]


def _reward_change(run: RunFiles) -> str:
    """Mean reward of the newest steps minus the mean of the same number of steps before them."""
    rewards = run.table.values("reward", after=max(0, len(run.table.steps) - 2 * NUM_CHANGE))
    finite = rewards[np.isfinite(rewards)]
    half = len(finite) // 2
    if not half:
        return "no change yet"
    change = fmean(finite[-half:]) - fmean(finite[-2 * half : -half])
    return f"{change:+.3f} in {half} step{'s' * (half > 1)}"


def _evaluation(run: RunFiles) -> tuple[str, str]:
    if not run.evaluations:
        return "-", "none yet"
    accuracies = {step: number(row, "accuracy") for step, row in run.evaluations.items()}
    first, last = min(accuracies), max(accuracies)
    note = f"step {last:.0f}"
    if first < last:
        note += f"; {format_number(accuracies[first], 3)} at {first:.0f}"
    return format_number(accuracies[last], 3), note


def _event(row: Row) -> Json:
    fields: Row = {}
    for key, value in row.items():  # fields of a nested object are listed like top-level fields
        if key not in ("time", "event", "incarnation"):
            fields |= cast("Row", value) if isinstance(value, dict) else {key: value}
    text = "  ".join(f"{key}={_format_value(value)}" for key, value in fields.items())
    return {
        "time": number(row, "time"),
        "event": str(row.get("event", ""))[:MAX_EVENT_TEXT],
        "text": text[:MAX_EVENT_TEXT],
    }


def _format_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)[:MAX_EVENT_TEXT]


def _markers(run: RunFiles) -> list[Json]:
    """Return the events to mark in the charts, each with its step or the step in progress then."""
    marked = [row for row in run.events if row.get("event") in MARKED_EVENTS][-MAX_MARKERS:]
    times, steps = run.table.values("time"), run.table.steps
    markers: list[Json] = []
    for row in marked:
        step = number(row, "step")
        if not math.isfinite(step):
            index = int(np.searchsorted(times, number(row, "time")))
            step = steps[min(index, len(steps) - 1)] if steps else 0.0
        event = _event(row)
        markers.append({"step": step, "event": event["event"], "text": event["text"]})
    return markers


def _all_events(run: RunFiles) -> list[Row]:
    events = merge(run.events, run.frequent_events, key=lambda row: number(row, "time", 0.0))
    return list(events)


def _is_complete(run: RunFiles) -> bool:
    if not run.summary():
        return False
    return number(run.last, "step", 0.0) >= number(run.config().get("train", {}), "max_steps")


def _parse_cursor(cursor: str) -> tuple[str, int, int]:
    """Split a cursor into generation, steps and evaluations; an invalid one means the start."""
    generation, *counts = cursor.rsplit(":", 2)
    if len(counts) == 2 and all(text.isdecimal() and len(text) < 12 for text in counts):
        return generation, int(counts[0]), int(counts[1])
    return "", 0, 0


def _truncate(text: str) -> str:
    num_more = len(text) - MAX_TEXT
    return text if num_more <= 0 else f"{text[:MAX_TEXT]} ... ({num_more} more characters)"
