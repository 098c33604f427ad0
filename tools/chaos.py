"""Kills workers in the middle of a run and says what it cost: the promise of `make run-chaos`.

Knows the crew and what a run has written; knows nothing of models.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.metrics import METRICS, Row, last_step, number
from peralta_zmq.operate.process_group import ProcessGroup
from tools.promise_checker import Check, check, own_ends
from tools.run_history import History, read_history

SEED = "PERALTA_CHAOS_SEED"  # in the environment: the same kills again
NUM_KILLS = 5  # or one for each worker, if that is more
EARLIEST, LATEST = 0.10, 0.80  # share of the steps between which kills fall
REWARD_FLOOR = 0.95  # set by hand; the demo clears it when nobody is killed


@dataclass(frozen=True, slots=True)
class Strike:
    """One kill: whom, after which trained step, when (unix seconds)."""

    worker: str
    step: int
    time: float


class Chaos:
    """Strikes at its points of progress, then reports."""

    def __init__(self, folder: Path, *, max_steps: int, workers: Sequence[str]) -> None:
        self._folder = folder
        self._seed = seed_of(os.environ)
        self._planned = deque(plan_of(self._seed, workers, max_steps=max_steps))
        self._strikes: list[Strike] = []

    def look(self, crew: ProcessGroup) -> None:
        """Strike if the run has come far enough; a worker that is down is struck once it is up."""
        if not self._planned:
            return
        due, worker = self._planned[0]
        step = last_step(self._folder / METRICS) or 0
        now = time.time()
        if step >= due and crew.strike(worker):
            self._planned.popleft()
            self._strikes.append(Strike(worker, step, now))

    def report(self) -> int:
        """Print the kills and the checks; 1 if a check fails, else 0."""
        history = read_history(self._folder)
        checks = [self._kills(), *check(history), own_ends(history), _reward(history)]
        lines = [
            "",
            "killed         at step   back",
            *(f"{one.worker:<14} {one.step:>7}   {_back_text(one, history)}"
              for one in self._strikes),
            "",
            *(each.line for each in checks),
            f"the same kills again: make run-chaos SEED={self._seed}",
        ]  # fmt: skip
        sys.stdout.write("\n".join(lines) + "\n")
        return int(any(each.broken for each in checks))

    def _kills(self) -> Check:
        made = len(self._strikes)
        text = f"made: {made} of {made + len(self._planned)}"
        return Check("kills", text, ("the run was over before",) if self._planned else ())


def seed_of(environment: Mapping[str, str]) -> int:
    """The seed that the environment asks for, or a new one. Raises ConfigError."""
    text = environment.get(SEED) or str(random.randrange(10_000))
    if not text.isdecimal():
        raise ConfigError(f"{SEED} = {text!r} is no seed; set it to a number, or leave it out")
    return int(text)


def plan_of(seed: int, workers: Sequence[str], *, max_steps: int) -> list[tuple[int, str]]:
    """(step, worker) of every kill, ascending; every worker is killed at least once."""
    chance = random.Random(seed)
    victims = [*workers, *chance.choices(workers, k=max(0, NUM_KILLS - len(workers)))]
    chance.shuffle(victims)
    steps = sorted(int(chance.uniform(EARLIEST, LATEST) * max_steps) for _ in victims)
    return list(zip(steps, victims, strict=True))


def seconds_until_back(strike: Strike, rows: Sequence[Row], events: Sequence[Row]) -> float | None:
    """Seconds until the trainer's next step or the generator's next start is seen; None if never.

    The trainer records a join when it first hears a new start of a generator.
    """
    name = strike.worker.replace("generator", "local")
    seen = rows if strike.worker == "trainer" else [
        row for row in events if row.get("event") == "join" and row.get("generator") == name
    ]  # fmt: skip
    later = (number(row, "time") for row in seen if number(row, "time") > strike.time)
    back = next(later, None)
    return None if back is None else back - strike.time


def _reward(history: History) -> Check:
    reward = fmean(number(row, "reward") for row in history.rows[-5:]) if history.rows else 0.0
    broken = () if reward >= REWARD_FLOOR else (f"below {REWARD_FLOOR}",)
    return Check("reward", f"mean of the last 5 steps {reward:.3f}, floor {REWARD_FLOOR}", broken)


def _back_text(strike: Strike, history: History) -> str:
    seconds = seconds_until_back(strike, history.rows, history.events)
    return "not before the end" if seconds is None else f"after {seconds:.1f} s"
