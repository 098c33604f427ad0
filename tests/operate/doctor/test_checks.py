"""Results of checks, and how errors, crashes and hangs are reported."""

from __future__ import annotations

import json
import threading

import pytest

from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.doctor.checks import CRASHED, HANGS, Check, Report, run_check


def crashing_check() -> Check:
    raise ZeroDivisionError("division by zero")


def failing_check() -> Check:
    raise ConfigError("the value is wrong; use 3")


def test_crash_is_a_failed_check_with_its_location() -> None:
    check = run_check(crashing_check)
    assert check and not check.ok and check.remedy == CRASHED
    assert "ZeroDivisionError: division by zero" in check.detail
    assert "test_checks.py" in check.detail


def test_report_continues_after_failed_checks(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    assert not report.run("one", crashing_check)
    assert not report.run("two", failing_check)
    assert report.run("three", lambda: None)
    assert report.run("four", lambda: Check(True, "fine", "could be finer"))
    assert report.close(as_json=True) == 1
    *lines, summary, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["FAIL", "one"], ["FAIL", "two"], ["note", "four"]]  # fmt: skip
    assert lines[1].endswith("the value is wrong. Use 3")
    assert summary == "2 of 3 checks failed"
    assert json.loads(last)["checks"][1] == {
        "name": "two", "ok": False, "detail": "the value is wrong", "remedy": "use 3"}  # fmt: skip


def test_report_of_passed_checks_escapes_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report()
    report.add("reach", Check(True, "run a\x1b[2J"))
    assert report.close(as_json=False) == 0
    assert capsys.readouterr().out == "ok    reach     run a\\x1b[2J\nall checks passed\n"


def test_check_that_hangs_is_abandoned() -> None:
    never = threading.Event()
    report = Report(mount_seconds=0.05)
    assert not report.run_with_timeout("weights", lambda: Check(never.wait(), ""))
    assert report.checks == [("weights", Check(False, "no answer within 0.05 s", HANGS))]
    never.set()
