"""The numbers of all steps as columns, and which of many are worth drawing.

Knows metric names; knows nothing of files or charts. A number that is missing, NaN or infinite is
NaN here and null on the page.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import cast

import numpy as np
from numpy.typing import NDArray

from peralta_zmq.observe.metrics import Row, number

MAX_COLUMNS = 2000  # generators name some of them
NUM_TOGETHER = 512  # rows that become columns together
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

    def extend(self, rows: Sequence[Row]) -> None:
        """Take in rows of metrics.jsonl, oldest first; one without a step is passed over."""
        for run in _ascending(rows):
            if self.steps and number(run[0], "step") <= self.steps[-1]:
                self._rewind(number(run[0], "step"))
            size = len(self.steps)
            told = {key: _column(run, key) for key in dict.fromkeys(chain.from_iterable(run))}
            found = derived(told)
            self.steps.extend(told["step"])
            for key, values in {**found, **told, **found}.items():  # first, and instead of told
                if not np.isnan(values).all():
                    self._put(key, values, size)

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

    def _put(self, key: str, values: NDArray[np.float64], size: int) -> None:
        column = self.columns.get(key)
        if column is None:
            if len(self.columns) >= MAX_COLUMNS:
                return
            column = self.columns[key] = array("d")
        column.extend([math.nan] * (size - len(column)))
        column.frombytes(values.tobytes())

    def _rewind(self, step: float) -> None:
        keep = bisect_left(self.steps, step)
        self.steps = self.steps[:keep]
        self.columns = {key: column[:keep] for key, column in self.columns.items()}
        self.rewinds += 1


def derived(told: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """What the page shows and no row says: rates, sums, and the parts of a step's time.

    `told` are columns, float64 [rows], one of them "step"; so are those that are returned.
    """
    nothing = np.full_like(told["step"], math.nan)

    def of(key: str, default: float = math.nan) -> NDArray[np.float64]:
        return np.nan_to_num(told.get(key, nothing), nan=default)

    seconds, spread = of("step_time"), of("reward_std")
    rate = np.divide(1, seconds, out=nothing.copy(), where=seconds > 0)
    generated = of("num_rollouts") * of("completions/mean_length")
    parts = {
        "time/waiting": of("time/wait_for_batch", 0.0),
        **{key: of(key, 0.0) for key in FEW_SECONDS},
    }
    drops = [of(key, 0.0) for key in told if key.startswith("dropped/")]
    reloads = [told[key] for key in told if key.startswith("gen/") and key.endswith("reload_s")]
    return {
        **parts,
        "time/rest": np.maximum(0.0, seconds - sum(parts.values())),
        "rollouts_per_s": of("num_rollouts") * rate,
        "tokens_per_s": generated * rate,
        "dropped": sum(drops, np.zeros_like(seconds)),
        "weights/seconds": of("weights/encode_seconds") + of("weights/write_seconds"),
        "weights/megabytes": of("weights/bytes") / 1e6,
        "reload/max": np.fmax.reduce([nothing, *reloads]),
        "reward/low": of("reward") - spread,
        "reward/high": of("reward") + spread,
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


def _ascending(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows that have a step, in parts within which it ascends."""
    part: list[Row] = []
    last = -math.inf
    for row in rows:
        step = number(row, "step")
        if not math.isfinite(step):
            continue
        if part and (step <= last or len(part) == NUM_TOGETHER):
            yield part
            part = []
        part.append(row)
        last = step
    if part:
        yield part


def _column(rows: Sequence[Row], key: str) -> NDArray[np.float64]:
    """float64 [rows], NaN for what is missing, infinite or no number."""
    found = [row.get(key, math.nan) for row in rows]
    try:
        column = np.array(array("d", cast("list[float]", found)))  # refuses all but numbers
    except (TypeError, OverflowError):
        column = np.array([number(row, key) for row in rows])
    column[np.isinf(column)] = np.nan
    return column
