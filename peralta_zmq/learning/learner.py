"""Training of the policy on groups of rollouts.

    learner.add(groups)             # as often as groups arrive
    while learner.compute():        # optional: a micro-batch that the groups fill
        ...                         # other work of the caller
    result = learner.finish_step()

The micro-batches depend only on the groups and their order, not on the time at which they arrive: a
restarted trainer that repeats the step computes the same bits.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from peralta_zmq.errors import TrainingError
from peralta_zmq.learning import step_metrics
from peralta_zmq.learning.advantages import (
    Advantage,
    AdvantageFunction,
    Filter,
    TermWeights,
    advantages_of,
    apply_filters,
    mean_advantages,
)
from peralta_zmq.learning.demonstrations import Demonstrations
from peralta_zmq.learning.distributed import SINGLE, Ranks, gather_tensor, shard_tensor
from peralta_zmq.learning.losses import TokenLoss
from peralta_zmq.learning.master_weights import MasterWeights
from peralta_zmq.learning.optimizer import (
    OPTIMS,
    Optim,
    UpdateSettings,
    make_optimizer,
    set_state,
    state_of,
)
from peralta_zmq.learning.packing import (
    MicroBatch,
    PackedSample,
    Packing,
    full_micro_batch,
    make_micro_batches,
    pack_groups,
    to_micro_batch,
)
from peralta_zmq.learning.reference_models import (
    ComputeLogprobs,
    ComputeLogprobsAndEntropy,
    PolicyCopy,
    ReferenceModel,
    reference_logprobs,
    with_logprobs,
)
from peralta_zmq.learning.selection import TokenSelection
from peralta_zmq.learning.step_metrics import Mismatch
from peralta_zmq.learning.update import ComputedBatch, Divisor, add_gradient, update_parameters
from peralta_zmq.rollout import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Functions, models and numbers of the training, named as in the config."""

    update: Callable[[int], UpdateSettings]  # numbers of the updates of a step
    compute_logprobs: ComputeLogprobs  # the policy's forward pass
    compute_with_entropy: ComputeLogprobsAndEntropy | None = None
    """Replaces it for a loss with an entropy bonus."""
    masters: MasterWeights | None = None
    reference: PolicyCopy | None = None
    teacher: ReferenceModel | None = None
    selection: TokenSelection | None = None
    demonstrations: Demonstrations | None = None
    ranks: Ranks = SINGLE
    loss: TokenLoss
    advantage: AdvantageFunction
    term_weights: TermWeights | None = None  # see `advantages_of`
    filters: Sequence[Filter] = ()
    optim: Optim = "adamw"
    packing: Packing
    num_minibatches: int = 1  # of a step, which has at least one group for each
    num_iterations: int = 1  # updates on each mini-batch
    keep_zero_std: bool = False  # train also on groups in which all rewards are equal
    divisor: Divisor | None = None
    """Total over the step by which the loss divides; None if a step needs all of its groups before
    its first micro-batch."""
    max_skipped: int = 3  # consecutive skipped steps that end the run


@dataclass(frozen=True, slots=True)
class StepResult:
    groups: Sequence[RolloutGroup]
    metrics: dict[str, float]
    skip_reason: str = ""  # empty if the step was not skipped
    mismatch: dict[str, Mismatch] = field(default_factory=dict[str, Mismatch])  # by sender
    excluded: dict[str, str] = field(default_factory=dict[str, str])  # group -> the reason
    advantages: Sequence[Sequence[float]] = ()
    """By group and rollout, mean over tokens; empty for a group without signal."""


@dataclass(slots=True)
class StepInProgress:
    """The groups added to a step; they are packed into samples, of which some are computed."""

    groups: list[RolloutGroup] = field(default_factory=list[RolloutGroup])
    advantages: list[list[Advantage]] = field(default_factory=list[list[Advantage]])  # by group
    samples: list[PackedSample] = field(default_factory=list[PackedSample])  # in no micro-batch yet
    full: deque[list[PackedSample]] = field(default_factory=deque[list[PackedSample]])
    """Full micro-batches that are not computed yet."""
    num_sampled: int = 0  # groups that have samples, computed or not
    metrics: Counter[str] = field(default_factory=Counter[str])  # of `pack_groups`
    num_detected: Counter[str] = field(default_factory=Counter[str])  # of `apply_filters`
    computed: list[ComputedBatch] = field(default_factory=list[ComputedBatch])
    random_state: Tensor | None = None  # torch's, before the first computed micro-batch
    seconds: float = 0.0  # spent on the step
    overlapped: float = 0.0  # part of `seconds` before the newest groups were added


