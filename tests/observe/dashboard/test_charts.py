"""Columns of the charts, and the points that are sent."""

from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic_runs import row

from peralta_zmq.observe.dashboard.charts import MAX_COLUMNS, Table, downsample
from peralta_zmq.observe.metrics import Row


def table_of(*rows: Row) -> Table:
    table = Table()
    for one in rows:
        table.append(one)
    return table


def test_table_has_derived_columns() -> None:
    table = table_of(row(1))  # 128 rollouts in 0.4 s: 0.2 s waited, 0.2 s of work
    values = {key: table.value(key, 0) for key in table.columns}
    assert values["rollouts_per_s"] == pytest.approx(320)
    assert values["tokens_per_s"] == pytest.approx(3040)  # 9.5 generated tokens per rollout
    assert values["time/wait_for_batch"] == pytest.approx(0.2)
    assert values["time/other"] == pytest.approx(0.0, abs=1e-12)
    assert (values["dropped"], values["weights/seconds"]) == (3, pytest.approx(0.03))
    assert values["reload/max"] == pytest.approx(0.012)
    assert values["reward/low"] == pytest.approx(values["reward"] - 0.2)
    assert values["reward/high"] == pytest.approx(values["reward"] + 0.2)


def test_table_has_gaps_and_replaces_later_steps_after_a_roll_back() -> None:
    table = table_of(
        {"step": 1, "a": 1}, {"step": 2, "b": True, "a": None}, {"step": None, "a": 7},
        {"step": 3, "a": math.inf, "c": math.nan}, {"step": 4, "a": "4"}, {"step": 5, "a": None},
        {"step": 7, "a": 9}, {"a": 8}, {"step": 6, "dropped/x": 2, "b": [5]},
        {"step": 8, "dropped/y": 1, "step_time": 0.0},
    )  # fmt: skip
    assert (list(table.steps), table.rewinds) == ([1, 2, 3, 4, 5, 6, 8], 1)
    nan = math.nan
    columns = {key: table.values(key).tolist() for key in ("a", "b", "dropped", "rollouts_per_s")}
    assert str(columns) == str({
        "a": [1.0, *6 * [nan]], "b": [nan, 1.0, *5 * [nan]],
        "dropped": [*5 * [0.0], 2.0, 1.0], "rollouts_per_s": 7 * [nan],
    })  # fmt: skip
    assert not {"c", "reload/max", "rollouts_per_s"} & table.columns.keys()


def test_table_limits_columns_and_keeps_derived_ones() -> None:
    steps = range(1, MAX_COLUMNS // 8)
    table = table_of(*(
        row(step) | dict.fromkeys((f"gen/{step}/{name}" for name in "abcdefgh"), 1)
        for step in steps
    ))  # fmt: skip
    assert len(table.columns) == MAX_COLUMNS
    assert {"time/other", "dropped", "reward/low", "rollouts_per_s"} <= table.columns.keys()
    assert table.values("dropped").tolist() == [3] * len(steps)


def test_downsample_keeps_extremes_and_gaps() -> None:
    values = np.zeros(10_000)
    values[[1234, 5678]] = 9.0, -9.0
    values[7777] = math.nan
    indices = downsample([values], num_buckets=100)
    assert {0, 1234, 5678, 7777, 9999} <= set(indices.tolist())
    assert len(indices) <= 302
