"""Rotation of a worker's log, and reading it across a rotation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peralta_zmq.operate import worker_logs

ROOT = Path(__file__).parents[2]
MAX_LOG_BYTES = 500
SUPERVISOR = f"""
import sys
from peralta_zmq.operate import supervisor
job = supervisor.Job("pc-0", (sys.executable, "-u", "-c", sys.argv[1]), {{}})
sys.exit(supervisor.run(job, max_log_bytes={MAX_LOG_BYTES}))
"""
PRINTS = """
import os, time
for first in (0, 100, 200):
    os.write(1, b"".join(b"line %d\\n" % n for n in range(first, first + 100)))
    while os.stat(".lan/pc-0.log").st_size: time.sleep(0.01)  # until it is rotated
print("the end")
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "pc-0.log"


def numbered(first: int, last: int) -> str:
    return "".join(f"line {number}\n" for number in range(first, last))


def test_supervisor_rotates_the_log_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".lan"
    folder.mkdir()
    log = folder / "pc-0.log"
    with log.open("ab") as output:
        ended = subprocess.run(
            [sys.executable, "-c", SUPERVISOR, PRINTS], stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, env={"PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, log.read_text()
    assert (folder / "pc-0.log.1").read_text() == numbered(200, 300)
    assert log.read_text() == "the end\n"
    assert worker_logs.tail_of(log)[-3:] == ["line 298", "line 299", "the end"]


def test_log_that_cannot_be_truncated_ends_no_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".lan" / "pc-0.log").mkdir(parents=True)
    code = SUPERVISOR.replace(f"={MAX_LOG_BYTES}", "=-1")
    ended = subprocess.run(
        [sys.executable, "-c", code, "pass"], env={"PYTHONPATH": str(ROOT)}, timeout=30, check=False
    )
    assert ended.returncode == 0


def test_log_is_rotated_only_above_its_limit(log: Path) -> None:
    log.write_text(numbered(0, 10))
    size = log.stat().st_size
    worker_logs.rotate_log(log, max_bytes=size)
    assert log.read_text() == numbered(0, 10)
    worker_logs.rotate_log(log, max_bytes=size - 1)
    assert log.read_text() == ""
    assert log.with_name("pc-0.log.1").read_text() == numbered(0, 10)
    worker_logs.rotate_log(log.with_name("missing.log"))


def test_reader_gets_each_line_once_across_a_rotation(log: Path) -> None:
    log.write_text(numbered(0, 30))
    offset = worker_logs.tail_offset(log, 2)
    lines, offset = worker_logs.read_new_lines(log, offset)
    assert lines == ["line 28", "line 29"]
    with log.open("a") as opened:
        opened.write("line 30\nline")  # an incomplete line is not returned
    lines, offset = worker_logs.read_new_lines(log, offset)
    assert lines == ["line 30"]
    with log.open("a") as opened:
        opened.write(" 31\nline 32\n")
    worker_logs.rotate_log(log, max_bytes=100)
    with log.open("a") as opened:
        opened.write("line 33\n")
    lines, offset = worker_logs.read_new_lines(log, offset)
    assert lines == ["line 31", "line 32", "line 33"]
    assert worker_logs.read_new_lines(log, offset) == ([], offset)
    assert worker_logs.tail_offset(log, 0) == len("line 33\n")


def test_reader_replaces_invalid_utf8(log: Path) -> None:
    log.write_bytes(b"50%\r\xff100%\n")
    assert worker_logs.read_new_lines(log, 0) == (["50%\r\ufffd100%"], 10)


def test_log_that_cannot_be_copied_is_truncated_and_reported(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(numbered(0, 30))
    log.with_name("pc-0.log.1").mkdir()
    worker_logs.rotate_log(log, max_bytes=100)
    assert log.read_text() == ""
    assert f"{log} was truncated without a copy: " in capsys.readouterr().err
    assert sorted(path.name for path in log.parent.iterdir()) == ["pc-0.log", "pc-0.log.1"]