class Learner:
    """Trains parameters on groups of rollouts. `step` counts the steps taken.

    Every rank must make the same calls with the same groups.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], settings: LearnerSettings
    ) -> None:
        self.step = 0
        self._num_skipped = 0
        self._num_skipped_in_a_row = 0
        self._parameters = parameters
        self._settings = settings
        self._current = StepInProgress()  # of step `self.step + 1`
        self._device = next(iter(parameters.values())).device
        self._optimizer = make_optimizer(parameters, optim=settings.optim)
        if (masters := settings.masters) is not None:
            masters.attach(self._optimizer)

    @property
    def next_update(self) -> UpdateSettings:
        """Numbers of the updates of step `self.step + 1`, according to the settings."""
        return self._settings.update(self.step + 1)

    @property
    def seconds(self) -> float:
        """Seconds spent on step `self.step + 1` so far."""
        return self._current.seconds

    def learn(
        self, groups: Sequence[RolloutGroup], *, repeated: UpdateSettings | None = None
    ) -> StepResult:
        """Take a whole step: `add`, then `finish_step`."""
        self.add(groups)
        return self.finish_step(repeated=repeated)

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Add groups to step `self.step + 1`; pack full micro-batches if there is a divisor."""
        if not groups:
            return
        started = time.monotonic()
        current = self._current
        current.overlapped = current.seconds
        current.groups += groups
        if self._settings.divisor is not None:
            for group in groups:
                self._pack([group])
                while indices := full_micro_batch(current.samples, self._settings.packing):
                    current.full.append([current.samples[index] for index in indices])
                    remaining = set(range(len(current.samples))).difference(indices)
                    current.samples = [current.samples[index] for index in sorted(remaining)]
        current.seconds += time.monotonic() - started

    def compute(self) -> bool:
        """Add the gradient of the oldest full micro-batch; False if there is none."""
        settings = self._settings
        current = self._current
        if not current.full:
            return False
        started = time.monotonic()
        if current.random_state is None:
            current.random_state = torch.get_rng_state()
        batch = to_micro_batch(current.full.popleft(), settings.packing, self._device)
        (batch,) = self._with_reference_logprobs([batch])
        computed = add_gradient(
            batch,
            loss=settings.loss,
            compute_logprobs=settings.compute_logprobs,
            compute_with_entropy=settings.compute_with_entropy,
        )
        current.computed.append(computed)
        current.seconds += time.monotonic() - started
        return True

    def finish_step(self, *, repeated: UpdateSettings | None = None) -> StepResult:
        """Take step `self.step + 1` on the added groups.

        `repeated` has the numbers of a step that a restarted trainer repeats. Raises TrainingError
        at the `max_skipped`-th consecutive skipped step, but not in a repeated one: every restart
        would fail.
        """
        while self.compute():
            pass
        started = time.monotonic()
        numbers = self.next_update if repeated is None else repeated
        self.step += 1
        for group in self._optimizer.param_groups:
            group.update(lr=numbers.learning_rate, weight_decay=numbers.weight_decay)
        settings = self._settings
        current = self._current
        self._pack(current.groups[len(current.advantages) :])
        self._current = StepInProgress()
        num_rollouts = sum(len(group.rollouts) for group in current.groups)
        mini_batches, selection_metrics = self._mini_batches(current.samples)
        sft = None
        if settings.demonstrations is not None:
            sft = settings.demonstrations.term(self.step, device=self._device, ranks=settings.ranks)
        updates = [
            update_parameters(
                self._optimizer,
                batches,
                loss=settings.loss,
                compute_logprobs=settings.compute_logprobs,
                compute_with_entropy=settings.compute_with_entropy,
                computed=current.computed,
                divisor=settings.divisor or "tokens",
                sft=sft,
                max_grad_norm=numbers.max_grad_norm,
                ranks=settings.ranks,
            )
            for batches in mini_batches * settings.num_iterations
        ]
        skip_reason = next((update.skip_reason for update in updates if update.skip_reason), "")
        self._count_skipped(skip_reason, is_repeated=repeated is not None)
        if settings.reference is not None:
            settings.reference.sync(self.step)
        mismatch = updates[0].mismatch  # later updates start from weights that no generator has
        excluded = {name: why for update in updates for name, why in update.excluded.items()}
        metrics = {
            **step_metrics.describe_groups(current.groups, step=self.step),
            **{name: count / num_rollouts for name, count in current.num_detected.items()},
            **step_metrics.mean_metrics([update.metrics for update in updates]),
            **selection_metrics,
            "skipped_steps": self._num_skipped,
            "num_excluded": len(excluded),
            **current.metrics,
            "learning_rate": numbers.learning_rate,
            "time/forward_backward": current.seconds + time.monotonic() - started,
            "time/overlapped": current.overlapped,
            **({} if settings.masters is None else settings.masters.movement(settings.ranks)),
            **step_metrics.mismatch_metrics(mismatch),
        }
        means = [*map(mean_advantages, current.groups, current.advantages)]
        return StepResult(current.groups, metrics, skip_reason, mismatch, excluded, means)

    def _pack(self, groups: Sequence[RolloutGroup]) -> None:
        if not groups:
            return
        settings = self._settings
        current = self._current
        included, num_detected = apply_filters(groups, settings.filters)
        advantages = advantages_of(
            groups,
            settings.advantage,
            term_weights=settings.term_weights,
            keep_zero_std=settings.keep_zero_std,
        )
        samples, metrics = pack_groups(
            groups, advantages, settings.packing, included=included, first_group=current.num_sampled
        )
        current.advantages += advantages
        current.samples += samples
        current.num_sampled = samples[-1].group + 1 if samples else current.num_sampled
        current.metrics.update(metrics)
        current.num_detected.update(num_detected)

    def _mini_batches(
        self, samples: Sequence[PackedSample]
    ) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """Micro-batches of each mini-batch of a step, and metrics of the selection of tokens.

        They have the logprobs of all models before the first update that a later one needs.
        """
        settings = self._settings
        num_groups = samples[-1].group + 1 if samples else 1
        mini_batches = [
            make_micro_batches(
                [sample for sample in samples if sample.group % settings.num_minibatches == index],
                settings.packing,
                device=self._device,
                ranks=settings.ranks,
            )
            for index in range(min(settings.num_minibatches, num_groups))
        ]
        batches = list(chain(*mini_batches))
        metrics = dict[str, float]()
        batches = self._with_reference_logprobs(batches)
        if settings.selection is not None:
            batches, metrics = settings.selection(batches, settings.ranks)
        elif settings.num_minibatches > 1 or settings.num_iterations > 1:
            policy = partial(reference_logprobs, settings.compute_logprobs)
            batches = with_logprobs("prox_logprobs", batches, policy)
        remaining = iter(batches)
        return [list(islice(remaining, len(each))) for each in mini_batches], metrics

    def _with_reference_logprobs(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        if self._settings.reference is not None:
            batches = with_logprobs("ref_logprobs", batches, self._settings.reference)
        if self._settings.teacher is not None:
            batches = with_logprobs("teacher_logprobs", batches, self._settings.teacher)
        return batches

    def _count_skipped(self, skip_reason: str, *, is_repeated: bool) -> None:
        self._num_skipped += bool(skip_reason)
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if skip_reason else 0
        max_skipped = self._settings.max_skipped
        if self._num_skipped_in_a_row >= max_skipped and not is_repeated:
            raise TrainingError(
                f"steps {self.step - max_skipped + 1} to {self.step} had no finite gradient "
                f"({skip_reason}) and were skipped. The same command continues with new "
                "groups; if it ends here again, lower train.learning_rate, or go back with "
                "--run.fork and --run.from-step, and with other rewards or another [loss]"
            )

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint by path, unsharded; only rank 0 gets all tensors.

        The random state is that at the end of the newest step. Paths: model/NAME, remainder/NAME
        (`MasterWeights`), OPTIM/KIND/NAME (`state_of`), reference/NAME (with sync_steps),
        rng/torch, skipped, demonstrations.
        """
        gather = partial(gather_tensor, rank=self._settings.ranks.rank)
        tensors = {path: gather(tensor) for path, tensor in self._live_tensors().items()}
        for name, kinds in state_of(self._optimizer, self._parameters).items():
            for kind, tensor in kinds.items():
                tensors[f"{self._settings.optim}/{kind}/{name}"] = gather(tensor)
        skipped = torch.tensor([self._num_skipped, self._num_skipped_in_a_row])
        sft = {} if self._settings.demonstrations is None else self._settings.demonstrations.state()
        random_state = self._current.random_state
        if random_state is None:
            random_state = torch.get_rng_state()
        return tensors | sft | {"rng/torch": random_state, "skipped": skipped}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and unsharded tensor of each parameter, on rank 0."""
        for name, parameter in self._parameters.items():
            yield name, gather_tensor(parameter.detach(), rank=self._settings.ranks.rank)

    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the `state` of `step`; discards the groups that `add` has added.

        Raises ValueError, with nothing changed, for the state of another model or optimizer.
        """
        self._check_state(tensors)
        self._current = StepInProgress()
        self._optimizer.zero_grad()
        for path, tensor in self._live_tensors().items():
            tensor.copy_(shard_tensor(tensors[path], tensor))
        optimizer_state: dict[str, dict[str, Tensor]] = {}
        for path in tensors:
            if path.startswith(f"{self._settings.optim}/"):
                _, kind, name = path.split("/", 2)
                shard = shard_tensor(tensors[path], self._parameters[name])
                optimizer_state.setdefault(name, {})[kind] = shard
        set_state(self._optimizer, self._parameters, optimizer_state)
        torch.set_rng_state(tensors["rng/torch"])
        self._num_skipped, self._num_skipped_in_a_row = tensors["skipped"].tolist()
        self.step = step

    def _live_tensors(self) -> dict[str, Tensor]:
        reference = {} if self._settings.reference is None else self._settings.reference.state()
        remainders = {} if self._settings.masters is None else self._settings.masters.remainders
        return {
            **{f"model/{name}": tensor.detach() for name, tensor in self._parameters.items()},
            **{f"remainder/{name}": tensor for name, tensor in remainders.items()},
            **{f"reference/{name}": tensor for name, tensor in reference.items()},
        }

    def _check_state(self, tensors: Mapping[str, Tensor]) -> None:
        if self._settings.demonstrations is not None:
            self._settings.demonstrations.check_state(tensors)
        names = {path.removeprefix("model/") for path in tensors if path.startswith("model/")}
        if different := names ^ self._parameters.keys():
            owner = "the checkpoint" if min(different) in names else "the model"
            raise ValueError(f"only {owner} has the parameter {min(different)}")
        specs: Any = getattr(tensors, "specs", tensors)  # those of a file without reading it
        for name, parameter in self._parameters.items():
            shape = specs[f"model/{name}"].shape
            if shape != parameter.shape:
                raise ValueError(f"{name} has shape {list(shape)}, not {list(parameter.shape)}")
        live = self._live_tensors().keys()
        saved = {path for path in tensors if path.startswith("remainder/")}
        if saved != {path for path in live if path.startswith("remainder/")}:
            raise ValueError("its train.master_noise or weights.dtype is another")
        if missing := live - tensors.keys():
            raise ValueError(f"it has no {min(missing)}, because train.ref_sync_steps was not set")
        optims = {path.partition("/")[0] for path in tensors} & set(OPTIMS)
        if other := optims - {self._settings.optim}:
            raise ValueError(f"its train.optim is {min(other)}, not {self._settings.optim}")
