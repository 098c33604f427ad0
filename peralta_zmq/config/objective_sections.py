"""Settings of the training objective: loss, advantages, filters.

A rollout is a prompt with a sampled completion and its reward; a group is all rollouts of one
problem. The policy is the trained model. The ratio of a token is its probability under the policy
divided by that under an older policy; A is its advantage.

For an option of [loss] or [advantage], None means the default in the signature of the chosen
function; `peralta_zmq.build` checks which options that function takes.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from peralta_zmq.config.sections import (
    Fraction,
    Probability,
    Section,
    Table,
    Text,
)

Objective: TypeAlias = Literal[
    "reinforce", "importance", "on_policy", "ratio", "ppo", "cispo", "sapo", "vespo"
]
CorrectionMode: TypeAlias = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]
AboveOne: TypeAlias = Annotated[float, Field(gt=1)]


class LossSection(Section):
    """The loss function; None = the value of the named loss (bin/trainer --help loss)."""

    name: Text = "reinforce"
    """a shipped loss, or a custom function (file.py:function or module:function)"""
    objective: Objective | None = None
    """loss of a token, from its ratio of policy to older policy and its advantage"""
    importance_sampling_level: Literal["token", "sequence", "rollout"] | None = None
    """ratio of a token: its own, or of its completion, as the geometric mean (sequence) or the
    product (rollout) of the tokens' ratios"""
    aggregation: Literal["token", "rollout", "sum", "constant"] | None = None
    """mean over all tokens of the update (token); mean over each rollout, then over rollouts
    (rollout); sum over each rollout, then mean over rollouts (sum), and that divided by
    sampling.max_completion_length (constant)"""
    epsilon: Probability | None = None
    """ppo: lower clip range of the ratio (1 - epsilon)"""
    epsilon_high: PositiveFloat | None = None
    """ppo: upper clip range (1 + epsilon_high), epsilon if not set; reinforce: upper limit of the
    ratio (1 + epsilon_high), off if not set; cispo: upper limit of the ratio (epsilon_high)"""
    delta: PositiveFloat | None = None
    """ppo: upper limit of the ratio without the clip, also where the advantage A < 0"""
    c_clip: AboveOne | None = None
    """ppo: dual clip, limits the loss to c_clip * |A| where A < 0"""
    sequence_clip_high: PositiveFloat | None = None
    """importance: upper limit of the ratio of a rollout"""
    sapo_temperature_pos: PositiveFloat | None = None
    """sapo: temperature of the soft clip where A > 0"""
    sapo_temperature_neg: PositiveFloat | None = None
    """sapo: temperature of the soft clip where A <= 0"""
    vespo_k_pos: NonNegativeFloat | None = None
    """vespo: exponent of the ratio where A >= 0"""
    vespo_lambda_pos: NonNegativeFloat | None = None
    """vespo: decay with the ratio where A >= 0"""
    vespo_k_neg: NonNegativeFloat | None = None
    """vespo: exponent of the ratio where A < 0"""
    vespo_lambda_neg: NonNegativeFloat | None = None
    """vespo: decay with the ratio where A < 0"""
    importance_sampling_mode: CorrectionMode | None = None
    """off-policy correction: the ratio is to the policy before the step, and the loss is weighted
    by the ratio of that policy to the sampling policy, per token or completion, limited
    (truncate) or 0 (mask) out of its bounds"""
    importance_sampling_clip_min: PositiveFloat | None = None
    """importance_sampling_mode: lower bound of the weight"""
    importance_sampling_clip_max: PositiveFloat | None = None
    """importance_sampling_mode: upper bound of the weight"""
    token_mask_low: NonNegativeFloat | None = None
    """leave out tokens with a smaller ratio to the sampling policy"""
    token_mask_high: PositiveFloat | None = None
    """leave out tokens with a larger ratio to the sampling policy"""
    geo_mask_low: NonNegativeFloat | None = None
    """leave out rollouts whose geometric mean of ratios is smaller"""
    geo_mask_high: PositiveFloat | None = None
    """leave out rollouts whose geometric mean of ratios is larger"""
    sequence_mask_low: NonNegativeFloat | None = None
    """leave out rollouts that have a token with a smaller ratio"""
    sequence_mask_high: PositiveFloat | None = None
    """leave out rollouts that have a token with a larger ratio"""
    dppo_mask_low: Probability | None = None
    """leave out tokens with A <= 0 whose probability fell by more than this"""
    dppo_mask_high: Probability | None = None
    """leave out tokens with A > 0 whose probability rose by more than this"""
    one_sided_threshold: Probability | None = None
    """leave out tokens whose probability fell by more than this"""
    ipo_threshold: Probability | None = None
    """leave out tokens whose probability changed by more than this"""
    off_policy_mask_threshold: PositiveFloat | None = None
    """leave out rollouts with A < 0 whose mean log ratio of sampling policy to policy is larger"""
    kl_mask_high: PositiveFloat | None = None
    """leave out rollouts whose mean KL estimate (k3) of sampling policy to policy is larger"""
    top_entropy_quantile: Fraction | None = None
    """train only this share of the tokens of a step, those with the highest entropy; 1 = all"""
    m2_threshold: PositiveFloat | None = None
    """leave out the tokens of a step with the largest squared log ratio of the policy before the
    step to the sampling policy, as few as bring the mean of the others below this"""
    adv_tau: NonNegativeFloat | None = None
    """coefficient of the advantage"""
    teacher_tau: NonNegativeFloat | None = None
    """coefficient of the KL to the teacher, as a term of the advantage of each token"""
    kl_tau: NonNegativeFloat | None = None
    """coefficient of the squared log ratio to the sampling policy; importance: of the log ratio, as
    a term of the advantage"""
    beta: NonNegativeFloat | None = None
    """coefficient of the KL to the model kl_model"""
    kl_model: Literal["reference", "teacher"] | None = None
    """the model before training (reference), or model.teacher; default reference"""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """estimate of the KL for a token: k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1, where x is the log
    ratio of that model to the policy; default k3"""
    kl_clamp: Literal["log_ratio", "estimate"] | None = None
    """limit x (default), or the estimate, to 10"""
    use_bias_correction_kl: bool | None = None
    """multiply the estimate by the ratio, which makes its gradient unbiased; default true"""
    entropy_coef: NonNegativeFloat = 0.0
    """any loss: coefficient of the entropy bonus; 0 = off"""
    sft_file: Text | None = None
    """any loss: demonstrations that each update trains, too: a CSV, JSONL or Parquet file with the
    columns prompt and completion, on each machine of the trainer; None = none"""
    sft_weight: PositiveFloat = 0.1
    """sft_file: coefficient of the mean negative logprob of the completions' tokens"""
    sft_batch_size: PositiveInt = 8
    """sft_file: demonstrations per training step"""
    kwargs: Table = Field(default={})
    """keyword arguments of a custom loss, as a TOML table or as JSON"""


