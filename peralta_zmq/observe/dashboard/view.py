"""Content of the dashboard as JSON for the page that app.py serves, or in one HTML file.

Numbers shown as text are formatted here, so that the page and the file show the same. Control
characters in texts from other machines and from models are escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from heapq import merge
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.errors import printable, program_name
from peralta_zmq.observe.dashboard.charts import Json, charts_of, points
from peralta_zmq.observe.dashboard.run_files import (
    CONFIG,
    ENDED,
    NOT_RUNNING,
    RunFiles,
    RunList,
    status_of,
)
from peralta_zmq.observe.metrics import (
    Row,
    finite_mean,
    first_within,
    format_number,
    format_rate,
    nan_to_null,
    number,
)
from peralta_zmq.observe.report import SUMMARY, change_text
from peralta_zmq.observe.run_state import (
    EVALUATION_EVENTS,
    REPLAY,
    RunState,
    SessionState,
    format_duration,
    membership,
    newest_session,
    run_state,
    seconds_left,
)
from peralta_zmq.observe.verdict import verdict

MAX_CHARACTERS = 1_000_000  # texts of an evaluation, or of the newest samples of a run
KEPT = "\n\t\u00a0\u3000"  # white space that is not escaped in samples
# Events that are listed but not marked in the charts; RunFiles.events lacks "publish" and "drop".
UNMARKED = {*EVALUATION_EVENTS, "worker_info", "final_status", "pool_refilled"}

STATIC = files("peralta_zmq.observe.dashboard") / "static"
STYLE = re.compile(r'<link rel="stylesheet" href="([\w.-]+)">')
SCRIPT = re.compile(r'<script defer src="([\w.-]+)"></script>')
ICON = re.compile(r'<link rel="icon"[^>]*>\n')


def update(run: RunFiles, *, cursor: str = "", now: float) -> Json:
    """A run's state, and the chart points added since the update with `cursor`.

    A cursor has RunFiles.generation and the numbers of steps and evaluations that the page has. If
    it is invalid or outdated, all points are sent and `reset` is True.
    """
    match = re.fullmatch(r"(.*):([0-9]{1,11}):([0-9]{1,11})", cursor)
    generation = match[1] if match else ""
    num_steps = int(match[2]) if match else 0
    num_evaluations = int(match[3]) if match else 0
    available = (len(run.table.steps), len(run.evaluations))
    reset = generation != run.generation or num_steps > available[0]
    is_new = reset or available != (num_steps, num_evaluations)
    after = 0 if reset else num_steps
    charts = charts_of(run.table) if is_new else []
    return {
        "cursor": f"{run.generation}:{available[0]}:{available[1]}",
        "reset": reset,
        "loading": run.loading,
        "charts": [points(chart, run.table, run.evaluations, after=after) for chart in charts],
        "state": state(run, now=now),
    }


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the dashboard of the runs in `folders` to one HTML file, atomically."""
    replace_file(path, report(RunList(folders).runs).encode())
    return path


def report(runs: Sequence[RunFiles]) -> str:
    """The page and its data as one HTML document that allows only its own script and style."""
    html = ICON.sub("", (STATIC / "index.html").read_text("utf-8"))
    style = "".join((STATIC / name).read_text("utf-8") for name in STYLE.findall(html))
    script = "\n".join((STATIC / name).read_text("utf-8") for name in SCRIPT.findall(html))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    html = SCRIPT.sub("", STYLE.sub("", html))
    html = html.replace("<title>", f"{meta}\n<style>{style}</style>\n<title>", 1)
    now = time.time()
    for run in runs:
        run.refresh(seconds=60.0)
    content = {"written": now, "runs": [_exported(run, now) for run in runs]}
    # Without `<`, no text that a model wrote can end the script element.
    text = json.dumps(nan_to_null(content)).replace("<", "\\u003c")
    data = f'<script type="application/json" id="report">{text}</script>'
    return html.replace("</body>", f"{data}\n<script>{script}</script>\n</body>", 1)


def state(run: RunFiles, *, now: float) -> Json:
    status = status_of(run, now=now)
    rows = list(run.rows)
    events = list(merge(run.events, run.frequent_events, key=lambda row: number(row, "time", 0.0)))
    is_over = status in ENDED
    if status in NOT_RUNNING:  # an evaluation or replay without an end has been killed
        activities = {*EVALUATION_EVENTS, REPLAY}
        events = [row for row in events if row.get("event") not in activities]
        is_over = is_over or not rows
    recent = run_state(rows, events)
    generators = generators_of(run, status)
    return {
        "header": _header(run, status, recent.session, now),
        "verdict": {
            key: printable(text)
            for key, text in asdict(verdict(rows, events, now=None if is_over else now)).items()
        },
        "cards": _cards(run, recent, generators),
        "generators": generators[:200],
        "events": [_event(row) for row in list(run.events)[:-61:-1]],
        "markers": _markers(run),
        "num_samples": len(run.samples.steps),
        "evaluations": _evaluations(run),
        "settings_time": run.modified(CONFIG),
    }


