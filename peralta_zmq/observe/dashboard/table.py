"""The numbers of all steps as columns, and which of many are worth drawing.

Knows metric names; knows nothing of files or charts. A number that is missing, NaN or infinite is
NaN here and null on the page.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from peralta_zmq.observe.metrics import number

MAX_COLUMNS = 2000  # generators name some of them
FEW_SECONDS = ("time/journal", "time/forward_backward", "time/publish")


class Table:
    """Columns of numbers, one line for each step, ascending.

    A step that comes again was trained again after a roll-back: it and what came after it make
    room, and `rewinds` counts that.
    """

    def __init__(self) -> None:
        self.steps = array("d")
        self.columns: dict[str, array[float]] = {}
        self.rewinds = 0

    def add(self, row: Mapping[str, object]) -> None:
        """Take in one row of metrics.jsonl; one without a step is passed over."""
        step = number(row, "step")
        if not math.isfinite(step):
            return
        if self.steps and step <= self.steps[-1]:
            self._rewind(step)
        size = len(self.steps)
        self.steps.append(step)
        for key, value in {**row, **derived(row)}.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._put(key, float(value), size)

    def values(self, key: str, *, after: int = 0) -> NDArray[np.float64]:
        """One column from line `after` on, float64 [steps - after]; NaN where no row has it."""
        known = np.array(self.columns.get(key, array("d"))[after:], np.float64)
        missing = len(self.steps) - after - len(known)
        return np.concatenate([known, np.full(missing, np.nan)])

    def value(self, key: str, place: int | None) -> float:
        """One number; NaN when there is none."""
        column = self.columns.get(key, ())
        return column[place] if place is not None and place < len(column) else math.nan

    def place(self, step: float) -> int | None:
        """The line of a step; None when it has none."""
        place = bisect_left(self.steps, step)
        return place if place < len(self.steps) and self.steps[place] == step else None

    def _put(self, key: str, value: float, size: int) -> None:
        column = self.columns.get(key)
        if column is None:
            if len(self.columns) >= MAX_COLUMNS:
                return
            column = self.columns[key] = array("d")
        if len(column) < size:
            column.extend([math.nan] * (size - len(column)))
        column.append(value)

    def _rewind(self, step: float) -> None:
        keep = bisect_left(self.steps, step)
        self.steps = self.steps[:keep]
        self.columns = {key: column[:keep] for key, column in self.columns.items()}
        self.rewinds += 1


def derived(row: Mapping[str, object]) -> dict[str, float]:
    """What the page shows and no row says: rates, sums, and the parts of a step's time."""
    seconds, spread = number(row, "step_time"), number(row, "reward_std")
    generated = number(row, "num_rollouts") * number(row, "completions/mean_length")
    wait = number(row, "time/wait_for_batch", 0.0)
    parts = {"time/waiting": wait, **{key: number(row, key, 0.0) for key in FEW_SECONDS}}
    reloads = [
        number(row, key) for key in row if key.startswith("gen/") and key.endswith("reload_s")
    ]
    return {
        **parts,
        "time/rest": max(0.0, seconds - sum(parts.values())),
        "rollouts_per_s": _rate(number(row, "num_rollouts"), seconds),
        "tokens_per_s": _rate(generated, seconds),
        "dropped": sum(number(row, key, 0.0) for key in row if key.startswith("dropped/")),
        "weights/seconds": number(row, "weights/encode_seconds")
        + number(row, "weights/write_seconds"),
        "weights/megabytes": number(row, "weights/bytes") / 1e6,
        "reload/max": max((each for each in reloads if math.isfinite(each)), default=math.nan),
        "reward/low": number(row, "reward") - spread,
        "reward/high": number(row, "reward") + spread,
    }


def picked(columns: Sequence[NDArray[np.float64]], *, num_buckets: int) -> NDArray[np.int64]:
    """Ascending indices that show what all of them show: of each bucket of neighbours the lowest,
    the highest and a missing value of each column, and the two ends.

    Every extreme of a column is kept, so that no spike is lost. All indices when they are few.
    """
    size = len(columns[0]) if columns else 0
    if size <= 4 * num_buckets:
        return np.arange(size)
    width = -(-size // num_buckets)
    starts = np.arange(0, size, width)
    chosen = [np.array([0, size - 1])]
    for column in columns:
        padded = np.full(len(starts) * width, np.nan)
        padded[:size] = column
        buckets = padded.reshape(len(starts), width)
        missing = np.isnan(buckets)
        for choice in (
            np.where(missing, np.inf, buckets).argmin(axis=1),
            np.where(missing, -np.inf, buckets).argmax(axis=1),
            missing.argmax(axis=1),
        ):
            chosen.append(starts + choice)
    return np.unique(np.minimum(np.concatenate(chosen), size - 1))


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.nan
