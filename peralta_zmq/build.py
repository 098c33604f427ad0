"""From the settings to the parts that more than one loop needs. Knows the config and the leaves."""

from __future__ import annotations

import functools
import json
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

from peralta_zmq import atomic_files, build_objective, build_reference_models, models
from peralta_zmq.config import Config
from peralta_zmq.errors import JournalError
from peralta_zmq.learning.learner import Learner
from peralta_zmq.learning.lr_schedule import learning_rate
from peralta_zmq.learning.ranks import ALONE, Ranks
from peralta_zmq.models import lora
from peralta_zmq.models.scoring import Scorer, training_dtype
from peralta_zmq.rollout import RolloutGroup, Sampling, TemperatureSchedule

logger = logging.getLogger(__name__)
IDENTITY = "RUN.json"
TEMPERATURES = ("temperature", "temp_scheduler", "temp_start", "temp_end")


def learner_of(config: Config, model: models.Model, ranks: Ranks = ALONE) -> Learner:
    """The learner that the [train], [loss], [advantage] and [filter] sections describe.

    The model is still the base here: a loss that asks for a reference gets a copy of it. Where
    ranks share the parameters among them, the model itself is not what is trained.
    """
    train = config.train
    trained = ranks.prepared(model)
    loss, score = build_objective.loss_of(config), scorer_of(config, trained)
    reference, teacher = build_reference_models.frozen_of(config, trained, score)
    return Learner(
        lora.trained_parameters(trained),
        score=score,
        ranks=ranks,
        share_prompts=score.packs,
        keep_zero_std=train.keep_zero_std,
        temperature=temperatures_of(config) or config.sampling.temperature or 1.0,
        loss=loss,
        advantage=build_objective.advantage_of(config),
        filters=build_objective.filters_of(config, vocab_size=int(model.config.vocab_size)),
        reference=reference,
        teacher=teacher,
        score_with_entropy=score.with_entropy if config.loss.entropy_coef else None,
        learning_rate=schedule_of(config),
        betas=(train.adam_beta1, train.adam_beta2),
        weight_decay=train.weight_decay,
        optim=train.optim,
        max_grad_norm=train.max_grad_norm,
        max_tokens_per_microbatch=train.max_tokens_per_microbatch,
        num_iterations=train.num_iterations,
        oversize=train.oversize,
    )


def scorer_of(config: Config, model: models.Model) -> Scorer:
    """How the trainer computes logprobs, with a line of log for each choice made for it."""
    train = config.train
    dtype, reason = training_dtype(model, train.dtype)
    score = Scorer(model, dtype=dtype, gradient_checkpointing=train.gradient_checkpointing)
    logger.info("training dtype=%s (%s)", str(dtype).removeprefix("torch."), reason)
    if score.note:
        logger.warning("%s", score.note)
    return score


def schedule_of(config: Config) -> functools.partial[float]:
    """The learning rate as a function of the step."""
    train = config.train
    return functools.partial(
        learning_rate,
        peak=train.learning_rate,
        kind=train.lr_scheduler_type,
        warmup_steps=train.warmup_steps,
        max_steps=train.max_steps,
    )


def sampling_of(config: Config, *, seed: int) -> Sampling:
    """How this run draws tokens."""
    chosen = config.sampling
    return Sampling(
        **chosen.model_dump(exclude={"num_generations", "stop", *TEMPERATURES}),
        temperature=chosen.temperature or 1.0,
        schedule=temperatures_of(config),
        stop=() if chosen.stop is None else (chosen.stop,),
        seed=seed,
    )


def eval_sampling_of(config: Config, *, seed: int) -> Sampling:
    """How held-out examples are answered: greedily, or as in training when more than once."""
    if config.eval.rollouts_per_example > 1:
        return sampling_of(config, seed=seed)
    length = config.sampling.max_completion_length
    return Sampling(temperature=0.0, max_completion_length=length)


def is_full(config: Config, groups: Sequence[RolloutGroup]) -> bool:
    """Whether the groups are enough for an optimizer step."""
    return sum(size_of(config, each) for each in groups) >= step_size(config)


def step_size(config: Config) -> int:
    """Rollouts, or tokens where `train.token_batch_size` says so, that make an optimizer step."""
    return config.train.token_batch_size or config.train.batch_size


def size_of(config: Config, group: RolloutGroup) -> int:
    """The group's own, likewise."""
    if config.train.token_batch_size is None:
        return len(group.rollouts)
    return sum(len(rollout.token_ids) for rollout in group.rollouts)


def temperatures_of(config: Config) -> TemperatureSchedule | None:
    """The temperature as a function of the policy step; None when it is constant."""
    chosen = config.sampling
    if chosen.temp_scheduler is None:
        return None
    assert chosen.temp_start is not None and chosen.temp_end is not None
    return TemperatureSchedule(
        chosen.temp_scheduler, chosen.temp_start, chosen.temp_end, config.train.max_steps
    )


def run_id_of(folder: Path, name: str) -> str:
    """The id of the run in `folder`, or a new one. Raises JournalError when it cannot be read."""
    return _told_in(folder, "run_id") or f"{name}-{uuid.uuid4().hex[:8]}"


def weights_of(folder: Path) -> str | None:
    """Where the run in `folder` has published, if it has."""
    return _told_in(folder, "weights")


def write_identity(folder: Path, *, run_id: str, weights: str | None) -> None:
    """Note which run lies in `folder` and where it publishes. Raises OSError."""
    text = json.dumps({"run_id": run_id, "weights": weights}) + "\n"
    atomic_files.replace_file(folder / IDENTITY, text.encode())


def _told_in(folder: Path, field: str) -> str | None:
    file = folder / IDENTITY
    try:
        told = json.loads(file.read_text("utf-8"))[field]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JournalError(
            f"{file} cannot be read ({error}); put a copy back: the run_id in it is that of "
            "manifest.json in each checkpoint"
        ) from None
    return None if told is None else str(told)
