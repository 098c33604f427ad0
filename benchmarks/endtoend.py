"""The embedded task from the same base: this project against TRL and against the original's way.

One trainer and two generators (`bin/lan local`) against TRL's GRPOTrainer and against the
original's two actors on Ray, each alone on the machine, by turns: same data, 8 completions a
problem, 128 rollouts a step, learning rate 2e-4 falling to 0 over 80 steps, until the mean reward
of the last five steps is 0.9. Seconds count from the moment when everything is loaded; the claims
`..._with_start_...` from the command; `time_SIDE_PART` and `cpu_SIDE_KIND` say where they
went. `--quick`: a few steps of each, without that goal.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks import harness
from benchmarks.harness import REPO, Claim, progress_of, spread
from benchmarks.measured_command import KINDS, MeasuredCommand
from benchmarks.peers import environment
from benchmarks.peers.task import Task, written

BATCH = 128  # rollouts, of those that say no other number
GOAL, LAST = 0.9, 5  # the mean of so many steps
BASE = REPO / "peralta_zmq" / "models" / "embedded"
PATIENCE = {"ours": 180.0, "trl": 300.0, "ray_original": 900.0}  # seconds from the command
QUICK_PATIENCE, QUICK_STEPS = {"ours": 60.0, "trl": 60.0, "ray_original": 90.0}, 8
PEERS = ("trl", "ray_original")
REQUIRED = {"wall_vs_trl": 3.0, "wall_vs_ray_original": 10.0}
OUR_PARTS = {
    "wait": "time/wait_for_batch", "journal": "time/journal", "train": "time/forward_backward",
    "publish": "time/publish",
}  # fmt: skip
MEANWHILE = "_meanwhile"  # of a part that another process did at the same time
MODULES = {"trl": "benchmarks.peers.trl_grpo", "ray_original": "benchmarks.peers.ray_original"}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Course:
    """One run of one side, up to the goal or to where it was ended."""

    wall: float  # seconds from the beginning of training
    wall_with_start: float  # and from the command
    cpu: float
    cpu_with_start: float
    rollouts_per_s: float
    bytes_per_update: float
    memory: float  # bytes, at most
    steps: int
    reached: bool
    parts: Mapping[str, float]  # seconds of the trainer's side, and of others `..._meanwhile`
    kinds: Mapping[str, float]  # processor seconds of the trainer and of the generators


def run(*, quick: bool) -> Iterable[Claim]:
    """Every side in turn, three rounds; `quick` one short round, whose ratios compare steps."""
    interpreter = environment.python()
    courses: dict[str, list[Course]] = {name: [] for name in ("ours", *PEERS)}
    num_rounds = 1 if quick else 3
    tell = progress_of(num_rounds * len(courses))
    for _ in range(num_rounds):
        for name, taken in courses.items():
            taken.append(course_of(name, interpreter, quick=quick))
            tell(f"{name}: {taken[-1]}")
    for peer in PEERS:
        yield from compared(peer, courses["ours"], courses[peer])
    for name, taken in courses.items():
        yield from divided(name, taken)


def peers() -> dict[str, str]:
    """Versions of what we are compared with."""
    return environment.versions()


def course_of(name: str, interpreter: Path, *, quick: bool) -> Course:
    """Run one side until the goal (`quick`: for a few steps) in a folder that is gone after it."""
    patience = (QUICK_PATIENCE if quick else PATIENCE)[name]
    enough = has_some_steps if quick else has_reached
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "errors"
        command = ours(folder) if name == "ours" else peer_command(name, interpreter, folder)
        with (
            log.open("wb") as errors,
            MeasuredCommand(command, cwd=REPO, environment=surroundings(), errors=errors) as child,
        ):
            source = files_of(Path(folder), child) if name == "ours" else lines_of(child)
            began, rows = follow(source, enough, ends=time.time() + patience)
        if not rows:
            tail = log.read_text("utf-8", "replace")[-2000:]
            raise RuntimeError(f"{name} took no step within {patience:.0f} s:\n{tail}")
        update = bytes_of_updates(Path(folder)) if name == "ours" else rows[-1]["bytes"]
        return measured(rows, child, began=began, bytes_per_update=update, short=quick)


def ours(folder: str) -> list[str]:
    """The embedded run as it is shipped, without evaluations."""
    port = str(20000 + os.getpid() % 20000)
    return [
        str(REPO / ".venv/bin/python"), "bin/lan", "local", "@", "configs/demo.toml",
        "--run.dir", folder, "--run.name", "ours", "--wire.port", port,
        "--eval.num-examples", "1", "--no-eval.eval-base-model", "--eval.interval", "1000",
    ]  # fmt: skip


def peer_command(name: str, interpreter: Path, folder: str) -> list[str]:
    """A peer on the same task."""
    task = Task(model=str(BASE), folder=folder, batch_size=BATCH)
    return [str(interpreter), "-m", MODULES[name], written(task)]


def surroundings() -> dict[str, str]:
    """Offline, from this checkout."""
    return {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip


def follow(
    source: Iterator[Row | None], enough: Callable[[Sequence[Row]], bool], *, ends: float
) -> tuple[float, list[Row]]:
    """When training began, and the rows of its steps; None from the source: nothing new yet."""
    began, rows = 0.0, list[Row]()
    for row in source:
        if row and "step" in row:
            rows.append(row)
        elif row:
            began = row["time"]
        if (rows and enough(rows)) or time.time() > ends:
            break
    return began, rows


def lines_of(child: MeasuredCommand) -> Iterator[Row | None]:
    """What a peer prints."""
    started = ""
    while True:
        new = child.read_output()
        *lines, started = (started + new).split("\n")
        yield from (cast(Row, json.loads(line)) for line in lines if line.startswith("{"))
        if not new and child.process.poll() is not None:
            return
        time.sleep(0.02)
        yield None


def files_of(folder: Path, child: MeasuredCommand) -> Iterator[Row | None]:
    """What our run writes: its start, then its steps."""
    events, metrics = folder / "ours" / "events.jsonl", folder / "ours" / "metrics.jsonl"
    begun, said = False, 0
    while child.process.poll() is None:
        child.read_output()  # so that its pipe never fills up
        if not begun and (starts := [e for e in json_lines(events) if e.get("event") == "start"]):
            begun = True
            yield cast(Row, {"time": starts[0]["time"]})
        rows = json_lines(metrics)
        yield from (cast(Row, row) for row in rows[said:])
        said = len(rows)
        time.sleep(0.02)
        yield None


def json_lines(file: Path) -> list[dict[str, object]]:
    """The whole lines of a file that somebody is writing; none when it is not there."""
    try:
        lines = file.read_text("utf-8").split("\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def bytes_of_updates(folder: Path) -> float:
    """The mean of what our run published after the first version, keyframes included."""
    events = json_lines(folder / "ours" / "events.jsonl")
    sizes = [cast(float, each["bytes"]) for each in events if each.get("event") == "publish"]
    return statistics.fmean(sizes[1:])


def has_reached(rows: Sequence[Row]) -> bool:
    """Whether the mean reward of the last five steps is at the goal."""
    return steps_to_goal(rows) is not None


def has_some_steps(rows: Sequence[Row]) -> bool:
    """Whether a rough answer is possible."""
    return len(rows) >= QUICK_STEPS


def steps_to_goal(rows: Sequence[Row]) -> int | None:
    """Steps after which the mean reward of the last five is 0.9 for the first time."""
    for count in range(LAST, len(rows) + 1):
        if statistics.fmean(each["reward"] for each in rows[count - LAST : count]) >= GOAL - 1e-9:
            return count
    return None


def measured(
    rows: Sequence[Row],
    child: MeasuredCommand,
    *,
    began: float,
    bytes_per_update: float,
    short: bool,
) -> Course:
    """The course up to the goal, or up to the last row; per step when it is a short one."""
    goal = steps_to_goal(rows)
    steps = goal or len(rows)
    ended = rows[steps - 1]["time"]
    rollouts = sum(each.get("rollouts", BATCH) for each in rows[:steps])
    whole, cpu = ended - began, child.cpu_at(ended)
    kinds = {kind: child.cpu_at(ended, kind) - child.cpu_at(began, kind) for kind in KINDS}
    share = steps if short else 1
    return Course(
        wall=whole / share,
        wall_with_start=(ended - child.started) / share,
        cpu=(cpu - child.cpu_at(began)) / share,
        cpu_with_start=cpu / share,
        rollouts_per_s=rollouts / whole,
        bytes_per_update=bytes_per_update,
        memory=child.peak_memory,
        steps=steps,
        reached=goal is not None,
        parts={part: each / share for part, each in parts_of(rows[:steps], whole).items()},
        kinds={kind: each / share for kind, each in kinds.items()},
    )


def parts_of(rows: Sequence[Row], wall: float) -> dict[str, float]:
    """Seconds of each part over these steps; `rest` is what none of the trainer's took."""
    totals = dict[str, float]()
    for row in rows:
        for part, taken in (row.get("seconds") or our_parts(row)).items():
            totals[part] = totals.get(part, 0.0) + taken
    in_line = sum(taken for part, taken in totals.items() if not part.endswith(MEANWHILE))
    return {**totals, "rest": wall - in_line}


