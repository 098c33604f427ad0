"""From the settings to the models that a loss asks beside the policy: reference and teacher.

Knows the config and the leaves.
"""

from __future__ import annotations

from pathlib import Path

import torch

from peralta_zmq import build_objective, models
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.reference_models import Frozen, Reference, TeacherModel
from peralta_zmq.models import lora
from peralta_zmq.models.scoring import Scorer, training_dtype


def frozen_of(
    config: Config, model: models.Model, score: Scorer
) -> tuple[Reference | None, Frozen | None]:
    """The reference and the teacher that the loss asks, while the model is still the base.

    A teacher without a folder of its own is the base. Raises ConfigError for settings that nobody
    asks for, and for a teacher with another vocabulary.
    """
    train, asked = config.train, build_objective.wants(config)
    parameters = lora.trained_parameters(model)
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


def _teacher_of(config: Config, model: models.Model) -> TeacherModel | None:
    if config.model.teacher is None:
        return None
    folder = models.model_folder(config.model.teacher)
    _check_vocabulary(config, folder)
    teacher = models.load_model(folder, device=model.device, dtype=torch.float32)
    if teacher.config.vocab_size < model.config.vocab_size:
        raise ConfigError(
            f"model.teacher {config.model.teacher} has logits for {teacher.config.vocab_size} "
            f"tokens, and model.name {config.model.name} for {model.config.vocab_size}; "
            "choose a teacher that has them all"
        )
    dtype, _ = training_dtype(teacher, config.train.dtype)
    return TeacherModel(Scorer(teacher.requires_grad_(False), dtype=dtype))


def _check_vocabulary(config: Config, teacher_folder: Path) -> None:
    """Raise ConfigError unless every token is the same number for teacher and policy."""
    teacher = models.vocabulary_of(teacher_folder)
    own = models.vocabulary_of(models.model_folder(config.model.name))
    if differing := sorted(own.items() ^ teacher.items()):
        token = differing[0][0]
        raise ConfigError(
            f"model.teacher {config.model.teacher} has another vocabulary: {token!r} is token "
            f"{teacher.get(token)} there and {own.get(token)} in model.name {config.model.name}; "
            "choose a teacher with the same tokenizer"
        )
