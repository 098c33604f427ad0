"""What a person reads of each step: its metrics, one whole group, a word when nothing is learned.

Knows rows and the run's books; knows nothing of sockets or models.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from peralta_zmq import models
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.rollout import RolloutGroup

NO_SIGNAL_STEPS, NO_SIGNAL_SECONDS = 20, 20.0  # without signal, whichever first, before we say so


class StepRecorder:
    """Writes steps; says once per session when none has had a signal for long."""

    def __init__(self, books: RunLog, tokenizer: models.Tokenizer) -> None:
        self._books, self._tokenizer = books, tokenizer
        self._signal_at, self._signal_step, self._said = time.monotonic(), 0, False

    def record(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        row: Mapping[str, float],
        *,
        advantages: Sequence[Sequence[float]],
    ) -> None:
        """Write the step, unless an earlier session has. `advantages` are those of each group."""
        full = {"step": step, "time": time.time(), **row}
        if self._books.step(full, self._sample_of(step, groups[0], advantages[0])):
            self._warn_without_signal(step, groups, row["frac_reward_zero_std"])

    def _sample_of(
        self, step: int, group: RolloutGroup, advantages: Sequence[float]
    ) -> dict[str, object]:
        first = group.rollouts[0]
        return {
            "step": step,
            "problem": group.problem_id,
            "task": group.task,
            "generator": group.generator_id,
            "policy_step": group.policy_step,
            "rewards": group.rewards,
            "advantages": list(advantages),
            "prompt": models.text_of(
                self._tokenizer, first.token_ids[: int(first.loss_mask.argmax())]
            ),
            "texts": [models.text_of(self._tokenizer, r.token_ids) for r in group.rollouts],
        }

    def _warn_without_signal(self, step: int, groups: Sequence[RolloutGroup], share: float) -> None:
        """Say once when no step has had a signal for 20 steps or 20 seconds."""
        if share < 1.0:
            self._signal_at, self._signal_step = time.monotonic(), step
            return
        steps = step - self._signal_step
        long = steps > 1 and time.monotonic() - self._signal_at > NO_SIGNAL_SECONDS
        if self._said or not (steps >= NO_SIGNAL_STEPS or long):
            return
        self._said = True
        firsts = [group.rollouts[0] for group in groups[:3]]
        samples = "; ".join(
            f"{models.text_of(self._tokenizer, r.token_ids[r.loss_mask])!r} -> {r.reward:g}"
            for r in firsts
        )
        self._books.note(
            f"no learning signal: 100% of groups have equal rewards for {steps} steps; "
            f"check the reward and the task's difficulty. Samples: {samples}"
        )
