"""Settings of the training objective: loss, advantages, filters.

The ratio of a token is its probability under the policy (the trained model) divided by that under
an older policy; A is its advantage.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)

from peralta_zmq.config.sections import (
    CommaSeparated,
    Fraction,
    Names,
    PartialSection,
    Probability,
    Section,
    Table,
    Text,
)
from peralta_zmq.errors import ConfigError
from peralta_zmq.named_losses import LOSSES

CorrectionMode: TypeAlias = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


def _check_range(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] < bounds[1]:
        raise ValueError("should have the lower bound first; no token would remain")
    return bounds


Range: TypeAlias = Annotated[
    tuple[NonNegativeFloat, NonNegativeFloat], CommaSeparated, AfterValidator(_check_range)
]


class LossSection(PartialSection):
    """The loss function; `bin/trainer --help loss` has the named losses, which set some of these.

    A setting that is left out has the value of the named loss. An option that it does not have is
    refused.
    """

    name: Text = "reinforce"
    """a shipped loss, or a custom function (file.py:function or module:function)"""
    importance_sampling_level: Literal["token", "sequence_mean", "sequence_product"] = "token"
    """ratio of a token, or of its completion: geometric mean (sequence_mean) or product
    (sequence_product) of the tokens' ratios"""
    aggregation: Literal["token", "rollout", "sum", "constant"] = "token"
    """mean over all tokens (token); over the tokens of each rollout, then over rollouts (rollout);
    sum over each rollout, then mean over rollouts (sum), and that divided by
    sampling.max_completion_length (constant)"""
    epsilon: Probability = 0.2
    """lower clip range of the ratio (1 - epsilon)"""
    epsilon_high: PositiveFloat | None = None
    """upper clip range (1 + epsilon_high); None = epsilon. reinforce: upper limit of the ratio (1 +
    epsilon_high); cispo: upper limit of the ratio"""
    delta: PositiveFloat | None = None
    """upper limit of the ratio without the clip, also where A < 0 (dual clip)"""
    importance_sampling_mode: CorrectionMode | None = None
    """off-policy correction: the ratio is to the policy before the step, and the loss is weighted
    by the ratio of that policy to the sampling policy, limited (truncate) or 0 (mask) above its
    bound"""
    importance_sampling_clip_max: PositiveFloat | None = 3.0
    """importance_sampling_mode: upper bound of the weight"""
    token_mask: Range | None = None
    """leave out tokens whose ratio to the sampling policy is outside these bounds: 0.125,8"""
    off_policy_mask_threshold: PositiveFloat | None = None
    """leave out rollouts with A < 0 whose mean log ratio of sampling policy to policy is larger"""
    top_entropy_quantile: Fraction = 1.0
    """train only this share of the tokens of a step, those with the highest entropy"""
    teacher_tau: NonNegativeFloat = 0.0
    """coefficient of the KL to the teacher, as a term of the advantage of each token"""
    kl_tau: NonNegativeFloat = 0.0
    """coefficient of the squared log ratio to the sampling policy; importance: of the log ratio, in
    the advantage"""
    beta: NonNegativeFloat = 0.0
    """coefficient of the KL to the model before training: k3 times the ratio, which makes its
    gradient unbiased"""
    entropy_coef: NonNegativeFloat = 0.0
    """any loss: coefficient of the entropy bonus; 0 = off"""
    sft_file: Text | None = None
    """any loss: demonstrations that each update trains too: a CSV, JSONL or Parquet file with the
    columns prompt and completion; None = none"""
    sft_weight: PositiveFloat = 0.1
    """sft_file: coefficient of the mean negative logprob of the completions' tokens"""
    kwargs: Table = Field(default={})
    """keyword arguments of a custom loss, as a TOML table or as JSON"""

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, given: Any, handler: ModelWrapValidatorHandler[LossSection]) -> LossSection:
        """Take over the settings of the named loss; set are only those that differ from them."""
        name = given.get("name", "reinforce") if isinstance(given, dict) else None
        loss = LOSSES.get(str(name))
        if loss is None:  # a custom loss, or a LossSection
            return handler(given)
        section = handler({**loss.settings, **given})
        defaults = {leaf: field.default for leaf, field in cls.model_fields.items()}
        defaults |= loss.settings
        differing = (leaf for leaf in given if getattr(section, leaf) != defaults[leaf])
        section.model_fields_set.intersection_update(["name", *differing])
        _check_loss(section)
        return section


def _check_loss(section: LossSection) -> None:
    """Raise ConfigError for settings that a named loss does not have, or without a gradient."""
    name = section.name
    loss = LOSSES[name]
    if section.kwargs:
        raise ConfigError(
            f"loss.kwargs is only for a loss of your own; set the options of '{name}' in [loss]"
        )
    for option in section.model_fields_set:
        if getattr(section, option) is None:
            continue
        others = [other for other, each in LOSSES.items() if option in each.options]
        if others and option not in loss.options:
            raise ConfigError(
                f"loss.{option} is not an option of loss '{name}'; remove it or set loss.name to "
                f"{' or '.join(others)}"
            )
    if loss.objective == "cispo" and section.epsilon_high is None:
        raise ConfigError("loss cispo needs loss.epsilon_high, for example 5")
    is_by_rollout = section.importance_sampling_level != "token" or (
        section.importance_sampling_mode or ""
    ).startswith("sequence")
    if loss.objective == "vespo" and is_by_rollout:
        raise ConfigError(
            "loss vespo computes the ratio of a whole rollout itself; set "
            "loss.importance_sampling_level token, and loss.importance_sampling_mode "
            "token_truncate or token_mask or none"
        )
    terms = (section.teacher_tau, section.kl_tau, section.beta, section.entropy_coef)
    if not loss.uses_rewards and not any(terms):
        raise ConfigError(
            f"loss {name} uses no rewards, and loss.teacher_tau, loss.kl_tau, loss.beta and "
            "loss.entropy_coef are all 0, so the gradient would be 0; set one of them"
        )


class AdvantageSection(Section):
    """The advantage estimator."""

    name: Text = "group_mean"
    """a shipped estimator, or a custom function (file.py:function or module:function)"""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """group_zscore (default group), leave_one_out (default none): divide by the standard deviation
    of the group, of the step, or do not divide"""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """the reward is the sum of its terms, or of the terms after normalization in the group"""
    kwargs: Table = Field(default={})
    """keyword arguments of a custom estimator, as a TOML table or as JSON"""


class FilterSection(Section):
    """Functions that detect rollouts: gibberish (a rare token with a very low probability),
    repetition (many tokens in a row with a probability near 1), overlong (cut off at the maximum
    length), or your own (file.py:function or module:function)."""

    count: Names = ()
    """filters that only count the rollouts that they detect, in the metrics"""
    remove: Names = ()
    """filters that also remove them from the loss, but not from the group's baseline"""
    kwargs: dict[str, Table] = Field(default={})
    """options of the filters, a table for each: { repetition = { window = 500 } }"""
