"""A worker's log is bounded, and nobody who reads it misses a line for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from peralta_zmq.operate import logs

ROOT = Path(__file__).parents[2]
MOST = 500
KEEPER = f"""
import sys
from peralta_zmq.operate import logs, supervisor
bound = logs.bound
logs.bound = lambda log: bound(log, most={MOST})
sys.exit(supervisor.run(supervisor.Job("pc-0", (sys.executable, "-u", "-c", sys.argv[1]), {{}})))
"""
TALKS = """
import os, time
for first in (0, 100, 200):
    os.write(1, b"".join(b"line %d\\n" % n for n in range(first, first + 100)))
    while os.stat(".lan/pc-0.log").st_size: time.sleep(0.01)  # until it begins anew
print("the end")
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "pc-0.log"


def numbered(first: int, last: int) -> str:
    return "".join(f"line {number}\n" for number in range(first, last))


@pytest.mark.timeout(30)
def test_a_worker_that_talks_for_long_goes_on_in_a_log_that_begins_anew(tmp_path: Path) -> None:
    folder = tmp_path / ".lan"
    folder.mkdir()
    log = folder / "pc-0.log"
    with log.open("ab") as output:
        ended = subprocess.run(
            [sys.executable, "-c", KEEPER, TALKS], stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, log.read_text()
    assert (folder / "pc-0.log.1").read_text() == numbered(200, 300)
    assert log.read_text() == "the end\n"
    assert logs.tail(log, 3) == ["line 298", "line 299", "the end"]


def test_a_log_of_the_permitted_length_stays(log: Path) -> None:
    log.write_text(numbered(0, 10))
    logs.bound(log, most=log.stat().st_size)
    assert log.read_text() == numbered(0, 10)
    logs.bound(log, most=log.stat().st_size - 1)
    assert log.read_text() == ""
    assert log.with_name("pc-0.log.1").read_text() == numbered(0, 10)
    logs.bound(log.with_name("nobody.log"))


def test_a_reader_sees_each_line_once_over_a_beginning_anew(log: Path) -> None:
    log.write_text(numbered(0, 30))
    place = logs.near_end(log, 2)
    seen, place = logs.lines_since(log, place)
    assert seen == ["line 28", "line 29"]
    with log.open("a") as opened:
        opened.write("line 30\nline")  # half a line is not told
    seen, place = logs.lines_since(log, place)
    assert seen == ["line 30"]
    with log.open("a") as opened:
        opened.write(" 31\nline 32\n")
    logs.bound(log, most=100)
    with log.open("a") as opened:
        opened.write("line 33\n")
    seen, place = logs.lines_since(log, place)
    assert seen == ["line 31", "line 32", "line 33"]
    assert logs.lines_since(log, place) == ([], place)
    assert logs.near_end(log, 0) == len("line 33\n")


def test_bytes_that_are_no_text_are_read_all_the_same(log: Path) -> None:
    log.write_bytes(b"50%\r\xff100%\n")
    assert logs.lines_since(log, 0) == (["50%\r\ufffd100%"], 10)


def test_a_log_that_cannot_be_kept_is_bounded_all_the_same_and_says_so(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(numbered(0, 30))
    log.with_name("pc-0.log.1").mkdir()
    logs.bound(log, most=100)
    assert log.read_text() == ""
    assert f"{log} begins anew, and what it held could not be kept: " in capsys.readouterr().err
    assert sorted(each.name for each in log.parent.iterdir()) == ["pc-0.log", "pc-0.log.1"]
