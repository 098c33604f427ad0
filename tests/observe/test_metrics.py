"""JSON-lines files: complete lines only, also after a crash or on a full disk."""

import math
import resource
import time
from pathlib import Path

import pytest

from peralta_zmq.observe.metrics import JsonLines, finite_mean, number, read_rows


def test_row_is_written_immediately_with_null_for_nan(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "demo" / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.append({"step": 1, "text": "two\nlines"})
        lines.append({"a": math.nan, "b": [1.5, math.inf], "c": {"d": (-math.inf,)}, "e": True})
        first, second = path.read_bytes().splitlines()
    assert first == b'{"step": 1, "text": "two\\nlines"}'
    assert second == b'{"a": null, "b": [1.5, null], "c": {"d": [null]}, "e": true}'


@pytest.mark.parametrize("complete", [b"", b'{"step": 1}\n{"step": 2}\n'])
@pytest.mark.parametrize("torn", [b'{"step": 3, "rew', b"x" * 100_000, b'{"step": 3}'])
def test_open_truncates_only_a_torn_last_line(tmp_path: Path, complete: bytes, torn: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(complete + torn)
    with JsonLines(path) as lines:
        assert path.read_bytes() == complete
        lines.append({"step": 4})
    assert path.read_bytes() == complete + b'{"step": 4}\n'


def test_read_rows_skips_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": 2, "te\xc3{"step": 3}\n17\n[3]\n\n{"a": "\\\n'
        b'{"a": [1\n2]}\n{"step": 7}, {"step": 8}\n{"step": 4}\n%s\n{"step": 5}' % (b"[" * 9_000)
    )
    assert read_rows(path) == [{"step": 1}, {"step": 4}]


def test_two_writers_of_one_file_lose_no_event(tmp_path: Path) -> None:
    path, before = tmp_path / "events.jsonl", time.time()
    with JsonLines(path) as trainer:
        trainer.append_event("start", step=0)
        with JsonLines(path) as supervisor:
            supervisor.append_event("restart", worker="generator-0")
        trainer.append_event("join", generator="local-0")
    start, restart, join = read_rows(path)
    assert start == {"time": start["time"], "event": "start", "step": 0}
    assert before <= number(start, "time") <= time.time()
    assert (restart["event"], join["event"]) == ("restart", "join")


def test_number_returns_default_for_other_types_and_huge_integers() -> None:
    row = {"a": 3, "b": None, "c": "7", "d": 10**400, "e": math.inf}
    assert number(row, "a") == 3.0
    assert math.isnan(number(row, "b"))
    assert all(number(row, name, 0.0) == 0.0 for name in "cdef")


def test_finite_mean_of_no_or_too_large_values_is_the_default() -> None:
    assert finite_mean([1.0, math.inf, math.nan, 2.0]) == 1.5
    for values in ([], [math.nan], [1.7e308] * 2, [-1.7e308] * 2):
        assert math.isnan(finite_mean(values)) and finite_mean(values, default=0.0) == 0.0


def test_full_disk_loses_only_the_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with JsonLines(tmp_path / "rows.jsonl") as lines:
        lines.append({"step": 1})
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limit[1]))  # room for 8 more bytes
        try:
            lines.append({"step": 2, "text": "much too long"})
            lines.append({"step": 3, "text": "much too long"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        lines.append({"step": 4})
    assert [row["step"] for row in read_rows(tmp_path / "rows.jsonl")] == [1, 4]
    assert "row not written" in caplog.text


def test_trim_keeps_the_first_step_and_the_newest_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with JsonLines(path) as lines:
        for step in range(100):
            for group in "ab":
                lines.append({"step": step, "group": group, "text": "x" * 50})
        size = path.stat().st_size
        lines.trim(size)
        assert path.stat().st_size == size
        lines.trim(size - 1)
        lines.append({"step": 100})
    rows = read_rows(path)
    steps = [row["step"] for row in rows]
    assert steps[:3] == [0, 0, steps[2]] and steps[-3:] == [99, 99, 100]
    assert steps[2:] == sorted(steps[2:])
    assert size / 5 < path.stat().st_size < size / 3


def test_trim_that_fails_keeps_all_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    with JsonLines(path) as lines:
        lines.append({"step": 1})
        path.rename(tmp_path / "moved")
        lines.trim(1)
        lines.append({"step": 2})
    assert [row["step"] for row in read_rows(tmp_path / "moved")] == [1, 2]
    assert "rows.jsonl not made smaller: No such file or directory" in caplog.text
