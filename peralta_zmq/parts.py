"""From the settings to the parts that more than one loop needs. Knows the config and the leaves."""

from __future__ import annotations

import functools
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from peralta_zmq import durable, objective, policy
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.learner import Learner
from peralta_zmq.learning.reference import AnotherModel, Frozen, Reference
from peralta_zmq.learning.schedules import learning_rate
from peralta_zmq.policy import adapters
from peralta_zmq.policy.score import Scorer, training_dtype
from peralta_zmq.rollout import RolloutGroup, Sampling, TemperatureSchedule
from peralta_zmq.stores import tensors as sets
from peralta_zmq.stores.version import WEIGHTS, Version

logger = logging.getLogger(__name__)
IDENTITY = "RUN.json"
TEMPERATURES = ("temperature", "temp_scheduler", "temp_start", "temp_end")


def load_policy(config: Config, folder: Path) -> policy.Model:
    """The model to be trained, fp32, with adapters when [lora] asks for them."""
    device = policy.choose_device(config.model.device)
    model = policy.load_model(folder, device=device, dtype=torch.float32)
    lora = config.lora
    if lora.rank is not None:
        adapters.add_adapters(
            model, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout,
            target_modules=lora.target_modules, seed=config.run.seed,
        )  # fmt: skip
        trained = adapters.trained_parameters(model).values()
        logger.info("lora rank=%d trained=%d", lora.rank, sum(each.numel() for each in trained))
    return model


def published_beside(
    config: Config, folder: Path, model: policy.Model
) -> tuple[dict[str, bytes], dict[str, str]]:
    """The files that go with the weights that are published, and what the manifest says of them.

    A whole model has its config and tokenizer with it; an adapter names the base it is for.
    """
    if not adapters.has_adapters(model):
        return policy.companion_files(folder), {}
    name = config.model.name
    described = adapters.config_file(model, base=name if Path(name) != folder else str(folder))
    about = {"adapts": adapters.digest_of(folder), "adapts_name": name}
    return {adapters.CONFIG_FILE: described}, about


def base_of(config: Config, version: Version) -> Path:
    """The folder of the model that a published adapter is for. Raises ConfigError for another."""
    folder = policy.model_folder(config.model.name)
    if adapters.digest_of(folder) != version.says("adapts"):
        raise ConfigError(
            f"version {version.number} is an adapter for {version.says('adapts_name')} "
            f"({version.says('adapts')}), and model.name {config.model.name} is another model; "
            "give the one that the trainer has, with the same files"
        )
    return folder


def export_adapted(config: Config, folder: Path, model_folder: Path, model: policy.Model) -> Path:
    """Write the adapter for peft and the whole model for transformers; returns the latter's folder.

    In `folder`, over what an earlier end of the run left. Raises OSError.
    """
    dtype = policy.DTYPES[config.weights.dtype]
    adapter = sets.copy_set(adapters.published_weights(model), dtype)
    companions, about = published_beside(config, model_folder, model)
    _write_weights(folder / "adapter", adapters.WEIGHTS_FILE, adapter, companions, about)
    return write_merged(
        folder / "merged", adapters.base_weights(model), adapter,
        companions=policy.companion_files(model_folder), dtype=dtype,
    )  # fmt: skip


def write_merged(
    target: Path,
    base: Mapping[str, torch.Tensor],
    adapter: Mapping[str, torch.Tensor],
    *,
    companions: Mapping[str, bytes],
    dtype: torch.dtype,
) -> Path:
    """A folder for `from_pretrained` with the adapter merged in. Raises OSError."""
    whole = sets.copy_set(adapters.merged(base, adapter), dtype)
    _write_weights(target, WEIGHTS, whole, companions, {})
    return target


def _write_weights(
    target: Path,
    name: str,
    weights: Mapping[str, torch.Tensor],
    companions: Mapping[str, bytes],
    about: Mapping[str, str],
) -> None:
    durable.remove_folder(target)
    durable.write_folder(target, {name: sets.file_of(weights, {}), **companions}, about)


