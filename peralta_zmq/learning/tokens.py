"""What a loss sees, and what it gives back. Knows tensors; knows nothing of models or groups.

A loss is `def name(tokens, *, option=...) -> (scalar, metrics)`: the scalar is already divided by
the totals of the whole optimizer step, and so is each metric, so that micro-batches, their order
and the ranks never change a gradient and the step only adds up what they give.

`prox_logprobs` are always there: with `train.num_iterations` above 1 the trainer computes them
before the first of the step's updates; with 1 they are the policy's own, without gradient.
`ref_logprobs` and `teacher_logprobs` are there when the learner was given a frozen model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """The generated tokens of one micro-batch, flat: index n speaks about token n. All [N]."""

    logprobs: Tensor  # float32, the policy's (pi), carries gradient
    old_logprobs: Tensor  # float32, the sampler's (mu)
    advantages: Tensor  # float32, the rollout's on each of its tokens
    mask: Tensor  # float32, 1 = counts, 0 = an enforced filter took it out
    sequence: Tensor  # int64, which rollout of this micro-batch
    num_sequences: int  # rollouts in this micro-batch
    step_tokens: float  # sum of mask over the WHOLE optimizer step, all ranks; at least 1
    step_sequences: float  # rollouts with an unmasked token in the whole step; at least 1
    prox_logprobs: Tensor | None = None  # by the trainer before the mini-batches of a step
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    entropy: Tensor | None = None  # of the policy at each token, carries gradient


TokenLoss: TypeAlias = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]
