"""A trainer of several processes: rank 0 leads, the others compute their share of each step.

Rank 0 is the trainer: it has the sockets, the journal and the weights folder. The others know the
model and what rank 0 tells them: its settings, the groups of a step, the tensors of a checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from peralta_zmq import build, models, wire
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError, PeraltaError, TrainingError
from peralta_zmq.learning.distributed import SINGLE, SingleRank
from peralta_zmq.learning.learner import Learner
from peralta_zmq.learning.step_metrics import Mismatch
from peralta_zmq.models import lora
from peralta_zmq.rollout import RolloutGroup

if TYPE_CHECKING:
    from peralta_zmq.learning.distributed import Command, DistributedRanks

TrainerRanks: TypeAlias = "SingleRank | DistributedRanks"
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # as torchrun tells each process


class RankPlacement(NamedTuple):
    """Which of a trainer's processes this is."""

    rank: int
    num_ranks: int
    local_rank: int  # among those of this machine
    num_local: int


def place_of(environment: Mapping[str, str]) -> RankPlacement:
    """Where torchrun has put this process; alone when it was not torchrun that started it.

    Raises ConfigError when the environment tells of several processes, but not of all it must.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return RankPlacement(0, 1, 0, 1)
    try:
        return RankPlacement(*(int(environment[name]) for name in PLACE))
    except (KeyError, ValueError):
        told = " ".join(f"{name}={environment.get(name, '')}" for name in PLACE)
        raise ConfigError(
            f"the environment says {told}; start several ranks with torchrun, or unset WORLD_SIZE"
        ) from None


def enlist(config: Config) -> tuple[Config, TrainerRanks]:
    """Meet the other ranks, if there are any; returns rank 0's settings and the ranks.

    A rank's own are only the device and the number of workers that share its machine. Raises
    ConfigError for a device of which ranks cannot share the work, RankError when none comes.
    """
    place = place_of(os.environ)
    models.use_threads(config.train.num_workers * place.num_local)
    if place.num_ranks == 1:
        return config, SINGLE
    from peralta_zmq.learning import distributed

    device = models.choose_device(config.model.device)
    if device.type == "cuda":
        device = torch.device("cuda", place.local_rank)
    check_shared(config, device)
    ranks = distributed.join(device)
    if ranks.rank == 0:
        ranks.send_command({"do": "begin"}, [config.model_dump_json().encode()])
        return config, ranks
    return _settings_of(ranks.receive_command(), config, device), ranks


def check_shared(config: Config, device: torch.device) -> None:
    """Raise ConfigError for a device, or a setting on it, that several ranks cannot have."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"model.device {device} takes one rank; "
            "start without torchrun, or use --model.device cpu"
        )
    if device.type == "cuda" and config.train.optim == "adamw_8bit":
        raise ConfigError(
            "train.optim adamw_8bit cannot be shared among ranks on cuda; "
            "use adamw_bf16, or start without torchrun"
        )


def _settings_of(order: Command, own: Config, device: torch.device) -> Config:
    theirs = Config.model_validate_json(order.payloads[0])
    model = theirs.model.model_copy(update={"device": str(device)})
    train = theirs.train.model_copy(update={"num_workers": own.train.num_workers})
    return theirs.model_copy(update={"model": model, "train": train})


def dismiss(ranks: TrainerRanks) -> None:
    """By rank 0: all work is done, every rank ends."""
    if not isinstance(ranks, SingleRank):
        ranks.send_command({"do": "end"})
        ranks.close()


def led(learner: Learner, ranks: TrainerRanks, model: models.Model) -> Learner | Leader:
    """The learner, so that the other ranks do what it does.

    Where ranks share the parameters among them, `model` has the whole weights after each step.
    """
    return learner if isinstance(ranks, SingleRank) else Leader(learner, ranks, model)


class Leader:
    """A learner on rank 0, with its face: what is asked of it is asked of every rank."""

    def __init__(self, learner: Learner, ranks: DistributedRanks, model: models.Model) -> None:
        self._learner, self._ranks = learner, ranks
        self._whole = lora.trained_parameters(model)

    @property
    def step(self) -> int:
        """Steps taken."""
        return self._learner.step

    @property
    def skip_reason(self) -> str:
        """Why the last step was skipped, if it was."""
        return self._learner.skip_reason

    @property
    def advantages(self) -> Sequence[Sequence[float]]:
        """As `Learner.advantages`."""
        return self._learner.advantages

    @property
    def mismatch(self) -> dict[str, Mismatch]:
        """As `Learner.mismatch`, of the tokens of all ranks."""
        return self._learner.mismatch

    @property
    def learning_rate(self) -> Callable[[int], float]:
        """The learning rate as a function of the step."""
        return self._learner.learning_rate

    @learning_rate.setter
    def learning_rate(self, schedule: Callable[[int], float]) -> None:
        self._learner.learning_rate = schedule

    def learn(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Take the next step with all ranks. Raises as `Learner.learn`, and RankError."""
        rate = self.learning_rate(self.step + 1)
        frames = [wire.encode_group(group) for group in groups]
        self._ranks.send_command({"do": "learn", "rate": rate}, frames)
        metrics = self._learner.learn(groups)
        self._gather()
        return metrics

    def state(self) -> dict[str, torch.Tensor]:
        """As `Learner.state`: whole tensors, which any number of ranks can restore."""
        if self._ranks.lockstep:
            self._ranks.send_command({"do": "state"})
        return self._learner.state()

    def restore(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let all ranks go on from what `state` gave. Raises ValueError, with nothing changed."""
        self._learner.restore(step, tensors)
        told = [(name, str(each.dtype)[6:], list(each.shape)) for name, each in tensors.items()]
        self._ranks.send_command({"do": "restore", "step": step, "tensors": told})
        self._ranks.broadcast(tensors.values())
        self._gather()

    @torch.no_grad()
    def _gather(self) -> None:
        if self._ranks.lockstep:
            for name, tensor in self._learner.weights():
                self._whole[name].copy_(tensor)


def follow(config: Config, ranks: DistributedRanks) -> None:
    """Do as rank 0 says until it is done; it alone is asked to stop.

    Raises RankError when rank 0 is gone, or what a part of one's own raises on this rank only.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("peralta_zmq").setLevel(logging.WARNING)  # rank 0 says the rest
    try:
        model = build.load_policy(config, models.model_folder(config.model.name))
        learner = build.make_learner(config, model, ranks)
        while (order := ranks.receive_command()).fields["do"] != "end":
            _obey(order, learner, ranks, vocab_size=int(model.config.vocab_size))
    except TrainingError:
        return  # it is the same on all ranks, and rank 0 says it
    except PeraltaError as error:
        raise type(error)(f"rank {ranks.rank}: {error}") from None
    ranks.close()


def _obey(order: Command, learner: Learner, ranks: DistributedRanks, *, vocab_size: int) -> None:
    words = order.fields
    if words["do"] == "learn":
        learner.learning_rate = partial(_constant, words["rate"])
        learner.learn([wire.decode_group(each, vocab_size=vocab_size) for each in order.payloads])
    elif words["do"] == "restore":
        tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype))
                   for name, dtype, shape in words["tensors"]}  # fmt: skip
        ranks.broadcast(tensors.values())
        learner.restore(words["step"], tensors)
    else:
        learner.state()
        return
    if ranks.lockstep:  # rank 0 gathers them
        for _ in learner.weights():
            pass


def _constant(rate: float, step: int) -> float:
    return rate
