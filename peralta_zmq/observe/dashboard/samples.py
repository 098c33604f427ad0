"""One group as the page shows it: what was asked, and all answers side by side.

Knows a row of samples.jsonl; what is in it was written by a model and is only ever text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

from peralta_zmq.observe.metrics import number

MAX_ROLLOUTS, MAX_TEXT = 64, 6000  # sent of one group; characters of one text


def sample(count: int, row: Mapping[str, object]) -> dict[str, Any]:
    """The group with `count`, its number among all; strange fields are left out."""
    texts = [str(each) for each in _list(row, "texts")][:MAX_ROLLOUTS]
    rewards = _numbers(row, "rewards")
    advantages = _numbers(row, "advantages")
    prompt = _prompt(row, texts)
    known = [each for each in rewards if each is not None]
    return {
        "number": count,
        "step": number(row, "step", 0.0),
        "task": str(row.get("task", ""))[:200],
        "generator": str(row.get("generator", ""))[:200],
        "policy_step": number(row, "policy_step", 0.0),
        "mean": sum(known) / len(known) if known else None,
        "prompt": _cut(prompt),
        "rollouts": [
            {
                "text": _cut(each.removeprefix(prompt)),
                "reward": rewards[index] if index < len(rewards) else None,
                "advantage": advantages[index] if index < len(advantages) else None,
            }
            for index, each in enumerate(texts)
        ],
    }


def _prompt(row: Mapping[str, object], texts: Sequence[str]) -> str:
    """What was asked; where the row does not say, the whole lines that all texts begin with."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    first, last = min(texts, default=""), max(texts, default="")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))))
    return first[: first.rfind("\n", 0, shared) + 1]


def _cut(text: str) -> str:
    more = len(text) - MAX_TEXT
    return text if more <= 0 else f"{text[:MAX_TEXT]} ... ({more} more characters)"


def _list(row: Mapping[str, object], key: str) -> list[object]:
    value = row.get(key)
    return cast("list[object]", value) if isinstance(value, list) else []


def _numbers(row: Mapping[str, object], key: str) -> list[float | None]:
    return [
        float(each) if isinstance(each, (int, float)) and math.isfinite(each) else None
        for each in _list(row, key)
    ]
