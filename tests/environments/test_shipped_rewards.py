"""Shipped reward functions: formulas."""

from __future__ import annotations

from typing import Any

import pytest

from peralta_zmq import registry
from peralta_zmq.environments import shipped_rewards


def completions(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_exact_match_ignores_whitespace_at_both_ends() -> None:
    texts = completions(" Yes\n", "yes", "Yes.", "")
    match = shipped_rewards.exact_match
    assert match(texts, ["Yes"] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert match(texts, ["Yes"] * 4, ignore_case=True) == [1.0, 1.0, 0.0, 0.0]


def test_regex_matches_the_whole_text_over_lines() -> None:
    texts = completions("<a>1\n2</a>", "<a>1</a> more", "1")
    assert shipped_rewards.regex(texts, pattern=r"<a>.*</a>") == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("length", "penalty"), [
    (0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (130, -1),
])  # fmt: skip
def test_soft_overlong_is_linear_before_the_limit(length: int, penalty: float) -> None:
    """Equation 13 of the DAPO paper with L_max = 100 and L_cache = 20."""
    options: dict[str, Any] = {"max_completion_length": 100}
    for cache in ({}, {"soft_punish_cache": 20}):
        (reward,) = shipped_rewards.soft_overlong([[5] * length], **options, **cache)
        assert reward == pytest.approx(penalty)


def test_only_functions_with_limited_time_are_bounded() -> None:
    names = registry.TABLES["reward"]
    bounded = {
        name
        for name in names
        if getattr(registry.resolve("reward", name), "REWARD_IS_BOUNDED", False)
    }
    assert bounded == {"exact_match", "soft_overlong"}
