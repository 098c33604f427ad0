"""Kills workers in the middle of a run and says what it cost: the promise of `make run-chaos`.

Knows the rows of a run folder and the crew; knows nothing of models.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from peralta_zmq.observe.metrics import EVENTS, METRICS, Row, last_step, number, read_rows
from peralta_zmq.operate.crew import Crew

PLAN = ((0.20, "generator-0"), (0.45, "trainer"), (0.70, "generator-1"))  # share of the steps
LOADED = re.compile(r"loaded version=(\d+) step=\d+ wid=(\w+)")
REFUSED = re.compile(r"refused (version=\d+)|unread (version=\d+).*does not verify")
REWARD_FLOOR = 0.95  # what the demo reaches when nobody is killed


@dataclass(frozen=True, slots=True)
class Strike:
    """One kill: whom, after which trained step, when (unix seconds)."""

    worker: str
    step: int
    time: float


class Chaos:
    """Strikes at its points of progress, then reports."""

    def __init__(self, folder: Path, *, max_steps: int) -> None:
        self._folder = folder
        self._max_steps = max_steps
        self._planned = deque(PLAN)
        self._strikes: list[Strike] = []

    def look(self, crew: Crew) -> None:
        """Strike if the run has come far enough; a worker that is down is struck once it is up."""
        if not self._planned:
            return
        share, worker = self._planned[0]
        step = last_step(self._folder / METRICS) or 0
        now = time.time()
        if step >= share * self._max_steps and crew.kill(worker):
            self._planned.popleft()
            self._strikes.append(Strike(worker, step, now))

    def report(self) -> int:
        """Print the kills and the checks; 1 if a check fails, else 0."""
        rows, events = read_rows(self._folder / METRICS), read_rows(self._folder / EVENTS)
        checks = self._checks(rows, events)
        lines = [
            "",
            "killed         at step   back",
            *(
                f"{one.worker:<14} {one.step:>7}   {_back_text(one, rows, events)}"
                for one in self._strikes
            ),
            "",
            *(f"{'ok  ' if passed else 'FAIL'}  {text}" for passed, text in checks),
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        return 0 if all(passed for passed, _ in checks) else 1

    def _checks(self, rows: Sequence[Row], events: Sequence[Row]) -> list[tuple[bool, str]]:
        num_loads, strange = strange_loads(self._folder, events)
        num_resumes = sum(row.get("event") == "resume" for row in events)
        num_steps = len({row.get("step") for row in rows})
        repeated = unexplained_steps(rows, events)
        reward = fmean(number(row, "reward") for row in rows[-5:]) if rows else 0.0
        return [
            (not self._planned, f"kills made: {len(self._strikes)} of {len(PLAN)}"),
            (num_resumes > 0, f"resumes of the trainer in {EVENTS}: {num_resumes}"),
            (num_steps == self._max_steps, f"steps trained: {num_steps} of {self._max_steps}"),
            (not repeated, f"steps that repeat or go back without a resume: {repeated or 'none'}"),
            (num_loads > 0, f"versions loaded by generators: {num_loads}"),
            (not strange, f"of them torn or not as published: {', '.join(strange) or 'none'}"),
            (reward >= REWARD_FLOOR, f"reward_last5: {reward:.3f}, at least {REWARD_FLOOR}"),
        ]


def unexplained_steps(rows: Sequence[Row], events: Sequence[Row]) -> list[int]:
    """Steps not above the one before, with no resume recorded between the two."""
    resumes = [number(row, "time") for row in events if row.get("event") == "resume"]
    found: list[int] = []
    for before, row in itertools.pairwise(rows):
        start, end = number(before, "time"), number(row, "time")
        explained = any(start <= moment <= end for moment in resumes)
        if number(row, "step") <= number(before, "step") and not explained:
            found.append(int(number(row, "step")))
    return found


def seconds_until_back(strike: Strike, rows: Sequence[Row], events: Sequence[Row]) -> float | None:
    """Seconds until the trainer's next step or the generator's next start is seen; None if never.

    The trainer records a join when a new start of a generator sends its first group.
    """
    name = strike.worker.replace("generator", "local")
    seen = rows if strike.worker == "trainer" else [
        row for row in events if row.get("event") == "join" and row.get("generator") == name
    ]  # fmt: skip
    later = (number(row, "time") for row in seen if number(row, "time") > strike.time)
    back = next(later, None)
    return None if back is None else back - strike.time


def strange_loads(folder: Path, events: Sequence[Row]) -> tuple[int, list[str]]:
    """How many versions the generators loaded or refused, and those not as they were published.

    From the generators' logs: what they loaded must have the hash that the trainer published
    under that number, and nothing may have been refused.
    """
    published = {
        f"version={row['number']} wid={row['wid']}" for row in events if row["event"] == "publish"
    }
    text = "".join(log.read_text("utf-8") for log in sorted(folder.glob("logs/generator-*.log")))
    loaded = [f"version={number} wid={wid}" for number, wid in LOADED.findall(text)]
    refused = [one or other for one, other in REFUSED.findall(text)]
    return len(loaded) + len(refused), [each for each in loaded if each not in published] + refused


def _back_text(strike: Strike, rows: Sequence[Row], events: Sequence[Row]) -> str:
    seconds = seconds_until_back(strike, rows, events)
    return "not before the end" if seconds is None else f"after {seconds:.1f} s"
