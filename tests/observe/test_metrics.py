"""Rows on disk: whole lines only, whatever a crash or a model did."""

import json
import math
import resource
import time
from pathlib import Path

import pytest

from peralta_zmq.observe.metrics import BLOCK, Events, JsonLines, last_step, number, read_rows

pytestmark = pytest.mark.timeout(20)


def test_a_row_is_on_disk_as_one_line_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "demo" / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.append({"step": 1, "text": "two\nlines"})
        lines.append({"step": 2})
        assert path.read_bytes() == b'{"step": 1, "text": "two\\nlines"}\n{"step": 2}\n'


def test_nan_and_infinity_are_written_as_null_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with JsonLines(path) as lines:
        lines.append({"a": math.nan, "b": [1.5, math.inf], "c": {"d": (-math.inf,)}, "e": True})
    nulls = {"a": None, "b": [1.5, None], "c": {"d": [None]}, "e": True}
    assert json.loads(path.read_text()) == nulls


@pytest.mark.parametrize("torn", [b'{"step": 3, "rew', b"x" * (BLOCK + 7), b'{"step": 3}'])
def test_opening_cuts_off_a_torn_last_line_and_nothing_else(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    with JsonLines(path) as lines:
        lines.append({"step": 4})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 4}\n'


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step')
    with JsonLines(path):
        assert path.read_bytes() == b""


def test_reading_passes_over_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "te\xc3{"step": 3}\n17\n{"step": 4}\n{"step": 5}')
    assert read_rows(path) == [{"step": 1}, {"step": 4}]


def test_an_absent_file_has_no_rows_and_no_step(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.jsonl") == []
    assert last_step(tmp_path / "none.jsonl") is None


def test_the_last_step_is_that_of_the_newest_row_that_has_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 7}\n{"step": 3}\n{"note": "no step"}\n{"step": 9')
    assert last_step(path) == 3


def test_two_writers_of_one_file_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Events(path) as trainer:
        trainer.record("start", step=0)
        with Events(path) as supervisor:
            supervisor.record("restart", worker="generator-0")
        trainer.record("join", generator="local-0")
    assert [row["event"] for row in read_rows(path)] == ["start", "restart", "join"]


def test_an_event_carries_its_moment_name_and_fields(tmp_path: Path) -> None:
    before = time.time()
    with Events(tmp_path / "events.jsonl") as events:
        events.record("resume", step=12)
    (row,) = read_rows(tmp_path / "events.jsonl")
    assert before <= number(row, "time") <= time.time()
    assert (row["event"], row["step"]) == ("resume", 12)


def test_a_field_that_is_no_number_counts_as_absent() -> None:
    row = {"a": 3, "b": None, "c": "7"}
    assert number(row, "a") == 3.0
    assert math.isnan(number(row, "b"))
    assert number(row, "c", 0.0) == number(row, "d", 0.0) == 0.0


def test_a_full_disk_costs_the_line_and_the_next_one_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with JsonLines(tmp_path / "rows.jsonl") as lines:
        lines.append({"step": 1})
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limit[1]))  # 8 bytes more than there are
        try:
            lines.append({"step": 2, "text": "much too long"})
            lines.append({"step": 3, "text": "much too long"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        lines.append({"step": 4})
    assert [row["step"] for row in read_rows(tmp_path / "rows.jsonl")] == [1, 4]
    assert "row not written" in caplog.text
