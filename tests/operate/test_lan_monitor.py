"""Status table and merged logs of the workers, without ssh."""

from __future__ import annotations

import threading

import pytest

from peralta_zmq.config.hosts import Host, Hosts
from peralta_zmq.operate import lan, lan_monitor

HOST = Host(name="pc", role="trainer", count=1)


def test_control_characters_of_a_host_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    hostile, escaped = "a\x1b[2Jb", r"a\x1b[2Jb"
    row: lan_monitor.Row = {"name": "pc-0", "host": "pc", "state": "crashed", "since": None,
                            "restarts": 0, "tail": [hostile, hostile]}  # fmt: skip
    lan_monitor.print_status([row])
    assert capsys.readouterr().out.count(escaped) == 2
    lan_monitor.LogReader(HOST, [], 0, threading.Event()).print_line(hostile)
    lan.SshLauncher(Hosts(host=(HOST,))).report("pc", "doctor", hostile)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{escaped}\n", f"pc: doctor: {escaped}\n")
