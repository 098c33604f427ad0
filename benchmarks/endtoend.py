"""Time to a mean reward of 0.9, against TRL and the original on Ray.

`bin/lan local` (one trainer, one generator), TRL's GRPOTrainer and the original's two Ray actors
run in turn, each alone on the machine, from the same base model: same data, 8 completions per
problem, the same rollouts per step and falling learning rate. Times count from the moment when
everything is loaded; for ours, this is when the trainer receives the first status of a generator.
Those of the claims `..._with_start_...` count from the command. `--quick` runs a few steps of each
without reaching the goal.

The job of this bench is the embedded task; real.py has that of a pretrained model.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from benchmarks.harness import REPO, Claim, compared, progress_of
from benchmarks.measured_command import MeasuredCommand
from benchmarks.peers import environment
from benchmarks.peers.task import Task
from peralta_zmq.observe.dashboard.run_files import Tail
from peralta_zmq.observe.metrics import EVENTS, METRICS, read_rows
from tools.link_proxy import free_ports

GOAL = 0.9  # mean reward
BASE = REPO / "peralta_zmq" / "models" / "embedded"
REQUIRED = {"wall_vs_trl": 4.0, "wall_with_start_vs_trl": 3.0, "wall_vs_ray_original": 8.0}
MODULES = {"trl": "benchmarks.peers.trl_grpo", "ray_original": "benchmarks.peers.ray_original"}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all sides train. The keys of `timeouts` are the sides: ours, and PEER or PEER:DTYPE."""

    config: str  # our settings: a file, and further options
    options: Sequence[str]
    task: Task  # the peers' settings, with the folder and DTYPE of a run
    last: int  # the goal is a mean over this number of steps
    rounds: int
    timeouts: Mapping[str, float]  # seconds from the command
    quick_timeouts: Mapping[str, float]
    quick_steps: int

    @property
    def peers(self) -> list[str]:
        return [name for name in self.timeouts if name != "ours"]


