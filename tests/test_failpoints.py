from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from peralta_zmq import failpoints

PROGRAM = """
from peralta_zmq.failpoints import failpoint
for number in range(4):
    failpoint("test.place")
    print(number, flush=True)
"""


def run_with(plan: str) -> tuple[int, int]:
    """Exit code and the number of completed iterations."""
    environment = {**os.environ, failpoints.VARIABLE: plan}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    return done.returncode, len(done.stdout.split())


def test_failpoint_kills_at_the_third_pass() -> None:
    assert run_with("test.place:3") == (-signal.SIGKILL, 2)


@pytest.mark.parametrize("plan", ["", "test.other:1"])
def test_other_failpoints_have_no_effect(plan: str) -> None:
    assert run_with(plan) == (0, 4)


def test_several_failpoints_are_parsed() -> None:
    assert failpoints.parse("journal.synced:2,send") == {"journal.synced": 2, "send": 1}


@pytest.mark.parametrize("plan", ["send:0", "send:x"])
def test_invalid_count_is_refused(plan: str) -> None:
    with pytest.raises(ValueError):
        failpoints.parse(plan)
