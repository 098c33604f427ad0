"""Synthetic run folders, for tests of their readers."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from peralta_zmq.observe.dashboard.run_files import RunFiles
from peralta_zmq.observe.metrics import Row

CONFIG = """\
[run]
name = "hand"
[model]
name = "embedded"
[task]
name = "calculator"
[train]
max_steps = {max_steps}
"""


def row(step: int, *, when: float | None = None, **more: object) -> Row:
    """One row of metrics.jsonl: two generators; the trainer waits half of the time."""
    reward = 0.5 + 0.4 * math.sin(step / 50)
    metrics: Row = {
        "step": step, "time": time.time() if when is None else when, "reward": reward,
        "reward_std": 0.2, "frac_reward_zero_std": 0.25, "completions/mean_length": 9.5,
        "completions/clipped_ratio": 0.0, "num_rollouts": 128, "num_tokens": 4096,
        "staleness/mean": 1.25, "staleness/max": 3, "loss": -0.04, "grad_norm": 0.19,
        "mismatch_kl": 1.5e-5, "entropy": 0.7, "learning_rate": 1e-4, "queue/depth": 14,
        "time/forward_backward": 0.2, "time/wait_for_batch": 0.2, "time/journal": 0.01,
        "time/publish": 0.0, "weights/bytes": 147543, "weights/encode_seconds": 0.02,
        "weights/write_seconds": 0.01, "dropped/stale": 2, "dropped/lost": 1, "generators": 2,
        "step_time": 0.4,
    }  # fmt: skip
    for name in ("ann", "bob"):
        metrics |= {
            f"gen/{name}/groups": 8, f"gen/{name}/step": step - 1, f"gen/{name}/reload_s": 0.012,
            f"gen/{name}/tokens_per_s": 1044.9, f"gen/{name}/blocked_frac": 0.15,
        }  # fmt: skip
    return {**metrics, **more}


def append(path: Path, *rows: Row) -> None:
    """Append rows to a file; NaN in Python's notation."""
    with path.open("a") as file:
        file.writelines(json.dumps(item) + "\n" for item in rows)


def make_run(
    folder: Path, *, num_steps: int, max_steps: int | None = None, quiet: float = 0.0
) -> Path:
    """A run whose newest step is `quiet` seconds old, with 0.4 s per step."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(max_steps=max_steps or max(1, 2 * num_steps)))
    now = time.time() - quiet
    started = now - 0.4 * num_steps
    append(folder / "events.jsonl", {"time": started, "event": "start", "step": 0})
    append(
        folder / "metrics.jsonl",
        *(row(step, when=started + 0.4 * step) for step in range(1, num_steps + 1)),
    )
    if num_steps:
        join = {"time": started, "event": "join", "step": 1}
        joins = ({**join, "generator": name, "incarnation": name} for name in ("ann", "bob"))
        append(folder / "events.jsonl", *joins)
        append(folder / "samples.jsonl", group(num_steps))
    return folder


def read_run(folder: Path) -> RunFiles:
    """Read all files of a run."""
    run = RunFiles(folder)
    run.refresh()
    return run


def group(step: int, *texts: str) -> Row:
    """One row of samples.jsonl; the first answer is correct."""
    answers = texts or ("3 + 4", "3 4 +", "7", "4 - 3")
    rewards = [1.0] + [0.0] * (len(answers) - 1)
    return {
        "step": step, "problem": "p", "task": "calculator", "generator": "ann",
        "policy_step": step - 1, "rewards": rewards,
        "advantages": [reward - 1 / len(answers) for reward in rewards],
        "prompt": "add 3 to 4\n", "texts": list(answers), "cut_off": [False] * len(answers),
    }  # fmt: skip