def our_parts(row: Row) -> dict[str, float]:
    """Of a line of our metrics."""
    return {part: row[name] for part, name in OUR_PARTS.items()}


def compared(peer: str, ours: Sequence[Course], theirs: Sequence[Course]) -> Iterator[Claim]:
    """The claims against one peer; ratios of the same round, of which the median counts.

    Who did not reach the goal is taken with the seconds it had: the unit says so.
    """
    goal = "to reward 0.9" if all(each.reached for each in (*ours, *theirs)) else (
        "until ended; not all reached 0.9"
    )  # fmt: skip
    for name, unit in (
        ("wall", f"s {goal}"), ("cpu", f"CPU s {goal}"),
        ("wall_with_start", f"s {goal}, start included"),
        ("cpu_with_start", f"CPU s {goal}, start included"),
        ("memory", "bytes, all processes"), ("steps", "steps"),
    ):  # fmt: skip
        yield claim(f"{name}_vs_{peer}", name, unit, ours, theirs, less_is_better=True)
    yield claim(
        f"rollouts_per_s_vs_{peer}", "rollouts_per_s", "rollouts/s", ours, theirs,
        less_is_better=False,
    )  # fmt: skip
    if any(each.bytes_per_update for each in theirs):
        yield claim(
            f"bytes_per_update_vs_{peer}", "bytes_per_update", "bytes", ours, theirs,
            less_is_better=True,
        )  # fmt: skip