class AdvantageSection(Section):
    """The advantage estimator; None = the default of the chosen estimator."""

    name: Text = "group_mean"
    """a shipped estimator, or a custom function (file.py:function or module:function)"""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """group_zscore, leave_one_out: divide by the standard deviation of the rewards of the group, or
    of the step, or do not divide; default group for group_zscore, none for leave_one_out"""
    eps: NonNegativeFloat | None = None
    """group_zscore, leave_one_out (1e-8), token_whitening (1e-5): added to the standard deviation;
    TRL and PipelineRL: 1e-4"""
    ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    """group_zscore, leave_one_out: 0 = population standard deviation, 1 = sample standard
    deviation, as in TRL and PipelineRL; default 0"""
    group_adv_norm: bool = False
    """token_whitening: normalize within each group instead of over the whole step"""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """the reward is the sum of its terms, or of the terms after normalization in the group"""
    reward_weights: dict[Text, float] = Field(default={})
    """normalize_then_sum: weight of each term by its name, as a TOML table or as JSON; default 1"""
    length_penalty: Literal["tokens"] | None = None
    """tokens: raise the best reward of a group for completions shorter than the mean of the best"""
    kwargs: Table = Field(default={})
    """keyword arguments of a custom estimator, as a TOML table or as JSON"""


class FilterOptions(Section):
    """Options of every filter, a function that detects unusable rollouts."""

    enforce: bool = False
    """remove detected rollouts from the loss; false = only count them"""


class GibberishFilter(FilterOptions):
    """Detects a rare token that was sampled with a very low probability."""

    token_id_threshold: PositiveInt = 100_000
    """tokens with an id above this are rare"""
    logprob_offset: NonNegativeFloat = 2.0
    """a logprob is very low if it is this far below that of a uniform distribution"""


class RepetitionFilter(FilterOptions):
    """Detects many consecutive tokens with a probability near 1."""

    window: PositiveInt = 3000
    """number of consecutive tokens; reduced to half of sampling.max_completion_length"""
    prob_threshold: Probability = 0.99
    """a token counts if its probability is above this"""


class CustomFilter(FilterOptions):
    """A filter function that the user wrote."""

    kwargs: Table = Field(default={})
    """keyword arguments of the filter"""


class FilterSection(Section):
    """Filters that exclude rollouts from the loss, but not from the group's baseline."""

    gibberish: GibberishFilter | None = None
    """rare token with a very low probability; a table with the keys enforce (default
    false: only count), token_id_threshold (100000) and logprob_offset (2.0)"""
    repetition: RepetitionFilter | None = None
    """many consecutive tokens with a probability near 1; a table with the keys enforce
    (default false: only count), window (3000) and prob_threshold (0.99)"""
    overlong: FilterOptions | None = None
    """completion truncated at the maximum length; a table with the key enforce (default
    false: only count)"""
    custom: dict[str, CustomFilter] = Field(default={})
    """custom filters: for each function (file.py:function) a table of enforce and kwargs"""
