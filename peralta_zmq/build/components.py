"""Learner, loss and reference models of a run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from peralta_zmq import models, registry
from peralta_zmq.build.environments import make_demonstrations
from peralta_zmq.config import Config
from peralta_zmq.config.objective_sections import AdvantageSection, LossSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.learning import losses
from peralta_zmq.learning.advantages import (
    AdvantageFunction,
    Filter,
    TermWeights,
    step_wide_setting,
)
from peralta_zmq.learning.distributed import SINGLE, Ranks
from peralta_zmq.learning.learner import Learner, LearnerSettings
from peralta_zmq.learning.losses import TokenLoss
from peralta_zmq.learning.master_weights import MakeMasters, MasterWeights
from peralta_zmq.learning.optimizer import UpdateSettings, learning_rate
from peralta_zmq.learning.packing import Packing
from peralta_zmq.learning.reference_models import PolicyCopy, ReferenceModel, reference_logprobs
from peralta_zmq.learning.selection import TokenSelection
from peralta_zmq.learning.update import Divisor
from peralta_zmq.learning.user_functions import FunctionKind, checked_function
from peralta_zmq.models import frozen_base, lora
from peralta_zmq.models.rotary import check_length
from peralta_zmq.models.rounding import grid_noise, off_grid
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.named_losses import LOSSES
from peralta_zmq.signatures import Signature

logger = logging.getLogger(__name__)
# Settings of [loss] and [advantage] that are no options of the function.
NO_OPTIONS = {
    *("name", "kwargs", "entropy_coef", "sft_file", "sft_weight", "multi_objective_aggregation")
}


# Learner.


def make_learner(config: Config, model: models.Model, ranks: Ranks = SINGLE) -> Learner:
    """The learner for the sections [train], [loss], [advantage] and [filter].

    `model` must have the base weights: reference model and teacher may be copies of them. `ranks`
    are the processes of a distributed trainer, over which the model is sharded.
    """
    train = config.train
    trained = ranks.prepare(model)
    parameters = lora.trained_parameters(trained)
    dtype = models.DTYPES[config.weights.dtype]
    if config.lora.rank is None:
        round_buffers(trained, dtype)
    scorer = make_scorer(config, trained)
    reference, teacher = make_reference_models(config, trained, scorer)
    settings = LearnerSettings(
        update=functools.partial(update_settings, config),
        compute_logprobs=scorer,
        compute_with_entropy=scorer.with_entropy if config.loss.entropy_coef else None,
        masters=MasterWeights(parameters, dtype, make_masters=first_masters(config)),
        reference=reference,
        teacher=teacher,
        selection=make_selection(config, scorer),
        demonstrations=make_demonstrations(config, model, scorer),
        ranks=ranks,
        loss=make_loss(config),
        advantage=make_advantage(config),
        term_weights=make_term_weights(config),
        filters=make_filters(config, vocab_size=int(model.config.vocab_size)),
        optim=train.optim,
        packing=Packing(
            max_tokens=train.max_tokens_per_microbatch,
            share_prompts=scorer.packs,
            temperatures={
                env.label: config.sampling_of(env).temperature for env in config.environments
            },
        ),
        num_minibatches=train.num_minibatches,
        num_iterations=train.num_iterations,
        keep_zero_std=train.keep_zero_std,
        divisor=early_divisor(config, num_ranks=ranks.world_size),
    )
    return Learner(parameters, settings)


def first_masters(config: Config) -> MakeMasters | None:
    """The first masters of published weights, which have noise; None without noise.

    Adapters need none: their first values are random numbers in fp32 and zeros, and updates of
    zeros are never small.
    """
    if not config.train.master_noise or config.lora.rank is not None:
        return None
    dtype = models.DTYPES[config.weights.dtype]

    def make_masters(name: str, weights: torch.Tensor) -> torch.Tensor:
        return off_grid(weights, grid_noise(weights, dtype, seed=f"{config.run.seed}/{name}"))

    return make_masters


def round_buffers(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round published buffers, such as biases of routers, to the values that generators get."""
    buffers = dict(model.named_buffers())
    for name in buffers.keys() & model.state_dict().keys():
        if buffers[name].is_floating_point():
            buffers[name].copy_(buffers[name].to(dtype))


