"""The learning rate as a function of the step. Knows numbers only."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, kind: str, warmup_steps: int, max_steps: int) -> float:
    """Rate of optimizer step `step` (1 .. max_steps).

    Linear warm-up over `warmup_steps`, then constant, linear or cosine decay that would reach 0
    one step after the last.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - 1 - warmup_steps) / max(1, max_steps - warmup_steps)
    if kind == "linear":
        return peak * (1 - progress)
    if kind == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    return peak
