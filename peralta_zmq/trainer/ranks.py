"""A trainer of several processes (ranks): each computes a share of every step.

Rank 0 is the trainer. The other ranks, the followers, only have the model; rank 0 sends them
commands with its settings, the groups of each step, and the tensors of a checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch

from peralta_zmq import build, models, wire
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError, PeraltaError, TrainingError
from peralta_zmq.learning import distributed
from peralta_zmq.learning.distributed import SINGLE, DistributedRanks, Ranks
from peralta_zmq.learning.learner import Learner, StepResult
from peralta_zmq.learning.optimizer import UpdateSettings
from peralta_zmq.models import lora
from peralta_zmq.rollout import RolloutGroup

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun sets them


def local_rank(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """This process's rank on its machine, and the number there; None if it is the only one."""
    if environment.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        _, _, rank, num_ranks = (int(environment[name]) for name in VARIABLES)
    except (KeyError, ValueError):
        values = " ".join(f"{name}={environment.get(name, '')}" for name in VARIABLES)
        raise ConfigError(
            f"the environment has {values}; start several ranks with torchrun, or unset WORLD_SIZE"
        ) from None
    return rank, num_ranks


def is_leader() -> bool:
    return local_rank(os.environ) is None or os.environ["RANK"] == "0"


def join(config: Config) -> tuple[Config, Ranks]:
    """Connect to the other ranks, if any; return rank 0's settings and the ranks.

    A follower keeps its own device and `run.num_workers`. Raises ConfigError or RankError.
    """
    rank_here, num_ranks_here = local_rank(os.environ) or (0, 1)
    # All worker processes of all ranks on this machine share its cores.
    models.use_threads(config.run.num_workers * num_ranks_here)
    if local_rank(os.environ) is None:
        return config, SINGLE
    device = models.choose_device(config.model.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank_here)
    check_supports_ranks(config, device)
    ranks = distributed.join(device)
    if ranks.rank == 0:
        ranks.send_command({"do": "begin"}, [config.model_dump_json().encode()])
        return config, ranks
    leading = Config.model_validate_json(ranks.receive_command()["payloads"][0])
    model = leading.model.model_copy(update={"device": str(device)})
    run = leading.run.model_copy(update={"num_workers": config.run.num_workers})
    return leading.model_copy(update={"model": model, "run": run}), ranks


def check_supports_ranks(config: Config, device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"model.device {device} does not support several ranks; "
            "start without torchrun, or use --model.device cpu"
        )
    if device.type == "cuda" and config.train.optim == "adamw_8bit":
        raise ConfigError(
            "train.optim adamw_8bit does not support several ranks on cuda; "
            "use adamw_bf16, or start without torchrun"
        )


def shutdown(ranks: Ranks) -> None:
    if isinstance(ranks, DistributedRanks):
        ranks.send_command({"do": "end"})
        ranks.close()


class LeadingLearner:
    """The learner of rank 0 with several ranks; forwards each call to the followers.

    Sharded parameters are copied to `model` after each step, for evaluation and publication.
    """

    def __init__(self, learner: Learner, ranks: DistributedRanks, model: models.Model) -> None:
        self._learner = learner
        self._ranks = ranks
        self._parameters = lora.trained_parameters(model)

    @property
    def step(self) -> int:
        return self._learner.step

    @property
    def next_update(self) -> UpdateSettings:
        return self._learner.next_update

    @property
    def seconds(self) -> float:
        return self._learner.seconds

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Add groups to the next step on all ranks; they are computed in `finish_step`."""
        if groups:
            frames = [wire.encode_group(group) for group in groups]
            self._ranks.send_command({"do": "add"}, frames)
            self._learner.add(groups)

    def compute(self) -> bool:
        """False: the ranks compute together, in `finish_step`."""
        return False

    def finish_step(self, *, repeated: UpdateSettings | None = None) -> StepResult:
        """Take the next step on all ranks. Raises as `Learner.finish_step`, or RankError."""
        numbers = None if repeated is None else asdict(repeated)
        self._ranks.send_command({"do": "finish_step", "repeated": numbers})
        result = self._learner.finish_step(repeated=repeated)
        self._gather()
        return result

    def state(self) -> dict[str, torch.Tensor]:
        """As `Learner.state`."""
        if self._ranks.lockstep:  # gathering the shards is a collective operation
            self._ranks.send_command({"do": "state"})
        return self._learner.state()

    def restore(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        tensors = dict(tensors)  # read all of them before the other ranks wait for them
        self._learner.restore(step, tensors)
        specs = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in tensors.items()
        ]
        self._ranks.send_command({"do": "restore", "step": step, "tensors": specs})
        self._ranks.broadcast(tensors.values())
        self._gather()

    @torch.no_grad()
    def _gather(self) -> None:
        """If the weights are sharded, copy the shards of all ranks to rank 0's model."""
        if self._ranks.lockstep:
            for name, tensor in self._learner.weights():
                self._parameters[name].copy_(tensor)


PolicyLearner: TypeAlias = Learner | LeadingLearner


def make_policy_learner(config: Config, model: models.Model, ranks: Ranks) -> PolicyLearner:
    learner = build.make_learner(config, model, ranks)
    return LeadingLearner(learner, ranks, model) if isinstance(ranks, DistributedRanks) else learner


def run_follower(config: Config, ranks: DistributedRanks) -> None:
    """Execute rank 0's commands until "end"; ignores signals. RankError if rank 0 is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("peralta_zmq").setLevel(logging.WARNING)  # rank 0 logs the other messages
    try:
        with build.memory_errors(config, "trainer"):
            model = build.load_policy(config, models.model_folder(config.model.name))
            learner = build.make_learner(config, model, ranks)
            while (command := ranks.receive_command())["do"] != "end":
                _execute(command, learner, ranks, wire.GroupLimits(int(model.config.vocab_size)))
    except TrainingError:
        return  # every rank raises it, and rank 0 reports it
    except PeraltaError as error:
        raise type(error)(f"rank {ranks.rank}: {error}") from None
    ranks.close()


def _execute(
    command: dict[str, Any], learner: Learner, ranks: DistributedRanks, limits: wire.GroupLimits
) -> None:
    """Make the call that rank 0 makes on its own learner, with the same arguments."""
    if command["do"] == "add":
        learner.add([wire.decode_group(frame, limits) for frame in command["payloads"]])
    elif command["do"] == "finish_step":
        numbers = command["repeated"]
        learner.finish_step(repeated=None if numbers is None else UpdateSettings(**numbers))
    elif command["do"] == "restore":
        specs = command["tensors"]
        tensors = {name: torch.empty(shape, dtype=getattr(torch, dt)) for name, dt, shape in specs}
        ranks.broadcast(tensors.values())
        learner.restore(command["step"], tensors)
    elif command["do"] == "state":
        learner.state()
    if ranks.lockstep and command["do"] in ("finish_step", "restore"):
        for _ in learner.weights():  # takes part in rank 0's `_gather`, a collective operation
            pass