def load_policy(config: Config, folder: Path) -> models.Model:
    """The policy: the model in `folder` in fp32.

    With `lora.rank` it is frozen, in the format `lora.base_dtype`, and has LoRA adapters in fp32.
    """
    device = models.choose_device(config.model.device)
    section = config.lora
    models.limit_memory(device, config.train.memory_fraction)
    if device.type == "cpu":
        models.use_deterministic_operators()
    trust = config.model.trust_remote_code
    options: dict[str, Any] = {"device": device, "trust_remote_code": trust}
    if section.rank is None or section.base_dtype == "float32":
        model = models.load_model(folder, dtype=torch.float32, **options)
    else:
        model = frozen_base.load_frozen_base(folder, section.base_dtype, **options)
    if section.rank is not None:
        adapters = section.model_dump(exclude={"base_dtype"})
        lora.add_adapters(model, seed=config.run.seed, **adapters)
        num_trained = sum(tensor.numel() for tensor in lora.trained_parameters(model).values())
        logger.info(
            "lora rank=%d base_dtype=%s trained=%d", section.rank, section.base_dtype, num_trained
        )
    return model


def make_scorer(config: Config, model: models.Model) -> Scorer:
    """The trainer's forward pass, which returns logprobs; logs its dtype."""
    train = config.train
    dtype, reason = models.training_dtype(model, train.dtype)
    check_length(model.config, config.engine.max_model_len)
    scorer = Scorer(
        model,
        dtype=dtype,
        gradient_checkpointing=train.gradient_checkpointing,
        max_length=config.engine.max_model_len,
    )
    logger.debug("training dtype=%s (%s)", str(dtype).removeprefix("torch."), reason)
    if scorer.padding_reason:
        logger.warning("%s", scorer.padding_reason)
    if scorer.whole_logits_reason:
        logger.debug("%s", scorer.whole_logits_reason)
    return scorer


def update_settings(config: Config, step: int) -> UpdateSettings:
    train = config.train
    rate = learning_rate(
        step,
        peak=train.learning_rate,
        kind=train.lr_scheduler_type,
        warmup_steps=train.warmup_steps,
        max_steps=train.max_steps,
    )
    return UpdateSettings(rate, train.weight_decay, train.max_grad_norm)


# Loss, advantage, filters.


def make_loss(config: Config) -> TokenLoss:
    """The loss of [loss] with its options bound; ConfigError for an unknown option.

    With `entropy_coef`, an entropy bonus is added to the loss.
    """
    section = config.loss
    if section.name in LOSSES:
        loss = losses.make_loss(section, max_completion_length=config.max_completion_length)
    else:
        loss = _bind_section("loss", section)
    if section.name == "grpo":
        logger.info("loss grpo: mean over rollouts, as in TRL; the mean over tokens is loss dapo")
    coefficient = section.entropy_coef
    return losses.with_entropy_bonus(loss, coefficient) if coefficient else loss


def make_selection(config: Config, scorer: Scorer) -> TokenSelection | None:
    threshold = m2_threshold(config.loss)
    if config.loss.top_entropy_quantile == 1.0 and threshold is None:
        return None
    return TokenSelection(
        compute=scorer.with_entropy,
        top_entropy_quantile=config.loss.top_entropy_quantile,
        m2_threshold=threshold,
    )


def m2_threshold(section: LossSection) -> float | None:
    """The bound of a named loss on the second moment of the log ratios of a step, if any."""
    return LOSSES[section.name].m2_threshold if section.name in LOSSES else None


def early_divisor(config: Config, *, num_ranks: int = 1) -> Divisor | None:
    """The divisor of the loss if micro-batches may be computed before all groups of a step arrive.

    Otherwise None. They may if the loss of a group depends on other groups only by one divisor, a
    total that is known at the end of the step, and if the step has a single update.
    """
    train = config.train
    section = config.loss
    is_by_token = section.aggregation == "token"
    needs_whole_step = (
        num_ranks > 1
        or train.num_minibatches > 1
        or train.num_iterations > 1
        or step_wide_setting(make_advantage(config))
        or section.name not in LOSSES
        or section.top_entropy_quantile < 1.0
        or m2_threshold(section) is not None
        # The bonus divides by the tokens, the loss by the rollouts.
        or (section.entropy_coef and not is_by_token)
    )
    if needs_whole_step:
        return None
    return "tokens" if is_by_token else "rollouts"


def make_advantage(config: Config) -> AdvantageFunction:
    """The function of [advantage] with its options; ConfigError for an unknown one."""
    return _bind_section("advantage", config.advantage)


def make_term_weights(config: Config) -> TermWeights | None:
    """Weights of the normalized terms of the reward; None if terms are not normalized."""
    if config.advantage.multi_objective_aggregation == "sum_then_normalize":
        return None
    return {
        env.label: dict(zip(env.reward_labels, env.reward_weights or (), strict=False))
        for env in config.environments
    }


