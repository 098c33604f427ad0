"""Training of a policy: fp32 parameters and optimizer; rollout groups in, metrics out.

`Learner.learn` is one step of training. In order: filter the rollouts, compute advantages and pack,
split into mini-batches, compute reference logprobs, and take one optimizer step per mini-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch

from peralta_zmq.errors import TrainingError
from peralta_zmq.learning import optimizer as adamw
from peralta_zmq.learning.advantages import AdvantageFunction
from peralta_zmq.learning.distributed import SINGLE, Ranks
from peralta_zmq.learning.filters import Filter, apply_filters
from peralta_zmq.learning.losses import TokenLoss
from peralta_zmq.learning.optimizer_step import Score, ScoreWithEntropy, StepResult, take_step
from peralta_zmq.learning.packing import (
    Batch,
    Oversize,
    PackedSample,
    Temperature,
    make_batches,
    pack_groups,
)
from peralta_zmq.learning.reference_models import PolicyCopy, ReferenceModel, compute_logprobs
from peralta_zmq.learning.step_metrics import Mismatch, describe
from peralta_zmq.rollout import RolloutGroup

MAX_SKIPPED = 3  # the run ends after this number of consecutive steps without finite gradient


class Learner:
    """Trains parameters on rollout groups. `step` counts the steps that `learn` has taken.

    After a step, `skip_reason` is non-empty if it was skipped, `advantages` has the advantages of
    each group's rollouts (empty without signal), and `mismatch` the logprob mismatch by sender.

    `reference` and `teacher` score the same tokens for losses that use them; `score_with_entropy`
    replaces `score` for a loss with an entropy bonus. `share_prompts` is False for a policy that
    cannot compute a shared prefix once. With several `ranks` each makes the same calls with the
    same groups and computes its share of the micro-batches.
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
        reference: PolicyCopy | None = None,
        teacher: ReferenceModel | None = None,
        score_with_entropy: ScoreWithEntropy | None = None,
        filters: Sequence[Filter] = (),
        ranks: Ranks = SINGLE,
    ) -> None:
        self.step = 0
        self.skip_reason = ""
        self.advantages: Sequence[Sequence[float]] = ()
        self.mismatch: dict[str, Mismatch] = {}
        self._learning_rate = learning_rate
        self._num_skipped = self._num_skipped_in_a_row = 0
        self._parameters, self._score = parameters, score
        self._reference, self._teacher = reference, teacher
        self._filters, self._num_iterations, self._ranks = filters, num_iterations, ranks
        self._optim: adamw.Optim = optim
        self._optimizer = adamw.make_optimizer(
            parameters, betas=betas, weight_decay=weight_decay, optim=optim
        )
        self._pack = partial(
            pack_groups, advantage=advantage, max_tokens=max_tokens_per_microbatch,
            oversize=oversize, share_prompts=share_prompts, keep_zero_std=keep_zero_std,
        )  # fmt: skip
        self._make_batches = partial(
            make_batches, max_tokens=max_tokens_per_microbatch, temperature=temperature,
            device=next(iter(parameters.values())).device, padded=not share_prompts, ranks=ranks,
        )  # fmt: skip
        self._take_step = partial(
            take_step, self._optimizer, score=score, loss=loss, max_grad_norm=max_grad_norm,
            score_with_entropy=score_with_entropy, ranks=ranks,
        )  # fmt: skip

    def learn(
        self, groups: Sequence[RolloutGroup], *, learning_rate: float | None = None
    ) -> dict[str, float]:
        """Take step `self.step + 1` on these groups and return its metrics.

        `learning_rate`, if not None, replaces that of the schedule for this step.
        Raises TrainingError if this is the third consecutive step that is skipped.
        """
        self.step += 1
        started = time.monotonic()
        rate = self._learning_rate(self.step) if learning_rate is None else learning_rate
        adamw.set_learning_rate(self._optimizer, rate)
        included, filter_metrics = apply_filters(groups, self._filters)
        packed = self._pack(groups, included=included)
        self.advantages = packed.advantages
        metrics = self._update(packed.samples)
        if self._reference is not None:
            self._reference.sync(self.step)
        return {
            **describe(groups, step=self.step),
            **filter_metrics,
            **metrics,
            "skipped_steps": self._num_skipped,
            "num_truncated": packed.num_truncated,
            "num_dropped": packed.num_dropped,
            "learning_rate": rate,
            "time/forward_backward": time.monotonic() - started,
        }

    def _update(self, samples: Sequence[PackedSample]) -> dict[str, float]:
        """Take one optimizer step per mini-batch; returns the mean of their metrics."""
        # No more mini-batches than groups. A step without samples still has one, empty mini-batch.
        num_groups = samples[-1].group + 1 if samples else 1
        num_updates = min(self._num_iterations, num_groups)
        mini_batches = [self._mini_batch(samples, index) for index in range(num_updates)]
        if self._num_iterations > 1:
            score = partial(compute_logprobs, self._score)
            mini_batches = [_with_logprobs("prox_logprobs", b, score) for b in mini_batches]
        results = [self._take_step(batches) for batches in mini_batches]
        self._count_skipped(results)
        self.mismatch = results[0].mismatch  # the policy has moved in later mini-batches
        names = list(dict.fromkeys(name for result in results for name in result.metrics))
        return {name: fmean(result.metrics.get(name, 0.0) for result in results) for name in names}

    def _mini_batch(self, samples: Sequence[PackedSample], index: int) -> list[Batch]:
        """Micro-batches of every num_iterations-th group, with logprobs of reference models."""
        batches = self._make_batches(
            [s for s in samples if s.group % self._num_iterations == index]
        )
        if self._reference is not None:
            batches = _with_logprobs("ref_logprobs", batches, self._reference)
        if self._teacher is not None:
            batches = _with_logprobs("teacher_logprobs", batches, self._teacher)
        return batches

    def _count_skipped(self, results: Sequence[StepResult]) -> None:
        self.skip_reason = next((r.skip_reason for r in results if r.skip_reason), "")
        self._num_skipped += bool(self.skip_reason)
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if self.skip_reason else 0
        if self._num_skipped_in_a_row >= MAX_SKIPPED:
            raise TrainingError(
                f"steps {self.step - MAX_SKIPPED + 1} to {self.step} had no finite gradient "
                f"({self.skip_reason}) and changed no weights; the same command would fail here "
                "again. Choose another --run.name with a lower train.learning_rate or another "
                "[loss]; or fix the rewards and resume a checkpoint with --checkpoint.resume-step"
            )

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors of a checkpoint, full at any number of ranks; only rank 0 has all of them.

        Paths: model/NAME, OPTIM/KIND/NAME, reference/NAME (of a reference that is synced),
        rng/torch and skipped.
        """
        tensors = {f"model/{name}": tensor for name, tensor in self.weights()}
        for name, kinds in adamw.state_of(self._optimizer, self._parameters).items():
            for kind, tensor in kinds.items():
                tensors[f"{self._optim}/{kind}/{name}"] = self._ranks.gather(tensor)
        if self._reference is not None:
            for name, tensor in self._reference.state().items():
                tensors[f"reference/{name}"] = self._ranks.gather(tensor)
        skipped = torch.tensor([self._num_skipped, self._num_skipped_in_a_row])
        return tensors | {"rng/torch": torch.get_rng_state(), "skipped": skipped}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of each parameter, on rank 0."""
        for name, parameter in self._parameters.items():
            yield name, self._ranks.gather(parameter.detach())

    def restore(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from the `state` of `step`.

        Raises ValueError, with nothing changed, for the state of another model or optimizer.
        """
        self._check_state(tensors)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._ranks.shard(tensors[f"model/{name}"], parameter))
            if self._reference is not None:
                for name, tensor in self._reference.state().items():
                    tensor.copy_(self._ranks.shard(tensors[f"reference/{name}"], tensor))
        optimizer_state: dict[str, dict[str, torch.Tensor]] = {}
        for path, tensor in tensors.items():
            if path.startswith(f"{self._optim}/"):
                _, kind, name = path.split("/", 2)
                part = self._ranks.shard(tensor, self._parameters[name])
                optimizer_state.setdefault(name, {})[kind] = part
        adamw.set_state(self._optimizer, self._parameters, optimizer_state)
        torch.set_rng_state(tensors["rng/torch"])
        if "skipped" in tensors:  # older checkpoints have none
            self._num_skipped, self._num_skipped_in_a_row = tensors["skipped"].tolist()
        self.step = step

    def _check_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = {path.removeprefix("model/") for path in tensors if path.startswith("model/")}
        if different := names ^ self._parameters.keys():
            owner = "the checkpoint" if min(different) in names else "the model"
            raise ValueError(f"only {owner} has the parameter {min(different)}")
        for name, parameter in self._parameters.items():
            shape = tensors[f"model/{name}"].shape
            if shape != parameter.shape:
                raise ValueError(f"{name} has shape {list(shape)}, not {list(parameter.shape)}")
        optims = {path.partition("/")[0] for path in tensors} & set(adamw.OPTIMS)
        if other := optims - {self._optim}:
            raise ValueError(f"its train.optim is {min(other)}, not {self._optim}")


def _with_logprobs(field: str, batches: Sequence[Batch], model: ReferenceModel) -> list[Batch]:
    logprobs = zip(batches, model(batches), strict=True)
    return [replace(batch, **{field: values}) for batch, values in logprobs]
