"""The policy being trained: fp32 masters, optimizer, schedule; groups in, metrics out.

Knows parameters by name and a function that scores tokens; knows nothing of models or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from peralta_zmq.errors import TrainingError
from peralta_zmq.learning import optimizer as adamw
from peralta_zmq.learning.advantages import AdvantageFunction
from peralta_zmq.learning.filters import Filter, apply_filters
from peralta_zmq.learning.group_metrics import describe
from peralta_zmq.learning.logprob_mismatch import Mismatch
from peralta_zmq.learning.optimizer_step import (
    Score,
    ScoreWithEntropy,
    Taken,
    logprobs_of,
    take_step,
)
from peralta_zmq.learning.packing import (
    Batch,
    Oversize,
    PackedGroups,
    Temperature,
    cut,
    make_batches,
)
from peralta_zmq.learning.ranks import ALONE, Ranks
from peralta_zmq.learning.reference_models import Frozen, Reference
from peralta_zmq.learning.tokens import TokenLoss
from peralta_zmq.rollout import RolloutGroup

MAX_SKIPPED = 3  # steps in a row without a finite gradient


class Learner:
    """`learn` takes one step; `step` counts them, `problem` says why the last was skipped,
    `mismatch` how far each sender's logprobs were from ours in it.

    `reference` and `teacher` are frozen models that score the same tokens, for losses that ask;
    `score_with_entropy` is the policy itself, for a loss that wants its entropy too.
    `share_prompts` is off for a policy that cannot compute a prompt once for all siblings.
    Of several `ranks` each makes the same calls with the same groups and takes its share of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        score: Score,
        loss: TokenLoss,
        advantage: AdvantageFunction,
        learning_rate: Callable[[int], float],
        betas: tuple[float, float],
        weight_decay: float,
        optim: adamw.Optim = "adamw",
        max_grad_norm: float,
        max_tokens_per_microbatch: int,
        temperature: Temperature = 1.0,
        num_iterations: int = 1,
        oversize: Oversize = "truncate",
        share_prompts: bool = True,
        keep_zero_std: bool = False,
        reference: Reference | None = None,
        teacher: Frozen | None = None,
        score_with_entropy: ScoreWithEntropy | None = None,
        filters: Sequence[Filter] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        self.step = 0
        self.problem = ""
        self.advantages: Sequence[Sequence[float]] = ()  # of the newest step, as Cut has them
        self.mismatch: dict[str, Mismatch] = {}  # by sender, of the last step
        self._skipped = self._skipped_in_a_row = 0  # steps
        self._parameters = parameters
        self._score, self._loss, self._advantage = score, loss, advantage
        self._reference, self._teacher = reference, teacher
        self._score_with_entropy, self._filters = score_with_entropy, filters
        self.learning_rate = learning_rate
        self._temperature, self._num_iterations = temperature, num_iterations
        self._max_grad_norm, self._max_tokens = max_grad_norm, max_tokens_per_microbatch
        self._oversize: Oversize = oversize
        self._share_prompts, self._keep_zero_std = share_prompts, keep_zero_std
        self._ranks = ranks
        self._optim: adamw.Optim = optim
        self._optimizer = adamw.make_optimizer(
            parameters, betas=betas, weight_decay=weight_decay, optim=optim
        )

    def learn(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Take step `self.step + 1` on these groups; returns the step's metrics.

        Raises TrainingError when this step is the third in a row that had to be skipped.
        """
        self.step += 1
        started = time.monotonic()
        rate = self.learning_rate(self.step)
        adamw.set_learning_rate(self._optimizer, rate)
        stays, caught = apply_filters(groups, self._filters)
        pieces = cut(
            groups, self._advantage, stays=stays,
            max_tokens=self._max_tokens, oversize=self._oversize,
            share_prompts=self._share_prompts, keep_zero_std=self._keep_zero_std,
        )  # fmt: skip
        self.advantages = pieces.advantages
        metrics = self._update(pieces)
        if self._reference is not None:
            self._reference.follow(self.step)
        return {
            **describe(groups, step=self.step),
            **caught,
            **metrics,
            "skipped_steps": self._skipped,
            "num_truncated": pieces.num_truncated,
            "num_dropped": pieces.num_dropped,
            "learning_rate": rate,
            "time/forward_backward": time.monotonic() - started,
        }

    def _update(self, pieces: PackedGroups) -> dict[str, float]:
        """One update of the optimizer for each mini-batch of the step."""
        # Fewer groups than mini-batches: each update has one. Without any, it is one of nothing.
        count = self._num_iterations
        num_groups = pieces.pieces[-1].group + 1 if pieces.pieces else 1
        dealt = [self._batches(pieces, number) for number in range(min(count, num_groups))]
        if count > 1:
            dealt = [[self._with_prox(batch) for batch in batches] for batches in dealt]
        taken = [
            take_step(
                self._optimizer, batches,
                score=self._score, loss=self._loss, max_grad_norm=self._max_grad_norm,
                score_with_entropy=self._score_with_entropy, ranks=self._ranks,
            )
            for batches in dealt
        ]  # fmt: skip
        self._judge(taken)
        self.mismatch = taken[0].mismatch  # later mini-batches meet a policy that has moved
        names = list(dict.fromkeys(name for each in taken for name in each.metrics))
        return {name: fmean(each.metrics.get(name, 0.0) for each in taken) for name in names}

    def _batches(self, pieces: PackedGroups, number: int) -> list[Batch]:
        """The micro-batches of a mini-batch, with what frozen models think of their tokens."""
        batches = make_batches(
            [each for each in pieces.pieces if each.group % self._num_iterations == number],
            max_tokens=self._max_tokens, temperature=self._temperature,
            device=next(iter(self._parameters.values())).device,
            padded=not self._share_prompts, ranks=self._ranks,
        )  # fmt: skip
        if self._reference is not None:
            with self._reference.at_work() as score:
                batches = [replace(b, ref_logprobs=logprobs_of(score, b)) for b in batches]
        if self._teacher is not None:
            with self._teacher.at_work() as score:
                batches = [replace(b, teacher_logprobs=logprobs_of(score, b)) for b in batches]
        return batches

    def _with_prox(self, batch: Batch) -> Batch:
        return replace(batch, prox_logprobs=logprobs_of(self._score, batch))

    def _judge(self, taken: Sequence[Taken]) -> None:
        self.problem = next((each.problem for each in taken if each.problem), "")
        self._skipped += bool(self.problem)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.problem else 0
        if self._skipped_in_a_row >= MAX_SKIPPED:
            raise TrainingError(
                f"steps {self.step - MAX_SKIPPED + 1} to {self.step} had no finite gradient "
                f"({self.problem}); the weights and every checkpoint are as before them, and the "
                "same command ends here again. Choose another --run.name with a lower "
                "train.learning_rate or another [loss]; or mend the rewards and go back to a "
                "checkpoint with --checkpoint.resume-step"
            )

    def state(self) -> dict[str, torch.Tensor]:
        """Masters, optimizer, RNG, counts: model/NAME, OPTIM/KIND/NAME, rng/torch, skipped; and
        reference/NAME of a reference that follows the policy.

        Every tensor is whole, at any number of ranks; rank 0 has them.
        """
        tensors = {f"model/{name}": tensor for name, tensor in self.weights()}
        for name, kinds in adamw.state_of(self._optimizer, self._parameters).items():
            for kind, tensor in kinds.items():
                tensors[f"{self._optim}/{kind}/{name}"] = self._ranks.collected(tensor)
        if self._reference is not None:
            for path, tensor in self._reference.state().items():
                tensors[path] = self._ranks.collected(tensor)
        skipped = torch.tensor([self._skipped, self._skipped_in_a_row])
        return tensors | {"rng/torch": torch.get_rng_state(), "skipped": skipped}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter by name, whole, for rank 0."""
        for name, parameter in self._parameters.items():
            yield name, self._ranks.collected(parameter.detach())

    def restore(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` gave at `step`.

        Raises ValueError, with nothing changed, for the state of another model or optimizer.
        """
        masters = {path[6:]: each for path, each in tensors.items() if path.startswith("model/")}
        if masters.keys() != self._parameters.keys():
            strange = min(masters.keys() ^ self._parameters.keys())
            raise ValueError(f"{strange} is in one of the two only")
        for name, parameter in self._parameters.items():
            if masters[name].shape != parameter.shape:
                shapes = f"{list(masters[name].shape)}, not {list(parameter.shape)}"
                raise ValueError(f"{name} has shape {shapes}")
        kept = {path.partition("/")[0] for path in tensors} & set(adamw.OPTIMS)
        if strange := kept - {self._optim}:
            raise ValueError(f"its train.optim is {min(strange)}, not {self._optim}")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._ranks.own_part(masters[name], parameter))
        if self._reference is not None:
            self._reference.restore(
                {path: self._ranks.own_part(tensors[path], like)
                 for path, like in self._reference.state().items()}
            )  # fmt: skip
        kinds: dict[str, dict[str, torch.Tensor]] = {}
        for path, tensor in tensors.items():
            if path.startswith(f"{self._optim}/"):
                _, kind, name = path.split("/", 2)
                own = self._ranks.own_part(tensor, self._parameters[name])
                kinds.setdefault(name, {})[kind] = own
        adamw.set_state(self._optimizer, self._parameters, kinds)
        torch.set_rng_state(tensors["rng/torch"])
        if (skipped := tensors.get("skipped")) is not None:  # not in older checkpoints
            self._skipped, self._skipped_in_a_row = (int(each) for each in skipped)
        self.step = step
