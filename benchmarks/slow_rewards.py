"""Reward functions of the bench `scoring`, which reward workers import: without torch."""

from __future__ import annotations

import time

from peralta_zmq.rollout import Problem

SLEEP_SECONDS = 0.2
CPU_SECONDS = 0.05


def sleeps(problem: Problem, text: str) -> float:
    """Wait, as for another machine."""
    time.sleep(SLEEP_SECONDS)
    return 1.0


def computes(problem: Problem, text: str) -> float:
    """Use CPU time, as a test of a program does."""
    end = time.process_time() + CPU_SECONDS
    while time.process_time() < end:
        pass
    return 1.0
