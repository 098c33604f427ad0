"""A named place kills the process at the given pass, and at no other."""

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


def passes(plan: str) -> tuple[int, int]:
    """Exit code and completed passes."""
    environment = {**os.environ, failpoints.VARIABLE: plan}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    return done.returncode, len(done.stdout.split())


def test_place_kills_at_its_third_pass() -> None:
    assert passes("test.place:3") == (-signal.SIGKILL, 2)


@pytest.mark.parametrize("plan", ["", "test.other:1"])
def test_other_places_are_passed(plan: str) -> None:
    assert passes(plan) == (0, 4)


def test_several_places_are_read() -> None:
    assert failpoints.parse("journal.synced:2,send") == {"journal.synced": 2, "send": 1}


@pytest.mark.parametrize("plan", ["send:0", "send:x"])
def test_a_count_below_one_is_refused(plan: str) -> None:
    with pytest.raises(ValueError):
        failpoints.parse(plan)
