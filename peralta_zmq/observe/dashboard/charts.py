"""Charts of the dashboard: column store of the metrics, points for the browser.

charts.toml lists the charts and their lines. A number that is missing, NaN or infinite is NaN here;
the server sends NaN as null.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from peralta_zmq.errors import printable
from peralta_zmq.observe.metrics import Row, generator_numbers, read_toml
from peralta_zmq.observe.prometheus import documented_name

Column: TypeAlias = NDArray[np.float64]
Json: TypeAlias = dict[str, Any]
# Keys of lines that are not columns of Table: held-out accuracy, minus and plus its standard error.
EVAL_KEYS = ("eval", "eval/low", "eval/high")
# Sums since the begin of the run, for the x axis: seconds of all steps, tokens of all batches.
TOTALS = {"total/seconds": "step_time", "total/tokens": "num_tokens"}

# Title, unit and lines of each chart; the comment in charts.toml explains the fields.
CHARTS: list[Json] = read_toml(Path(__file__).with_name("charts.toml"))["charts"]
# Parts of the step time that the trainer measures; the rest is time/other.
ACTIVITIES = ("time/forward_backward", "time/wait_for_batch", "time/journal", "time/publish")


class Evaluation(NamedTuple):
    """Result of a held-out evaluation; NaN for a number that eval.jsonl lacks."""

    accuracy: float  # mean reward
    stderr: float = math.nan  # standard error of the accuracy
    num_examples: float = math.nan


class Table:
    """Metrics of all steps as columns, ascending by step.

    A step that was trained again after a roll-back replaces its old row and all later rows;
    `rewinds` counts this. `own` has the columns that only custom losses and filters report.
    `max_columns` limits the memory if many generators with different names join.
    """

    def __init__(self, *, max_columns: int = 2000) -> None:
        self._max_columns = max_columns
        self.steps = array("d")
        self.columns: dict[str, array[float]] = {}
        self.own: list[str] = []
        self.rewinds = 0

    def append(self, row: Row) -> None:
        """Add a row of metrics.jsonl; a row without a step is skipped."""
        numbers = {
            key: float(value)
            for key, value in row.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        if (step := numbers.get("step")) is None:
            return
        if self.steps and step <= self.steps[-1]:
            self._rewind(step)
        num_earlier = len(self.steps)
        self.steps.append(step)
        # `derived` is first, to get its columns before there are `max_columns`, and last, so that
        # it overrides metrics of the same name.
        derived = derived_numbers(numbers)
        for total, key in TOTALS.items():
            earlier = self.columns[total][-1] if num_earlier else 0.0
            derived[total] = earlier + max(0.0, numbers.get(key, 0.0))
        for key, value in {**derived, **numbers, **derived}.items():
            column = self.columns.get(key)
            if math.isnan(value) or (column is None and len(self.columns) >= self._max_columns):
                continue
            if column is None:
                column = self.columns[key] = array("d")
                if key not in derived and documented_name(key) is None:
                    self.own.append(key)
            if len(column) < num_earlier:
                column.extend([math.nan] * (num_earlier - len(column)))
            column.append(value)

    def values(self, key: str, *, after: int = 0) -> Column:
        """A column from row `after` on, NaN if missing: float64 [steps - after]."""
        values = np.array(self.columns.get(key, array("d"))[after:], np.float64)
        num_missing = len(self.steps) - after - len(values)
        return np.concatenate([values, np.full(num_missing, np.nan)])

    def value(self, key: str, index: int | None) -> float:
        """The number in row `index` of a column; NaN if there is none."""
        column = self.columns.get(key, ())
        return column[index] if index is not None and 0 <= index < len(column) else math.nan

    def index(self, step: float) -> int | None:
        """The row number of a step; None if there is none."""
        index = bisect_left(self.steps, step)
        return index if index < len(self.steps) and self.steps[index] == step else None

    def total(self, key: str, step: float) -> float:
        """A sum of TOTALS at the end of a step; 0 before the first row."""
        index = bisect_right(self.steps, step) - 1
        return self.columns[key][index] if index >= 0 else 0.0

    def _rewind(self, step: float) -> None:
        keep = bisect_left(self.steps, step)
        self.steps = self.steps[:keep]
        self.columns = {key: column[:keep] for key, column in self.columns.items()}
        self.rewinds += 1


def derived_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    """Rates, sums and parts of the step time, from the finite numbers of one row.

    A result is NaN if a number that it needs is missing; missing activities count as 0.
    """

    def get(key: str, default: float = math.nan) -> float:
        return numbers.get(key, default)

    seconds = get("step_time")
    rate = 1 / seconds if seconds > 0 else math.nan
    activities = {key: get(key, 0.0) for key in ACTIVITIES}
    reloads = generator_numbers(numbers, "reload_s").values()
    return {
        **activities,
        "time/other": max(0.0, seconds - sum(activities.values())),  # max(0.0, nan) is 0.0
        "rollouts_per_s": get("num_rollouts") * rate,
        "tokens_per_s": get("num_rollouts") * get("completions/mean_length") * rate,
        "dropped": sum(numbers[key] for key in numbers if key.startswith("dropped/")),
        "weights/seconds": get("weights/encode_seconds") + get("weights/write_seconds"),
        "weights/megabytes": get("weights/bytes") / 1e6,
        "reload/max": max(reloads, default=math.nan),
        "reward/low": get("reward") - get("reward_std"),
        "reward/high": get("reward") + get("reward_std"),
    }


def charts_of(table: Table) -> list[Json]:
    """CHARTS without optional ones that have no data, and a chart for each own metric."""
    own = [
        {"id": f"own-{key}", "title": printable(key), "lines": [{"key": key, "label": "value"}]}
        for key in table.own[:24]
    ]
    shown = [chart for chart in CHARTS if not chart.get("optional") or _lines(chart, table)]
    return shown + own


def points(
    chart: Json, table: Table, evaluations: Mapping[float, Evaluation], *, after: int
) -> Json:
    """A chart of `charts_of` with `x`, the steps from row `after` on, and `columns`, of which long
    ones are downsampled. The last lines are TOTALS; EVAL_KEYS have all `evaluations`, by step.
    """
    all_lines = _lines(chart, table)
    lines = [line for line in all_lines if evaluations or line["key"] not in EVAL_KEYS]
    keys = [line["key"] for line in lines]
    values = [table.values(key, after=after) for key in keys if key not in EVAL_KEYS]
    indices = {after + int(index) for index in downsample(values, num_buckets=120)}
    held_out = evaluations if EVAL_KEYS[0] in keys else {}  # may have steps before `after`
    indices |= {index for step in held_out if (index := table.index(step)) is not None}
    index_of = {table.steps[index]: index for index in sorted(indices)}
    x = sorted(index_of.keys() | held_out.keys())
    accuracies = {
        step: dict(zip(EVAL_KEYS, (mean, mean - stderr, mean + stderr), strict=True))
        for step, (mean, stderr, _) in held_out.items()
    }

    def value(key: str, step: float) -> float:
        if key in EVAL_KEYS:
            return accuracies.get(step, {}).get(key, math.nan)
        if key in TOTALS:
            return table.total(key, step)
        return float(f"{table.value(key, index_of.get(step)):.7g}")  # makes the JSON shorter

    lines += [{"key": key, "label": "", "kind": "axis"} for key in TOTALS]
    columns = [[value(line["key"], step) for step in x] for line in lines]
    return {**chart, "lines": lines, "x": x, "columns": columns}


def downsample(columns: Sequence[Column], *, num_buckets: int) -> NDArray[np.int64]:
    """Ascending row indices that preserve the extremes and gaps of long columns.

    These are the first row, the last row and, for each column in each bucket of adjacent rows, the
    rows of the minimum, of the maximum and of the first missing value.
    """
    size = len(columns[0]) if columns else 0
    if size <= 4 * num_buckets:
        return np.arange(size)
    width = -(-size // num_buckets)  # rows in a bucket, rounded up
    starts = np.arange(0, size, width)
    indices = [np.array([0, size - 1])]
    for column in columns:
        padded = np.full(len(starts) * width, np.nan)
        padded[:size] = column
        buckets = padded.reshape(len(starts), width)
        missing = np.isnan(buckets)
        # argmin and argmax return 0, the first row of the bucket, if no value qualifies.
        indices += [
            starts + np.where(missing, np.inf, buckets).argmin(axis=1),
            starts + np.where(missing, -np.inf, buckets).argmax(axis=1),
            starts + missing.argmax(axis=1),
        ]
    # An index in the padding becomes that of the last row.
    return np.unique(np.minimum(np.concatenate(indices), size - 1))


def _lines(chart: Json, table: Table) -> list[Json]:
    """The lines of a chart that the run has, except that it may have no evaluation yet."""
    if named := chart.get("named"):
        prefix, suffix = named.split("NAME")
        keys = [key for key in table.columns if key.startswith(prefix) and key.endswith(suffix)]
        names = sorted(key[len(prefix) : -len(suffix)] for key in keys)[:12]
        return [{"key": prefix + name + suffix, "label": printable(name)} for name in names]
    lines: list[Json] = chart["lines"]
    return [line for line in lines if line["key"] in table.columns or line["key"] in EVAL_KEYS]
