"""Whose logprobs can be trusted: how far each sender's are from the trainer's own.

Knows senders and sums; knows nothing of tensors or models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

WINDOW = 4  # steps with groups of a sender that it is judged by
FEWEST = 2  # before one is judged
MAX_SENDERS = 4096  # remembered; the one unseen for longest goes first


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Of the tokens of one sender in one step: the k3 estimate of KL(sampler, trainer), summed."""

    kl: float
    num_tokens: float

    @property
    def mean(self) -> float:
        """Per token."""
        return self.kl / max(1.0, self.num_tokens)


BySender: TypeAlias = Mapping[str, Mismatch]


class MismatchStatistics:
    """Judges each sender by its last steps; one that was found too far off stays so.

    A worker that computes in other numbers is a little off, and so is one with older weights;
    one whose kernels or weights are wrong is off by orders of magnitude.
    """

    def __init__(self, *, bound: float) -> None:
        self.suspects: dict[str, float] = {}  # sender -> its mean when it was found
        self._bound = bound
        self._steps: dict[str, deque[Mismatch]] = {}

    def note(self, step: BySender) -> None:
        """Take in what a step has shown."""
        for sender, mismatch in step.items():
            seen = self._steps.pop(sender, deque[Mismatch](maxlen=WINDOW))
            seen.append(mismatch)
            self._steps[sender] = seen  # to the end of the order
        while len(self._steps) > MAX_SENDERS:
            del self._steps[next(iter(self._steps))]

    def mean(self, sender: str) -> float:
        """Per token, over the sender's last steps; 0 when it has none."""
        seen = self._steps.get(sender, ())
        return Mismatch(sum(e.kl for e in seen), sum(e.num_tokens for e in seen)).mean

    def newly_suspect(self) -> list[str]:
        """Senders above the bound that were not found before."""
        found = {
            sender: mean
            for sender, seen in self._steps.items()
            if sender not in self.suspects
            and len(seen) >= FEWEST
            and (mean := self.mean(sender)) > self._bound
        }
        self.suspects |= found
        return list(found)


def figures(step: BySender) -> dict[str, float]:
    """Of a step, for the metrics: gen/NAME/mismatch_kl."""
    return {
        f"gen/{sender.rpartition('/')[0]}/mismatch_kl": each.mean for sender, each in step.items()
    }