def generators_of(run: RunFiles, status: str) -> list[Json]:
    """All generators that ever reported or joined, sorted by name.

    `state` is "up" with metrics in the newest step or if it joined later, else "gone"; while the
    trainer is not running, "unknown" replaces "up".
    """
    reported = {key.split("/")[1] for key in run.table.columns if key.startswith("gen/")}
    up, left = membership(run.events)
    generators: list[Json] = []
    for name in sorted(reported | up.keys() | left.keys()):
        step, speed, blocked, reload_seconds, groups = (
            number(run.last, f"gen/{name}/{key}")
            for key in ("step", "tokens_per_s", "blocked_frac", "reload_s", "groups")
        )
        has_metrics = math.isfinite(speed) or math.isfinite(groups)
        is_new = up.get(name, -math.inf) > number(run.last, "time", -math.inf)
        if name in left or not (has_metrics or is_new):
            generator_state = "gone"
        else:
            generator_state = "unknown" if status in NOT_RUNNING else "up"
        generators.append(
            {
                "name": printable(name),
                "state": generator_state,
                "step": format_number(step, ",.0f"),
                "behind": format_number(number(run.last, "step") - step, ",.0f"),
                "tokens_per_s": format_rate(speed or math.nan),  # 0 before its first group
                "blocked": format_number(blocked, ".0%"),
                "reload_s": format_number(reload_seconds, ".3f", " s"),
                "groups": format_number(groups, ",.0f"),
            }
        )
    return generators


def overview(run: RunFiles, *, now: float) -> Json:
    """The newest values of a run, for the list of runs."""
    status = status_of(run, now=now)
    header = _header(run, status, newest_session(list(run.events)), now)
    keys = ("run", "model", "task", "status", "status_text", "step", "max_steps", "age")
    reward = format_number(number(run.last, "reward"), ".3f")
    return {key: header[key] for key in keys} | {"reward": reward, "eval": _evaluation(run)[0]}


def settings(run: RunFiles) -> dict[str, str]:
    """The settings in the run's config.toml as text, by full name."""
    return dict(_flattened("", run.content(CONFIG)))