def make_filters(config: Config, *, vocab_size: int) -> list[Filter]:
    """The filters of [filter] with their options; ConfigError for an unknown option.

    A function with a parameter `vocab_size` or `max_completion_length` gets the run's value.
    """
    section = config.filter
    run_values = {
        "vocab_size": vocab_size,
        "max_completion_length": config.max_completion_length,
    }
    names = {**dict.fromkeys(section.count, False), **dict.fromkeys(section.remove, True)}
    if unused := section.kwargs.keys() - names.keys():
        raise ConfigError(
            f"filter.kwargs has options of {min(unused)}, which is not in filter.count or "
            "filter.remove; add it, or remove the options"
        )
    filters: list[Filter] = []
    for name, removes in names.items():
        function = _load_function("filter", name)
        accepted = registry.option_names("filter", function)
        options = {key: value for key, value in run_values.items() if key in accepted}
        options |= section.kwargs.get(name, {})
        registry.check_options("filter", name, function, options)
        filters.append(Filter(name, functools.partial(function, **options), removes))
    return filters


def _load_function(kind: FunctionKind, name: str) -> Callable[..., Any]:
    """The function with this name; each call of a user's function is checked."""
    function = registry.resolve(kind, name)
    is_shipped = registry.is_shipped(kind, name)
    return function if is_shipped else checked_function(kind, name, function)


def _bind_section(
    kind: Literal["loss", "advantage"], section: LossSection | AdvantageSection
) -> functools.partial[Any]:
    function = _load_function(kind, section.name)
    settings = section.model_dump(exclude=NO_OPTIONS, exclude_unset=True, exclude_none=True)
    options = registry.bind_options(kind, section.name, function, settings, section.kwargs)
    return functools.partial(function, **options)


# Reference model and teacher.


def make_reference_models(
    config: Config, model: models.Model, scorer: Scorer
) -> tuple[PolicyCopy | None, ReferenceModel | None]:
    """The reference model and the teacher; None for one that the loss does not use.

    Both start as copies of `model`, unless `model.teacher` is set. Raises ConfigError for settings
    that the loss does not use, and for a teacher with a different vocabulary.
    """
    train = config.train
    used = reference_models_used(config)
    parameters = lora.trained_parameters(model)
    reference = None
    teacher = None
    if "reference" in used:
        reference = PolicyCopy(parameters, scorer, sync_steps=train.ref_sync_steps)
    elif train.ref_sync_steps:
        raise ConfigError(
            f"train.ref_sync_steps {train.ref_sync_steps} is set, but loss '{config.loss.name}' "
            "uses no reference model; remove it or set loss.beta above 0"
        )
    if "teacher" in used:
        teacher = PolicyCopy(parameters, scorer)
        if config.model.teacher is not None:
            teacher = _load_teacher(config, config.model.teacher, model)
    elif config.model.teacher:
        raise ConfigError(
            f"model.teacher {config.model.teacher} is set, but loss '{config.loss.name}' uses no "
            "teacher; remove it or set loss.teacher_tau above 0"
        )
    return reference, teacher


def reference_models_used(config: Config) -> set[str]:
    """Which of the two models 'reference' and 'teacher' the loss needs.

    A user's loss needs the reference if its option `beta` is not 0, and the teacher if its option
    `teacher_tau` is not 0 or `model.teacher` is set.
    """
    section = config.loss
    if section.name in LOSSES:
        used = {"reference": section.beta, "teacher": section.teacher_tau}
        return {model for model, coefficient in used.items() if coefficient}
    defaults = Signature(registry.resolve("loss", section.name)).defaults
    options = {**defaults, **section.model_dump(exclude_none=True), **section.kwargs}
    used = {"reference": options.get("beta"),
            "teacher": options.get("teacher_tau") or config.model.teacher}  # fmt: skip
    return {model for model, is_used in used.items() if is_used}


def _load_teacher(config: Config, name: str, model: models.Model) -> ReferenceModel:
    teacher = models.load_teacher(
        name,
        policy=model,
        policy_name=config.model.name,
        trust_remote_code=config.model.trust_remote_code,
    )
    dtype, _ = models.training_dtype(teacher, config.train.dtype)
    scorer = Scorer(teacher, dtype=dtype, max_length=config.engine.max_model_len)
    return functools.partial(reference_logprobs, scorer)
