"""Steps and seconds to a reward on the real model, with and without noise in the master weights.

`python -m benchmarks.rounding --keep FILE [--rates 2e-5 ...] [--arms NAME ...] [--seeds 0 1 ...]
[--seconds 400] [--picture FILE]`. Each run is `bin/lan local @ configs/extract.toml`; it ends at a
mean reward of 0.9 or after `--seconds`. FILE gets a line of JSON per run; runs that it has are not
repeated. Prints a table of all runs in FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.harness import REPO
from benchmarks.peers import environment
from benchmarks.peers.task import Task
from peralta_zmq.observe.metrics import Row, number, read_rows
from tools import real_model
from tools.link_proxy import free_ports

MODEL = str(real_model.model_folder())
REWARDS = (0.5, 0.9)
FP32, BF16 = "--train.dtype=float32", "--train.dtype=bfloat16"
ON_GRID = "--no-train.master-noise"
ARMS: dict[str, tuple[str, ...]] = {
    "masters on the grid": (ON_GRID, BF16),
    "masters on the grid, trainer in fp32": (ON_GRID, FP32),
    "all in fp32": (FP32, "--weights.dtype=float32", "--model.dtype=float32"),
    "noise": (BF16,),
    "noise, trainer in fp32": (FP32,),
    "published in float16": (ON_GRID, BF16, "--weights.dtype=float16", "--model.dtype=float32"),
}
TRL = {"TRL, bf16": "bfloat16", "TRL, fp32": "float32"}


def main() -> None:
    """Run what FILE lacks; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["2e-5"])
    parser.add_argument("--arms", nargs="+", default=[*ARMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(5)])
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    for seed in options.seeds:
        for rate in options.rates:
            for name in options.arms:
                key = {"arm": name, "rate": rate, "seed": seed}
                if not any(key.items() <= run.items() for run in read_rows(options.keep)):
                    if name in TRL:
                        found = run_trl(TRL[name], rate, seed, options.seconds)
                    else:
                        found = run_once(ARMS[name], rate, seed, options.seconds)
                    with options.keep.open("a") as file:
                        file.write(json.dumps(key | found) + "\n")
    sys.stdout.write(f"{table(read_rows(options.keep))}\n")
    if options.picture:
        draw(read_rows(options.keep), options.picture)


def run_once(settings: Sequence[str], rate: str, seed: int, seconds: float) -> dict[str, Any]:
    """Train until a mean reward of 0.9, or for `seconds`; returns figures of the run."""
    with tempfile.TemporaryDirectory(prefix="rounding-") as folder:
        command = [sys.executable, str(REPO / "bin/lan"), "local", "@",
                   str(REPO / "configs/extract.toml"), "--model.name", MODEL,
                   "--run.dir", folder, "--run.name", "run", "--run.seed", str(seed),
                   "--train.learning-rate", rate, "--train.max-steps", "60",
                   "--wire.port", str(free_ports()), "--no-eval.eval-base-model",
                   "--dashboard.port=None", *settings]  # fmt: skip
        metrics = Path(folder) / "run/metrics.jsonl"
        with open(Path(folder) / "log", "wb") as log:
            worker = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            deadline = time.monotonic() + seconds
            while worker.poll() is None:
                if is_reached(read_rows(metrics)) or time.monotonic() > deadline:
                    os.killpg(worker.pid, signal.SIGTERM)
                    break
                time.sleep(0.5)
            worker.wait()
        return figures(read_rows(metrics))


def is_reached(rows: Sequence[Row]) -> bool:
    return any(number(row, "reward") >= REWARDS[-1] for row in rows)