def learner_of(config: Config, model: policy.Model) -> Learner:
    """The learner that the [train], [loss], [advantage] and [filter] sections describe.

    The model is still the base here: a loss that asks for a reference gets a copy of it.
    """
    train = config.train
    loss, score = objective.loss_of(config), scorer_of(config, model)
    reference, teacher = frozen_of(config, model, score)
    return Learner(
        adapters.trained_parameters(model),
        score=score,
        share_prompts=score.packs,
        temperature=temperatures_of(config) or config.sampling.temperature or 1.0,
        loss=loss,
        advantage=objective.advantage_of(config),
        filters=objective.filters_of(config, vocab_size=int(model.config.vocab_size)),
        reference=reference,
        teacher=teacher,
        score_with_entropy=score.with_entropy if config.loss.entropy_coef else None,
        learning_rate=schedule_of(config),
        betas=(train.adam_beta1, train.adam_beta2),
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        max_tokens_per_microbatch=train.max_tokens_per_microbatch,
        num_iterations=train.num_iterations,
        oversize=train.oversize,
    )


def frozen_of(
    config: Config, model: policy.Model, score: Scorer
) -> tuple[Reference | None, Frozen | None]:
    """The reference and the teacher that the loss asks, while the model is still the base.

    A teacher without a folder of its own is the base. Raises ConfigError for settings that nobody
    asks for, and for a teacher with another vocabulary.
    """
    train, asked = config.train, objective.wants(config)
    parameters = adapters.trained_parameters(model)
    reference = teacher = None
    if "reference" in asked:
        reference = Reference(
            parameters, score,
            sync_steps=train.ref_sync_steps, mixup_alpha=train.ref_mixup_alpha,
        )  # fmt: skip
    elif train.ref_sync_steps:
        raise ConfigError(
            f"train.ref_sync_steps {train.ref_sync_steps} needs a loss with a reference, and "
            f"loss.name {config.loss.name} asks none; leave it out, or use grpo_kl with loss.beta"
        )
    if "teacher" in asked:
        teacher = _teacher_of(config, model) or Reference(parameters, score)
    elif config.model.teacher:
        raise ConfigError(
            f"model.teacher {config.model.teacher} is asked by nobody; leave it out, or use "
            "loss.name importance with loss.teacher_tau above 0"
        )
    return reference, teacher


def _teacher_of(config: Config, model: policy.Model) -> AnotherModel | None:
    if config.model.teacher is None:
        return None
    folder = policy.model_folder(config.model.teacher)
    _check_vocabulary(config, folder)
    teacher = policy.load_model(folder, device=model.device, dtype=torch.float32)
    if teacher.config.vocab_size < model.config.vocab_size:
        raise ConfigError(
            f"model.teacher {config.model.teacher} has logits for {teacher.config.vocab_size} "
            f"tokens, and model.name {config.model.name} for {model.config.vocab_size}; "
            "choose a teacher that has them all"
        )
    dtype, _ = training_dtype(teacher, config.train.dtype)
    return AnotherModel(Scorer(teacher.requires_grad_(False), dtype=dtype))


def _check_vocabulary(config: Config, teacher_folder: Path) -> None:
    """Raise ConfigError unless every token is the same number for teacher and policy."""
    teacher = policy.vocabulary_of(teacher_folder)
    own = policy.vocabulary_of(policy.model_folder(config.model.name))
    if differing := sorted(own.items() ^ teacher.items()):
        token = differing[0][0]
        raise ConfigError(
            f"model.teacher {config.model.teacher} has another vocabulary: {token!r} is token "
            f"{teacher.get(token)} there and {own.get(token)} in model.name {config.model.name}; "
            "choose a teacher with the same tokenizer"
        )


def scorer_of(config: Config, model: policy.Model) -> Scorer:
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
    if config.train.token_batch_size is None:
        return sum(len(group.rollouts) for group in groups) >= config.train.batch_size
    tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    return tokens >= config.train.token_batch_size


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
    """The id of the run in `folder`, or a new one."""
    return _told_in(folder, "run_id") or f"{name}-{uuid.uuid4().hex[:8]}"


def weights_of(folder: Path) -> str | None:
    """Where the run in `folder` has published, if it has."""
    return _told_in(folder, "weights")


def write_identity(folder: Path, *, run_id: str, weights: str | None) -> None:
    """Note which run lies in `folder` and where it publishes. Raises OSError."""
    text = json.dumps({"run_id": run_id, "weights": weights}) + "\n"
    durable.replace_file(folder / IDENTITY, text.encode())


def _told_in(folder: Path, field: str) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads((folder / IDENTITY).read_text("utf-8"))[field]
        return None if told is None else str(told)
    return None
