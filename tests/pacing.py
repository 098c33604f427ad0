"""Measure the age of trained groups with real generators of unequal speed.

    PYTHONPATH=.:tests .venv/bin/python tests/pacing.py > docs/pacing.md

The first generator has one slot instead of eight, so that it is several times slower.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from real_programs import RealRun, until

from benchmarks.report import when
from tools.run_history import read_history

STEPS = 40
SETTINGS = (f"--train.max-steps={STEPS}", "--train.batch-size=64", "--checkpoint.interval=50")
RUNS = ((1, False), (2, False), (4, False), (2, True))  # generators, and whether one is killed
LIMITS = {"mean": 1.0, "dropped": 0.02}  # max_async_level, share of all groups
TITLE = """\
# Pacing

Age of a group in training steps when it is admitted to a batch, including the time in queues, with
`train.max_async_level` 1 and `train.max_off_policy_steps` 4. One generator is slow: it samples one
completion at a time (`engine.slots` 1), the others eight. Limits: a mean age of at most 1, less
than 2% of the groups dropped. In the last row the generator with the newest weights is killed in
the middle of the run; its cost is at most the longest wait of the trainer for a batch.

Made by `PYTHONPATH=.:tests .venv/bin/python tests/pacing.py > docs/pacing.md`: {steps} steps of 16
groups each, trainer and generators on one machine with 2 cores, the embedded model. {when}
"""


@dataclass(frozen=True, slots=True)
class Paced:
    """The result of one run."""

    name: str
    ages: Counter[int]  # number of groups by age in steps
    made_by: dict[str, int]  # groups in batches, by generator
    dropped: int
    seconds: float
    longest_wait: float  # of the trainer for a batch, from the second step on

    @property
    def mean(self) -> float:
        """Mean age in training steps."""
        return sum(age * count for age, count in self.ages.items()) / self.ages.total()

    @property
    def share_dropped(self) -> float:
        """Share of dropped groups in all groups received."""
        return self.dropped / (self.ages.total() + self.dropped)


def paced(folder: Path, num_generators: int, *, kill: bool = False) -> Paced:
    """Run trainer and generators to the end; the first generator is slow."""
    run = RealRun(folder, *SETTINGS)
    try:
        trainer = run.trainer()
        generators = [
            run.generator(
                f"g{index}",
                *("--generator.index", str(index), "--generator.count", str(num_generators)),
                *(("--engine.slots", "1") if index == 0 else ()),
            )
            for index in range(num_generators)
        ]
        started = time.monotonic()
        if kill:
            newest = f"loaded version={STEPS // 3}"
            until(lambda: any(newest in generator.printed for generator in generators), trainer)
            next(one for one in generators if newest in one.printed).kill()
        assert trainer.wait(timeout=400) == 0, trainer.printed[-3000:]
        seconds = time.monotonic() - started
        return _measured(run, f"{num_generators}{', one killed' if kill else ''}", seconds)
    finally:
        run.close()


def _measured(run: RealRun, name: str, seconds: float) -> Paced:
    history = read_history(run.folder, [])
    admitted = [entry for entry in history.journal if entry.fate in ("trained", "no_signal")]
    made_by = Counter(entry.key[0].partition("/")[0] for entry in admitted)
    accounting = history.summary["accounting"]
    assert isinstance(accounting, dict)
    waits = [float(str(row["time/wait_for_batch"])) for row in history.rows[1:]]
    return Paced(
        name,
        ages=Counter(entry.age for entry in admitted),
        made_by=dict(sorted(made_by.items())),
        dropped=accounting["stale"] + accounting["abandoned"] + accounting["lost"],
        seconds=seconds,
        longest_wait=max(waits),
    )


def table(runs: list[Paced]) -> str:
    """Histograms of the ages as a Markdown table, one row per run."""
    ages = range(max(age for run in runs for age in run.ages) + 1)
    head = ["generators", *(f"age {age}" for age in ages), "mean", "dropped", "groups by generator",
            "longest wait"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for run in runs:
        shares = " ".join(f"{name} {count}" for name, count in run.made_by.items())
        lines.append(
            [run.name, *(str(run.ages[age]) for age in ages), f"{run.mean:.2f}",
             f"{run.dropped} ({run.share_dropped:.1%})", shares, f"{run.longest_wait:.1f} s"]
        )  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """Print all runs as a page; exit code 1 if a limit is exceeded."""
    runs: list[Paced] = []
    for num_generators, kill in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(paced(Path(folder), num_generators, kill=kill))
        print(f"{runs[-1]}", file=sys.stderr)
    print(TITLE.format(steps=STEPS, when=when()))
    print(table(runs))
    within_limits = all(
        run.mean <= LIMITS["mean"] and run.share_dropped < LIMITS["dropped"] for run in runs
    )
    return 0 if within_limits else 1


if __name__ == "__main__":
    sys.exit(main())
