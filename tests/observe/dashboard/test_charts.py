"""Columns of the charts, and the points that are sent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from synthetic_runs import row

from peralta_zmq.observe.dashboard.charts import (
    Evaluation,
    Table,
    charts_of,
    downsample,
    points,
)
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
    steps = range(1, 100)
    table = Table(max_columns=200)
    for step in steps:
        table.append(row(step) | {f"gen/{step}/{name}": 1 for name in "abcdefgh"})
    assert len(table.columns) == 200
    assert {"time/other", "dropped", "reward/low", "rollouts_per_s"} <= table.columns.keys()
    assert table.values("dropped").tolist() == [3] * len(steps)


def test_downsample_keeps_extremes_and_gaps() -> None:
    values = np.zeros(10_000)
    values[[1234, 5678]] = 9.0, -9.0
    values[7777] = math.nan
    indices = downsample([values], num_buckets=100)
    assert {0, 1234, 5678, 7777, 9999} <= set(indices.tolist())
    assert len(indices) <= 302


def lines_of(chart: dict[str, Any]) -> dict[str, list[float]]:
    return {
        line["key"]: column for line, column in zip(chart["lines"], chart["columns"], strict=True)
    }


def chart(id: str, table: Table, evaluations: dict[float, Evaluation] | None = None) -> Any:
    (found,) = [each for each in charts_of(table) if each["id"] == id]
    return points(found, table, evaluations or {}, after=0)


def test_held_out_points_have_error_bars_if_the_error_is_known() -> None:
    evaluations = {0.0: Evaluation(0.25), 2.0: Evaluation(0.5, 0.125, 16)}
    lines = lines_of(chart("reward", table_of(row(1), row(2)), evaluations))
    assert str([lines[key] for key in ("eval", "eval/low", "eval/high")]) == str(
        [[0.25, math.nan, 0.5], [math.nan, math.nan, 0.375], [math.nan, math.nan, 0.625]]
    )
    assert "eval" not in lines_of(chart("reward", table_of(row(1))))


def test_charts_have_time_and_tokens_of_all_steps_so_far() -> None:
    table = table_of(row(1), row(2), row(3, step_time=None), row(4))
    drawn = chart("reward", table, {0.0: Evaluation(0.25), 9.0: Evaluation(0.5)})
    lines = lines_of(drawn)
    assert drawn["x"] == [0, 1, 2, 3, 4, 9]
    assert lines["total/seconds"] == pytest.approx([0, 0.4, 0.8, 0.8, 1.2, 1.2])
    assert lines["total/tokens"] == [0, 4096, 8192, 12288, 16384, 16384]
    table.append(row(2, step_time=1.0))  # after a roll-back
    assert lines_of(chart("reward", table))["total/seconds"] == pytest.approx([0.4, 1.4])


def test_named_rewards_and_metrics_of_custom_losses_have_charts() -> None:
    ids = [each["id"] for each in charts_of(table_of(row(1)))]
    assert "terms" not in ids and not [each for each in ids if each.startswith("own-")]
    own = {"rewards/format/mean": 0.5, "rewards/length/mean": 0.25, "my/metric": 7.0}
    table = table_of(row(1), row(2, **own))
    assert lines_of(chart("terms", table)).keys() >= {"rewards/format/mean", "rewards/length/mean"}
    assert lines_of(chart("own-my/metric", table))["my/metric"][-1] == 7.0
    assert [each["id"] for each in charts_of(table)][-1] == "own-my/metric"
    assert "learning_rate" in lines_of(chart("rate", table))
