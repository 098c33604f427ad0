"""The knobs of what is learned: [loss], [advantage], [filter], and by which weights: [lora].

An option that is None is left to the function, whose signature has the default; which options a
function takes is read from its signature too, in `peralta_zmq.build_objective`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from peralta_zmq.config.section import Decay, Names, Section, Text

AboveOne: TypeAlias = Annotated[float, Field(gt=1)]
Table: TypeAlias = dict[str, Any]
Probability: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


class LossSection(Section):
    """The objective; an option that is None is what the loss says (docs/losses.md)."""

    name: Text = "reinforce"
    """a shipped loss, or a dotted name of your own (module:function)"""
    epsilon: Probability | None = None
    """grpo, decoupled_ppo, gspo: how far the importance ratio may fall below 1"""
    epsilon_high: PositiveFloat | None = None
    """the same above 1; None = epsilon (gspo: 4e-4). reinforce: clamp the ratio as its weight"""
    c_clip: AboveOne | None = None
    """grpo, decoupled_ppo: a negative advantage costs at most so many times itself (dual clip)"""
    use_decoupled_loss: bool = True
    """decoupled_ppo: false = without prox, which is PPO on the weights that sampled"""
    behav_imp_weight_cap: PositiveFloat | None = None
    """decoupled_ppo: tokens whose weight exp(prox - mu) is above it are left out"""
    beta: NonNegativeFloat | None = None
    """grpo_kl: weight of the distance to the reference; 0.001 unless given"""
    ratio_type: Literal["token", "sequence"] | None = None
    """importance: the ratio of each token, or of the whole rollout"""
    token_mask_low: NonNegativeFloat | None = None
    """importance: tokens with a smaller ratio are left out"""
    token_mask_high: PositiveFloat | None = None
    """importance: tokens with a larger ratio are left out"""
    geo_mask_low: NonNegativeFloat | None = None
    """importance: rollouts whose ratios have a smaller geometric mean are left out"""
    geo_mask_high: PositiveFloat | None = None
    """importance: rollouts whose ratios have a larger geometric mean are left out"""
    sequence_mask_low: NonNegativeFloat | None = None
    """importance: rollouts with a token of a smaller ratio are left out"""
    sequence_mask_high: PositiveFloat | None = None
    """importance: rollouts with a token of a larger ratio are left out"""
    sequence_clip_high: PositiveFloat | None = None
    """importance with ratio_type sequence: the largest ratio of a rollout"""
    adv_tau: NonNegativeFloat | None = None
    """importance: weight of the advantage"""
    teacher_tau: NonNegativeFloat | None = None
    """importance: weight of the pull towards the teacher"""
    kl_tau: NonNegativeFloat | None = None
    """importance, dppo: weight of the pull towards the weights that sampled"""
    dppo_mask_low: Probability | None = None
    """dppo: tokens whose probability has fallen by more are left out, when A <= 0"""
    dppo_mask_high: Probability | None = None
    """dppo: tokens whose probability has risen by more are left out, when A > 0"""
    entropy_coef: NonNegativeFloat = 0.0
    """any loss: weight of a bonus for the mean entropy of the policy; 0 = none"""
    kwargs: Table = Field(default={})
    """options of a loss of your own, as a TOML table or as JSON"""


class AdvantageSection(Section):
    """From rewards to advantages; an option that is None is what the estimator says."""

    name: Text = "group_mean"
    """a shipped estimator, or a dotted name of your own (module:function)"""
    eps: NonNegativeFloat | None = None
    """group_zscore (1e-8), token_whitening (1e-5): added to the standard deviation"""
    ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    """group_zscore: 0 = standard deviation of a population, 1 = of a sample"""
    group_adv_norm: bool = False
    """token_whitening: compare within each group instead of over the whole step"""
    kwargs: Table = Field(default={})
    """options of an estimator of your own, as a TOML table or as JSON"""


class LoraSection(Section):
    """Train low-rank adapters and publish only them; needs the extra `lora`."""

    rank: PositiveInt | None = None
    """inner size of an adapter; None = train all weights"""
    alpha: PositiveFloat = 32.0
    """what an adapter says is scaled by alpha / rank"""
    dropout: Decay = 0.0
    """share of an adapter's inputs that is left out while training"""
    target_modules: Names = ("all-linear",)
    """linear layers that get an adapter, by the ends of their names (q_proj,v_proj);
    all-linear = every one but the head"""


class GibberishFilter(Section):
    """A rare token that was drawn against all odds."""

    enforce: bool = False
    """take what is caught out of the loss; else only count it"""
    token_id_threshold: PositiveInt = 100_000
    """rare tokens have larger ids"""
    logprob_offset: NonNegativeFloat = 2.0
    """how far below that of a uniform draw a logprob is against all odds"""


class RepetitionFilter(Section):
    """Many certain tokens in a row."""

    enforce: bool = False
    """take what is caught out of the loss; else only count it"""
    window: PositiveInt = 3000
    """so many of them, or half of sampling.max_completion_length when that is less"""
    prob_threshold: Probability = 0.99
    """a token drawn with a larger probability is certain"""


class OverlongFilter(Section):
    """Cut off before the end."""

    enforce: bool = False
    """take what is caught out of the loss; else only count it"""


class CustomFilter(Section):
    """A filter of one's own."""

    enforce: bool = False
    """take what is caught out of the loss; else only count it"""
    kwargs: Table = Field(default={})
    """its options"""


class FilterSection(Section):
    """Which rollouts are not learned from; their rewards still count in the baseline."""

    gibberish: GibberishFilter | None = None
    """a rare token drawn against all odds; a table of enforce (false = only count),
    token_id_threshold (100000), logprob_offset (2.0)"""
    repetition: RepetitionFilter | None = None
    """many certain tokens in a row; a table of enforce (false = only count), window (3000),
    prob_threshold (0.99)"""
    overlong: OverlongFilter | None = None
    """cut off before the end; a table of enforce (false = only count)"""
    custom: dict[str, CustomFilter] = Field(default={})
    """filters of your own: a table of enforce and kwargs for each dotted name"""