TOY = Job(
    config="configs/demo.toml",
    options=("--eval.num-examples", "1"),
    task=Task(model=str(BASE), folder=""),
    last=5,
    rounds=3,
    timeouts={"ours": 180.0, "trl": 300.0, "ray_original": 900.0},
    quick_timeouts={"ours": 60.0, "trl": 60.0, "ray_original": 90.0},
    quick_steps=8,
)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Measurements of one run of one side, until the goal or the timeout."""

    wall: float  # seconds since everything was loaded
    wall_with_start: float  # seconds since the command started
    bytes_per_update: float
    memory: float  # peak in bytes
    steps: int
    tokens_per_s: float  # generated tokens that were trained
    reached: bool


def run(*, quick: bool) -> Iterable[Claim]:
    return run_job(TOY, quick=quick)


def run_job(job: Job, *, quick: bool) -> Iterator[Claim]:
    """Run the sides in turn; `quick`: one short round, compared per step."""
    interpreter = environment.python()
    results: dict[str, list[RunResult]] = {name: [] for name in job.timeouts}
    num_rounds = 1 if quick else job.rounds
    report_progress = progress_of(num_rounds * len(results))
    for _ in range(num_rounds):
        for name, side in results.items():
            side.append(run_side(job, name, interpreter, quick=quick))
            report_progress(f"{name}: {side[-1]}")
    for peer in job.peers:
        yield from comparison(peer, results["ours"], results[peer])


def peers() -> dict[str, str]:
    return environment.versions()


def run_side(job: Job, name: str, interpreter: Path, *, quick: bool) -> RunResult:
    """Run one side until the goal (`quick`: for a few steps) in a temporary folder.

    Raises RuntimeError if it takes no step before its timeout.
    """
    timeout = (job.quick_timeouts if quick else job.timeouts)[name]

    def is_done(rows: Sequence[Row]) -> bool:
        return len(rows) >= job.quick_steps if quick else steps_to_goal(rows, job.last) is not None

    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "errors"
        command = (
            our_command(job, folder) if name == "ours"
            else peer_command(job, name, interpreter, folder)
        )  # fmt: skip
        with (
            log.open("wb") as errors,
            MeasuredCommand(command, cwd=REPO, environment=variables(), errors=errors) as child,
        ):
            source = our_rows(Path(folder), child) if name == "ours" else peer_rows(child)
            started, rows = read_until(is_done, source, ends=time.time() + timeout)
        if not rows:
            tail = log.read_text("utf-8", "replace")[-2000:]
            raise RuntimeError(f"{name} took no step within {timeout:.0f} s:\n{tail}")
        update = mean_update_bytes(Path(folder)) if name == "ours" else rows[-1]["bytes"]
        return measured(
            rows, child, started=started, bytes_per_update=update, last=job.last, per_step=quick
        )


def our_command(job: Job, folder: str) -> list[str]:
    """The shipped run without evaluations."""
    return [
        sys.executable, "bin/lan", "local", "@", job.config, *job.options,
        "--run.dir", folder, "--run.name", "ours", "--wire.port", str(free_ports()),
        "--no-eval.eval-base-model", "--eval.interval", "1000",
    ]  # fmt: skip


def peer_command(job: Job, name: str, interpreter: Path, folder: str) -> list[str]:
    peer, _, dtype = name.partition(":")
    task = replace(job.task, folder=folder, dtype=dtype or job.task.dtype)
    return [str(interpreter), "-m", MODULES[peer], task.to_json()]


def variables() -> dict[str, str]:
    """Environment variables: no network, modules of this checkout, with bytecode files."""
    return {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONDONTWRITEBYTECODE": ""}  # fmt: skip


def read_until(
    is_done: Callable[[Sequence[Row]], bool], source: Iterator[Row | None], *, ends: float
) -> tuple[float, list[Row]]:
    """Read rows until `is_done` or the time `ends`; return the time of the start, and the steps.

    The source yields None if it has no new row.
    """
    started, rows = 0.0, list[Row]()
    for row in source:
        if row and "step" in row:
            rows.append(row)
        elif row:
            started = row["time"]
        if (rows and is_done(rows)) or time.time() > ends:
            break
    return started, rows


def peer_rows(child: MeasuredCommand) -> Iterator[Row | None]:
    partial = ""
    while True:
        new = child.read_output()
        *lines, partial = (partial + new).split("\n")
        yield from (cast(Row, json.loads(line)) for line in lines if line.startswith("{"))
        if not new and child.process.poll() is not None:
            return
        time.sleep(0.02)
        yield None


def our_rows(folder: Path, child: MeasuredCommand) -> Iterator[Row | None]:
    """Rows from the files of our run: the moment when everything is loaded, then the steps.

    The generator has loaded the weights when the trainer receives its first status, which requests
    problems to sample.
    """
    events = Tail(folder / "ours" / EVENTS, sys.maxsize)
    metrics = Tail(folder / "ours" / METRICS, sys.maxsize)
    has_started = False
    while child.process.poll() is None:
        child.read_output()  # so that its pipe never fills up
        for event in [] if has_started else events.read():
            if event.get("event") == "join":
                has_started = True
                yield {"time": event["time"]}
                break
        yield from metrics.read()
        time.sleep(0.02)
        yield None
    yield from metrics.read()


def mean_update_bytes(folder: Path) -> float:
    """Mean size of the published versions after the first, keyframes included."""
    events = read_rows(folder / "ours" / EVENTS)
    sizes = [cast(float, event["bytes"]) for event in events if event.get("event") == "publish"]
    return statistics.fmean(sizes[1:])


def steps_to_goal(rows: Sequence[Row], last: int) -> int | None:
    """Number of steps until the mean reward of the `last` ones reaches 0.9; None if never."""
    for count in range(last, len(rows) + 1):
        if statistics.fmean(row["reward"] for row in rows[count - last : count]) >= GOAL - 1e-9:
            return count
    return None


def generated_tokens(row: Row) -> float:
    """Tokens generated for a step. A peer reports them; our rows have the mean per rollout."""
    if "tokens" in row:
        return row["tokens"]
    return row["completions/mean_length"] * row["num_rollouts"]


def measured(
    rows: Sequence[Row],
    child: MeasuredCommand,
    *,
    started: float,
    bytes_per_update: float,
    last: int,
    per_step: bool,
) -> RunResult:
    """Measurements until the goal, or until the last row; `per_step` divides them by the steps."""
    goal = steps_to_goal(rows, last)
    steps = goal or len(rows)
    ended = rows[steps - 1]["time"]
    divisor = steps if per_step else 1
    return RunResult(
        wall=(ended - started) / divisor,
        wall_with_start=(ended - child.started) / divisor,
        bytes_per_update=bytes_per_update,
        memory=child.peak_memory,
        steps=steps,
        tokens_per_s=sum(map(generated_tokens, rows[:steps])) / (ended - started),
        reached=goal is not None,
    )


def comparison(
    peer: str, ours: Sequence[RunResult], theirs: Sequence[RunResult]
) -> Iterator[Claim]:
    """Claims against one peer; a ratio is the median over the rounds.

    A run that missed the goal counts with its time until the timeout, which the unit mentions.
    """
    goal = "to reward 0.9" if all(each.reached for each in (*ours, *theirs)) else (
        "until ended; not all reached 0.9"
    )  # fmt: skip
    units = {
        "wall": f"s {goal}", "wall_with_start": f"s {goal}, start included",
        "memory": "bytes, all processes", "steps": "steps", "bytes_per_update": "bytes",
    }  # fmt: skip
    if not any(result.bytes_per_update for result in theirs):
        del units["bytes_per_update"]
    for name, unit in units.items():
        mine, peers = ([float(getattr(each, name)) for each in side] for side in (ours, theirs))
        yield compared(f"{name}_vs_{peer}", mine, peers, unit, less_is_better=True)
    mine, peers = ([each.tokens_per_s for each in side] for side in (ours, theirs))
    yield compared(f"rate_vs_{peer}", mine, peers, "generated tokens/s")
