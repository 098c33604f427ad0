"""Shipped reward functions, with TRL's signature: see reward_functions.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

# The text of each completion, or its messages.
Completions: TypeAlias = "Sequence[str | Sequence[dict[str, str]]]"


def exact_match(
    completions: Completions, answer: Sequence[str], *, ignore_case: bool = False, **columns: Any
) -> list[float]:
    """1 for a completion that equals the answer, apart from whitespace at both ends; else 0."""

    def normalized(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    pairs = zip(map(last_text, completions), answer, strict=True)
    return [float(normalized(text) == normalized(str(target))) for text, target in pairs]


def regex(completions: Completions, *, pattern: str, **columns: Any) -> list[float]:
    """1 for a completion that matches `pattern` as a whole, else 0; a dot matches line breaks."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text) is not None) for text in map(last_text, completions)]


def soft_overlong(
    completion_ids: Sequence[Sequence[int]],
    *,
    max_completion_length: int,
    soft_punish_cache: int | None = None,
    **columns: Any,
) -> list[float]:
    """Penalty for long completions, from 0 to -1.

    Linear in the length over the last `soft_punish_cache` tokens (default: a fifth) before
    `max_completion_length`: equation 13 of Yu et al. 2025, "DAPO: an open-source LLM reinforcement
    learning system at scale".
    """
    cache = soft_punish_cache or max(1, max_completion_length // 5)
    start = max_completion_length - cache
    return [-min(1.0, max(0.0, (len(token_ids) - start) / cache)) for token_ids in completion_ids]


def last_text(completion: str | Sequence[dict[str, str]]) -> str:
    """The text of a completion; with several turns, that of the last one."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


for _function in (exact_match, soft_overlong):
    _function.REWARD_IS_BOUNDED = True  # type: ignore[attr-defined]
