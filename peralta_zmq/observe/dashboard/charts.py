"""Which numbers are drawn together, and what of them is sent to the page.

Knows a table of steps; knows nothing of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from peralta_zmq.observe.dashboard.table import Table, picked

Kind: TypeAlias = Literal["line", "band", "dots", "stack"]
Drawn: TypeAlias = dict[str, Any]  # one chart as JSON
EVAL = "eval"  # the column of held-out accuracy, which has steps of its own
NUM_BUCKETS = 120
MAX_GENERATORS = 12  # drawn in one chart


@dataclass(frozen=True, slots=True)
class Series:
    """One column of a chart. A band is drawn without a line, between two neighbours."""

    key: str
    label: str
    kind: Kind = "line"
    right: bool = False  # on the axis to the right
    percent: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel; with `each_generator`, a column of that name for each of them."""

    id: str
    title: str
    lines: tuple[Series, ...] = ()
    unit: str = ""
    each_generator: str = ""


CHARTS = (
    Chart("reward", "Reward", (
        Series("reward/low", "- std", "band"), Series("reward/high", "+ std", "band"),
        Series("reward", "reward"), Series(EVAL, "held-out", "dots"),
    )),
    Chart("signal", "Groups without signal, completions cut off", (
        Series("frac_reward_zero_std", "no signal", percent=True),
        Series("completions/clipped_ratio", "cut off", percent=True),
    )),
    Chart("loss", "Loss and gradient norm", (
        Series("loss", "loss"), Series("grad_norm", "gradient norm", right=True),
    )),
    Chart("entropy", "Entropy and mismatch KL", (
        Series("entropy", "entropy"), Series("mismatch_kl", "mismatch KL", right=True),
    )),
    Chart("staleness", "Staleness and drops", (
        Series("staleness/mean", "mean"), Series("staleness/max", "max"),
        Series("dropped", "dropped groups, sum", right=True),
    ), unit="steps"),
    Chart("speed", "Tokens per second of each generator", each_generator="tokens_per_s"),
    Chart("time", "Where a step's time goes", (
        Series("time/forward_backward", "compute", "stack"),
        Series("time/waiting", "wait", "stack"),
        Series("time/journal", "journal", "stack"),
        Series("time/publish", "publish", "stack"), Series("time/rest", "rest", "stack"),
    ), unit="seconds"),
    Chart("queue", "Groups waiting for the trainer", (Series("queue/depth", "queue"),)),
    Chart("weights", "Publish and reload", (
        Series("weights/seconds", "publish"), Series("reload/max", "slowest reload"),
        Series("weights/megabytes", "version, MB", right=True),
    ), unit="seconds"),
    Chart("length", "Completion length", (Series("completions/mean_length", "mean"),),
          unit="tokens"),
)  # fmt: skip


def drawn(table: Table, evaluations: Mapping[float, float], *, after: int = 0) -> list[Drawn]:
    """All charts from line `after` of the table on: `{id, title, lines, x, columns}` each.

    Of many steps those with extremes are sent; a gap is null.
    """
    return [_drawn(chart, table, evaluations, after) for chart in CHARTS]


def _drawn(chart: Chart, table: Table, evaluations: Mapping[float, float], after: int) -> Drawn:
    lines = [*chart.lines, *_of_generators(chart, table)]
    lines = [line for line in lines
             if (evaluations if line.key == EVAL else line.key in table.columns)]  # fmt: skip
    columns = [table.values(line.key, after=after) for line in lines if line.key != EVAL]
    chosen = {after + int(place) for place in picked(columns, num_buckets=NUM_BUCKETS)}
    held_out = evaluations if any(line.key == EVAL for line in lines) else {}
    chosen |= {place for step in held_out if (place := table.place(step)) is not None}
    places = sorted(chosen)
    x = sorted({table.steps[place] for place in places} | set(held_out))
    there = {table.steps[place]: place for place in places}
    return {
        "id": chart.id,
        "title": chart.title,
        "unit": chart.unit,
        "lines": [_line(line) for line in lines],
        "x": x,
        "columns": [
            [_known(held_out.get(step, math.nan)) for step in x]
            if line.key == EVAL
            else [_known(table.value(line.key, there.get(step))) for step in x]
            for line in lines
        ],
    }


def _of_generators(chart: Chart, table: Table) -> list[Series]:
    end = f"/{chart.each_generator}"
    if not chart.each_generator:
        return []
    keys = sorted(key for key in table.columns if key.startswith("gen/") and key.endswith(end))
    return [Series(key, key[4 : -len(end)]) for key in keys[:MAX_GENERATORS]]


def _line(line: Series) -> Drawn:
    return {
        "key": line.key,
        "label": line.label,
        "kind": line.kind,
        "right": line.right,
        "percent": line.percent,
    }


def _known(value: float) -> float | None:
    """Seven digits are more than a pixel shows."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
