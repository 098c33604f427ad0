"""Early stop: end a run whose metrics stay beyond a limit of [early_stop]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from peralta_zmq.config.training_sections import EarlyStopSection
from peralta_zmq.errors import TrainingError

# Setting -> metric. A max_ setting is exceeded above its value, a min_ setting below it.
METRICS = {"min_entropy": "entropy", "max_reward": "reward"}


@dataclass(slots=True)
class EarlyStop:
    """Counts steps in a row beyond each limit; sets `reason` after `patience` of them."""

    settings: EarlyStopSection
    patience: int = 10
    reason: str = ""
    _num_steps: dict[str, int] = field(default_factory=dict[str, int])  # by setting

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a new step. A metric that is absent or NaN is within its limits."""
        for setting, metric in METRICS.items():
            limit = getattr(self.settings, setting)
            value = metrics.get(metric, math.nan)
            is_max = setting.startswith("max_")
            exceeds = limit is not None and (value > limit if is_max else value < limit)
            self._num_steps[setting] = self._num_steps.get(setting, 0) + 1 if exceeds else 0
            if self._num_steps[setting] >= self.patience and not self.reason:
                side = "above" if is_max else "below"
                self.reason = (
                    f"stopped early after step {step}: {metric} {value:.4g} is {side} "
                    f"early_stop.{setting} {limit:g}, in {self.patience} steps in a row. A "
                    "checkpoint is saved. The same command continues, and stops again after "
                    f"{self.patience} such steps; change the limit, or go back with --run.fork and "
                    "--run.from-step"
                )

    def raise_if_reached(self) -> None:
        if self.reason:
            raise TrainingError(self.reason)
