"""A finding is one line; a look that fails is a finding and never ends the visit."""

from __future__ import annotations

import json
import threading

import pytest

from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.doctor.check import CRASHED, HANGS, Check, Report, attempt


def crashes() -> Check:
    raise ZeroDivisionError("nought")


def refuses() -> Check:
    raise ConfigError("the value is wrong; use 3")


def test_error_of_ours_says_what_and_what_to_do() -> None:
    assert attempt("one", refuses) == Check("one", False, "the value is wrong", "use 3")


def test_crash_is_a_finding_that_names_the_line() -> None:
    found = attempt("one", crashes)
    assert found and not found.ok and found.remedy == CRASHED
    assert "ZeroDivisionError: nought" in found.detail and "test_check.py" in found.detail


def test_crash_does_not_stop_what_comes_after(capsys: pytest.CaptureFixture[str]) -> None:
    book = Report()
    assert not book.look("one", crashes)
    assert not book.look("two", refuses)
    assert book.look("three", lambda: None)
    assert book.look("four", lambda: Check("four", True, "fine", "could be finer"))
    assert book.close(as_json=True) == 1
    *lines, said, last = capsys.readouterr().out.splitlines()
    assert [each.split()[:2] for each in lines] == [["FAIL", "one"], ["FAIL", "two"],
                                                    ["note", "four"]]  # fmt: skip
    assert lines[1].endswith("the value is wrong. Use 3")
    assert said == "2 of 3 checks failed"
    told = json.loads(last)["checks"]
    assert told[1] == {"name": "two", "ok": False, "detail": "the value is wrong",
                       "remedy": "use 3"}  # fmt: skip


def test_all_well(capsys: pytest.CaptureFixture[str]) -> None:
    book = Report()
    book.write(Check("one", True, "fine"))
    assert book.close(as_json=False) == 0
    assert capsys.readouterr().out == "ok    one       fine\nall is well\n"


def test_look_that_hangs_is_left_behind() -> None:
    never = threading.Event()
    book = Report()
    assert not book.look("weights", lambda: Check(str(never.wait()), True, ""), seconds=0.05)
    assert book.checks == [Check("weights", False, "no answer within 0.05 s", HANGS)]
    never.set()