def run_trl(dtype: str, rate: str, seed: int, seconds: float) -> dict[str, Any]:
    """The same job with TRL's GRPOTrainer on all cores."""
    with tempfile.TemporaryDirectory(prefix="rounding-") as folder:
        task = Task(model=MODEL, folder=folder, environment="extract", train="extract_500",
                    dtype=dtype, batch_size=64, learning_rate=float(rate), max_steps=60,
                    temperature=0.8, seed=seed)  # fmt: skip
        command = [str(environment.python()), "-m", "benchmarks.peers.trl_grpo", task.to_json()]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO)
        assert worker.stdout is not None
        started = 0.0
        rows: list[Row] = []
        for line in worker.stdout:
            row = json.loads(line) if line.startswith("{") else {}
            started = started or row.get("time", 0.0)
            if "step" in row:
                rows.append({**row, "step_time": row["time"] - started if not rows else 0.0})
            if row.get("time", 0.0) - started > seconds or row.get("reward", 0.0) >= REWARDS[-1]:
                worker.kill()
        return figures(rows)


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """What the table shows of a run."""
    started = number(rows[0], "time") - number(rows[0], "step_time")
    deltas = [size for row in rows if (size := number(row, "weights/bytes")) < 200e6]
    kl = [number(row, "mismatch_kl") for row in rows if "mismatch_kl" in row]
    found: dict[str, Any] = {
        "rewards": [round(number(row, "reward"), 4) for row in rows],
        "seconds": [round(number(row, "time") - started, 1) for row in rows],
        "mismatch_kl": [float(f"{value:.2g}") for value in kl],
        "moved": round(number(rows[-1], "weights/moved", 0.0), 3),
        "delta_mb": [round(size / 1e6, 1) for size in (*deltas[:1], *deltas[-1:])],
    }
    for limit in REWARDS:
        reached = (index for index, reward in enumerate(found["rewards"]) if reward >= limit)
        index = next(reached, None)
        found[f"step_{limit}"] = None if index is None else index + 1
        found[f"seconds_{limit}"] = None if index is None else found["seconds"][index]
    return found


def table(runs: Sequence[Row]) -> str:
    """One line per rate and arm: medians with the range over the seeds."""
    columns = ["learning rate", "arm", "seeds", "steps to .5", "to .9", "seconds to .5", "to .9",
               "reward of steps 4 to 6", "of the last 3 steps", "mismatch_kl",
               "delta, MB"]  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    keys = sorted({(-float(str(run["rate"])), str(run["rate"]), str(run["arm"])) for run in runs})
    for _, rate, arm in keys:
        chosen: list[Any] = [run for run in runs if (run["rate"], run["arm"]) == (rate, arm)]
        kl = [value for run in chosen for value in run["mismatch_kl"][1:]]
        sizes = [size for run in chosen for size in run["delta_mb"]]
        first = [mean(run["rewards"][3:6]) for run in chosen]
        last = [mean(run["rewards"][-3:]) for run in chosen]
        cells = [
            *(rate, arm, str(len(chosen))),
            *(_range([run[f"step_{limit}"] for run in chosen]) for limit in REWARDS),
            *(_range([run[f"seconds_{limit}"] for run in chosen]) for limit in REWARDS),
            f"{median(first):.2f}",
            f"{median(last):.2f}",
            f"{min(kl):.0e} to {max(kl):.0e}" if kl else "",
            f"{max(sizes):.1f} to {min(sizes):.1f}" if sizes else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: Sequence[Row], file: Path) -> None:
    """Median reward by step, with and without noise, for each learning rate."""
    figure = Figure(figsize=(9, 3), layout="tight")
    rates = sorted({str(run["rate"]) for run in runs}, key=float, reverse=True)
    panels: Any = figure.subplots(1, len(rates), sharey=True)
    for panel, rate in zip(panels, rates, strict=True):
        for arm, color in (("noise", "tab:blue"), ("masters on the grid", "tab:orange")):
            curves: list[Any] = [
                run["rewards"] for run in runs if (run["rate"], run["arm"]) == (rate, arm)
            ]
            for curve in curves:
                panel.plot(range(1, len(curve) + 1), curve, color=color, alpha=0.3, linewidth=1)
            length = min(map(len, curves))
            medians = [median(curve[step] for curve in curves) for step in range(length)]
            panel.plot(range(1, length + 1), medians, color=color, label=arm)
        panel.set(title=f"learning rate {rate}", xlabel="training step", ylim=(0, 1))
    panels[0].set_ylabel("reward")
    panels[0].legend(loc="lower right", fontsize=8)
    figure.savefig(file, dpi=110)


def _range(values: Sequence[float | None]) -> str:
    """Median and range; a run that did not reach the reward counts as infinite."""
    ordered = sorted(float("inf") if value is None else value for value in values)
    low, middle, high = (
        "not reached" if value == float("inf") else f"{value:.0f}"
        for value in (ordered[0], median(ordered), ordered[-1])
    )
    return f"{middle} ({low} to {high})" if low != high else middle


if __name__ == "__main__":
    main()
