"""Whole runs with generators of unequal speed, and the staleness of their groups.

The first generator has one slot instead of eight, so that it is several times slower.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from peralta_zmq.config.programs import program_command
from peralta_zmq.observe.metrics import number
from peralta_zmq.operate.process_group import ProcessGroup, Worker, recorder, supervise
from tools.link_proxy import free_ports
from tools.promise_checker import IN_STEPS, unexpected_ends
from tools.run_history import DEMO_OPTIONS, RECORDING_OPTIONS, History, read_history

STEPS = 40
SETTINGS = (
    *DEMO_OPTIONS,
    *("--sampling.num-generations", "4", "--train.batch-size", "64"),
    *("--train.max-steps", str(STEPS), "--train.max-off-policy-steps", "4"),
    *("--run.num-workers", "2"),
    *("--engine.slots", "8"),
    *("--eval.num-examples", "4", "--no-eval.eval-base-model"),
    *("--checkpoint.interval", "50", *RECORDING_OPTIONS),
)
RUNS = ((1, False), (2, False), (4, False), (2, True))  # generators, and whether one is killed
LIMITS = {"mean": 1.0, "dropped": 0.02}  # max_async_level, share of all groups
KILLED_AT = STEPS // 3  # version whose first reader is killed
NEWEST = f"loaded version={KILLED_AT} "  # in the log of that generator
MAX_SECONDS = 400.0  # of a run


@dataclass(frozen=True, slots=True)
class Paced:
    """The result of one run."""

    name: str
    ages: Counter[int]  # number of groups by staleness in steps
    paced_mean: float  # mean staleness of generators that are not slow, if there are any
    made_by: dict[str, int]  # groups in batches, by generator
    dropped: int
    seconds: float
    longest_wait: float  # of the trainer for a batch, from the second step on

    @property
    def mean(self) -> float:
        """Mean staleness in training steps."""
        return sum(age * count for age, count in self.ages.items()) / self.ages.total()

    @property
    def share_dropped(self) -> float:
        """Share of dropped groups in all groups received."""
        return self.dropped / (self.ages.total() + self.dropped)


def paced(folder: Path, num_generators: int, *, kill: bool = False) -> Paced:
    """Run trainer and generators to the end; the first generator is slow.

    Raises RuntimeError if a worker fails, and TimeoutError.
    """
    port = str(free_ports())
    settings = ("--run.dir", str(folder), "--run.name", "run", "--wire.port", port, *SETTINGS)
    logs = {f"g{index}": folder / f"g{index}.log" for index in range(num_generators)}
    workers = [Worker("trainer", (*program_command("trainer"), *settings), folder / "trainer.log")]
    for index, (name, log) in enumerate(logs.items()):
        slots = ("--engine.slots", "1") if index == 0 else ()
        command = (*program_command("generator"), *settings, "--generator.name", name, *slots)
        workers.append(Worker(name, command, log))
    started, killed = time.monotonic(), ""

    def on_tick(group: ProcessGroup) -> None:
        nonlocal killed
        if time.monotonic() > started + MAX_SECONDS:
            raise TimeoutError(f"the run has not ended after {MAX_SECONDS:.0f} s")
        if kill and not killed:
            text = {name: log.read_text("utf-8", "replace") for name, log in logs.items()}
            killed = next((name for name in logs if NEWEST in text[name]), "")
            if killed:
                group[killed].kill()
                group[killed].stop()  # it is not restarted

    if code := supervise(workers, record=recorder(folder / "run"), on_tick=on_tick):
        raise RuntimeError(f"the run ended with exit code {code}")
    name = f"{num_generators}{', one killed' if kill else ''}"
    return _measured(read_history(folder / "run", []), name, time.monotonic() - started)


def _measured(history: History, name: str, seconds: float) -> Paced:
    if crashed := unexpected_ends(history).broken:
        raise RuntimeError(f"crashed and restarted: {', '.join(crashed)}")
    admitted = [record for record in history.journal if record.outcome in IN_STEPS]
    made_by = Counter(record.key[0].partition("/")[0] for record in admitted)
    fast = [record for record in admitted if not record.key[0].startswith("g0/")]
    accounting = history.summary["accounting"]
    assert isinstance(accounting, dict)
    return Paced(
        name,
        ages=Counter(record.age for record in admitted),
        paced_mean=statistics.fmean(record.age for record in fast or admitted),
        made_by=dict(sorted(made_by.items())),
        dropped=accounting["stale"] + accounting["abandoned"] + accounting["lost"],
        seconds=seconds,
        longest_wait=max(number(row, "time/wait_for_batch") for row in history.rows[1:]),
    )