def divided(side: str, courses: Sequence[Course]) -> Iterator[Claim]:
    """Where the wall seconds of one side went, and its processor seconds where its processes can
    be told apart; the share is of them.
    """
    walls, cpus = [each.wall for each in courses], [each.cpu for each in courses]
    busy = [each.cpu / each.wall for each in courses]
    yield Claim(f"cores_{side}", statistics.median(busy), "cores busy", n=len(busy),
                spread=spread(busy))  # fmt: skip
    for part in courses[0].parts:
        taken = [each.parts[part] for each in courses]
        yield shared(f"time_{side}_{part}", taken, walls, "s, share of wall")
    for kind in courses[0].kinds:
        taken = [each.kinds[kind] for each in courses]
        if any(taken):
            yield shared(f"cpu_{side}_{kind}", taken, cpus, "CPU s, share of all")


def shared(name: str, taken: Sequence[float], wholes: Sequence[float], unit: str) -> Claim:
    """A part of a whole in each round."""
    return Claim(
        name, statistics.median(taken), unit,
        share=statistics.median(a / b for a, b in zip(taken, wholes, strict=True)),
        n=len(taken), spread=spread(taken) if statistics.median(taken) else None,
    )  # fmt: skip


def claim(
    name: str,
    field: str,
    unit: str,
    ours: Sequence[Course],
    theirs: Sequence[Course],
    *,
    less_is_better: bool,
) -> Claim:
    """One figure of both sides."""
    mine, peer = ([float(getattr(each, field)) for each in side] for side in (ours, theirs))
    return harness.compared(name, mine, peer, unit, less_is_better=less_is_better)