def _flattened(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the settings in a value; a table in a list has its index as name."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in cast("Any", value)):
        value = dict(enumerate(cast("list[object]", value)))
    if isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            yield from _flattened(f"{name}.{key}" if name else str(key), item)
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield printable(name), _short(text)


def samples(
    run: RunFiles, *, first: int | None = None, step: int | None = None, limit: int = 12
) -> list[Json]:
    """Up to `limit` samples, from number `first` on (1 is the oldest), from `step` on, or the
    newest.
    """
    steps = run.samples.steps
    if step is not None:
        first = next((index + 1 for index, at in enumerate(steps) if at >= step), None)
    if first is None:
        first = len(steps) - limit + 1
    start = max(0, first - 1)
    return [_sample(run, index) for index in range(start, min(start + limit, len(steps)))]


def _sample(run: RunFiles, index: int) -> Json:
    row = run.samples.read(index)
    advantages = cast("list[Any]", row.get("advantages", []))
    turns = cast("list[Any]", row.get("num_turns", []))
    rollouts = _rollouts(row)
    for place, rollout in enumerate(rollouts):  # a group without signal has no advantages
        rollout["advantage"] = advantages[place] if place < len(advantages) else None
        rollout["num_turns"] = turns[place] if place < len(turns) else 1
    return {
        "number": index + 1,
        "step": number(row, "step", 0.0),
        "task": printable(str(row.get("task", ""))),
        "generator": printable(str(row.get("generator", ""))),
        "policy_step": number(row, "policy_step", 0.0),
        "outcome": printable(str(row.get("outcome", ""))).replace("_", " "),
        "mean": finite_mean(
            rollout["reward"] for rollout in rollouts if rollout["reward"] is not None
        ),
        "prompt": _truncate(str(row.get("prompt", ""))),
        "rollouts": rollouts,
    }


def _rollouts(row: Row) -> list[Json]:
    keys = ("texts" if "texts" in row else "completions", "rewards", "cut_off")
    columns = (cast("list[Any]", row.get(key, [])) for key in keys)
    prompt = str(row.get("prompt", ""))
    return [
        {
            "text": _truncate(str(text).removeprefix(prompt)),
            "reward": reward,
            "cut_off": bool(is_cut_off),
        }
        for text, reward, is_cut_off in zip(*columns, strict=False)
    ][:64]


def answers(run: RunFiles, *, step: int) -> Json:
    """The held-out problems of the newest evaluation of `step` with the model's answers.

    `num_examples` is their number, also if they have too many characters to return all.
    """
    evaluation = run.evaluations.get(step)
    indices = [index for index, at in enumerate(run.answers.steps) if at == step]
    if evaluation is not None and math.isfinite(evaluation.num_examples):
        # Earlier ones belong to an evaluation that was undone or not completed.
        indices = indices[-int(evaluation.num_examples) :]
    examples = (
        {
            "question": _truncate(str(row.get("question", ""))),
            "expected": _truncate(str(row.get("expected", ""))),
            "answers": _rollouts(row),
        }
        for row in map(run.answers.read, indices)
    )
    shown = first_within(MAX_CHARACTERS, examples, _num_characters)
    return {"step": step, "num_examples": len(indices), "examples": shown}


def _num_characters(content: Json) -> int:
    return len(str(content))


def _exported(run: RunFiles, now: float) -> Json:
    """The data of one run, without older samples and evaluations between first and last."""
    newest = (_sample(run, index) for index in reversed(range(len(run.samples.steps))))
    evaluated = {min(run.evaluations), max(run.evaluations)} if run.evaluations else ()
    return {
        "name": run.name,
        "update": update(run, now=now),
        "settings": settings(run),
        "samples": first_within(MAX_CHARACTERS, newest, _num_characters)[::-1],
        "answers": [answers(run, step=int(step)) for step in sorted(evaluated)],
    }


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _header(run: RunFiles, status: str, session: SessionState, now: float) -> Json:
    config = run.content(CONFIG)
    train = config.get("train", {})
    model = config.get("model", {})
    tasks = [str(env.get("task")) for env in config.get("env", [])]
    task = str(config.get("task", {}).get("name", ""))  # "None": the data's columns decide
    max_steps = number(train, "max_steps")
    step = number(run.last, "step", 0.0)
    status_text, explanation = _status_texts(run, now)[status]
    return {
        "run": run.name,
        "folder": str(run.folder),
        "dashboard": f"{program_name('dashboard')} {run.folder}",
        "model": str(model.get("name", "")),
        "task": ", ".join(tasks) or ("" if task == "None" else task),
        "status": status,
        "status_text": status_text,
        "explanation": explanation,
        "step": format_number(step, ",.0f"),
        "max_steps": format_number(max_steps, ",.0f"),
        "share": step / max_steps if max_steps > 0 else None,
        "eta": _eta(run, session, max_steps - step) if status == "training" else "",
        "age": now - run.newest_time,
    }


def _status_texts(run: RunFiles, now: float) -> dict[str, tuple[str, str]]:
    """Name and explanation of each status."""
    age = format_duration(now - run.newest_time)
    summary = run.content(SUMMARY)
    steps = format_number(number(summary, "steps"), ",.0f")
    duration = format_duration(number(summary, "seconds"))
    accuracy = change_text(summary, "eval_before", "eval_after")
    resume = "The same command resumes it without loss."
    return {
        "loading": ("reading the run's files", ""),
        "empty": ("waiting for the first step", ""),
        "training": ("training", ""),
        "evaluating": ("evaluating", "Generators and trainer answer the held-out problems."),
        "replaying": ("replaying", "The trainer repeats steps of its journal after a restart."),
        "waiting": ("waiting for a generator", f"Start one: {program_name('generator')} @ CONFIG"),
        "stalled": ("no recent step", f"The trainer is running and has taken no step for {age}."),
        "silent": (
            "no recent data",
            f"No new data for {age}: the trainer is waiting or was killed. {resume}",
        ),
        "crashed": (
            "crashed",
            f"No new data for {age}, and no trainer on this machine uses the run folder: it was "
            f"killed or crashed, unless it runs on another machine. {resume}",
        ),
        "stopped": ("stopped", "Stopped by the user and saved. The same command resumes it."),
        "finished": ("finished", f"{steps} steps in {duration}; held-out accuracy {accuracy}."),
    }


def _eta(run: RunFiles, session: SessionState, steps_left: float) -> str:
    """Estimated time left; empty before the first step of the session."""
    rows = [row for row in run.rows if not number(row, "time") < session.start]
    seconds = seconds_left(rows, steps_left)
    return format_duration(seconds) if math.isfinite(seconds) else ""


def _cards(run: RunFiles, recent: RunState, generators: Sequence[Json]) -> list[Json]:
    def newest(key: str, spec: str = ",.0f") -> str:
        return format_number(number(run.last, key), spec)

    def derived(key: str) -> float:
        return run.table.value(key, len(run.table.steps) - 1)

    def card(id: str, label: str, value: str, note: str) -> Json:
        return {"id": id, "label": label, "value": value, "note": note}

    states = [generator["state"] for generator in generators]
    up = str(sum(state != "gone" for state in states))
    seen = f"of {len(states)} seen"
    if "unknown" in states:
        up = "-"
        seen = f"unknown, {len(states)} seen"
    rate = span = oldest = "no step yet"
    if recent.rows:
        rate = f"{format_rate(derived('tokens_per_s'))} generated tokens/s"
        span = f"of the last {len(recent.rows)} steps"
        oldest = f"steps, at most {newest('staleness/max')}"
    waiting = format_number(recent.waiting, ".0%")
    return [
        card("reward", "Reward", newest("reward", ".3f"), _reward_change(run)),
        card("eval", "Held-out accuracy", *_evaluation(run)),
        card("rollouts", "Rollouts/s", format_rate(derived("rollouts_per_s")), rate),
        card("wait", "Trainer waits", waiting, span),
        card("queue", "Queue", newest("queue/depth"), "groups waiting"),
        card("staleness", "Staleness", newest("staleness/mean", ",.1f"), oldest),
        card("dropped", "Dropped", format_number(derived("dropped"), ",.0f"), "groups in total"),
        card("generators", "Generators up", up, seen),
    ]


def _reward_change(run: RunFiles) -> str:
    """The mean reward of the newest 20 steps, compared with the 20 steps before."""
    rewards = run.table.values("reward", after=max(0, len(run.table.steps) - 40))
    finite = rewards[np.isfinite(rewards)]
    half = len(finite) // 2
    if not half:
        return "no change yet"
    change = finite[-half:].mean() - finite[-2 * half : -half].mean()
    return f"{change:+.3f} in {half} step{'s' * (half > 1)}"


def _evaluation(run: RunFiles) -> tuple[str, str]:
    """The newest held-out accuracy, and a note: its precision and step, the first accuracy."""
    evaluations = _evaluations(run)
    if not evaluations:
        return "-", "none yet"
    first = evaluations[0]
    last = evaluations[-1]
    note = f"step {last['step']:.0f}"
    if first["step"] < last["step"]:
        note += f"; {first['accuracy']} at {first['step']:.0f}"
    return last["accuracy"], f"{last['precision']}; {note}" if last["precision"] else note


def _evaluations(run: RunFiles) -> list[Json]:
    return [
        {
            "step": step,
            "accuracy": format_number(accuracy, ".3f"),
            "precision": f"± {stderr:.3f}, n = {count:.0f}" if math.isfinite(stderr) else "",
        }
        for step, (accuracy, stderr, count) in sorted(run.evaluations.items())
    ]


def _event(row: Row) -> Json:
    fields: Row = {}
    for key, value in row.items():  # fields of a nested object are listed like top-level fields
        if key not in ("time", "event", "incarnation"):
            fields |= cast("Row", value) if isinstance(value, dict) else {key: value}
    texts = {key: f"{v:g}" if isinstance(v, float) else str(v) for key, v in fields.items()}
    return {
        "time": number(row, "time"),
        "event": _short(str(row.get("event", ""))),
        "text": _short("  ".join(f"{key}={value[:300]}" for key, value in texts.items())),
    }


def _markers(run: RunFiles) -> list[Json]:
    """The events to mark in the charts; one without a step is marked at the step in progress."""
    marked = [row for row in run.events if row.get("event") not in UNMARKED][-80:]
    times = run.table.values("time")
    steps = run.table.steps
    markers: list[Json] = []
    for row in marked:
        step = number(row, "step")
        if not math.isfinite(step):
            index = int(np.searchsorted(times, number(row, "time")))
            step = steps[min(index, len(steps) - 1)] if steps else 0.0
        markers.append({**_event(row), "step": step})
    return markers


def _short(text: str) -> str:
    return printable(text)[:300]


def _truncate(text: str, *, max_length: int = 6000) -> str:
    num_more = len(text) - max_length
    shown = printable(text[:max_length], keep=KEPT)
    return shown if num_more <= 0 else f"{shown} ... ({num_more} more characters)"
