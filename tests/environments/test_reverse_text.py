"""The reward of reverse_text is the similarity to the answer."""

from __future__ import annotations

import time

import pytest

from peralta_zmq.environments import reverse_text
from peralta_zmq.rollout import Problem

PROBLEM = Problem("p", "reverse_text", (), "dcba")


@pytest.mark.parametrize(("text", "reward"), [
    ("dcba", 1.0),
    (" dcba\n", 1.0),
    ("dcb", 6 / 7),  # 2 * 3 characters of 4 + 3
    ("dxba", 6 / 8),  # d, ba: 2 * 3 of 8
    ("xyz", 0.0),
    ("", 0.0),
])  # fmt: skip
def test_reward_is_the_matching_ratio(text: str, reward: float) -> None:
    assert reverse_text.reward(PROBLEM, text) == pytest.approx(reward)


def test_long_text_earns_zero_quickly() -> None:
    started = time.monotonic()
    assert reverse_text.reward(PROBLEM, "dcba" * 10**6) == 0.0
    assert time.monotonic() - started < 10
