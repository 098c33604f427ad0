"""Settings of the training: task, sampling, optimizer, loss, evaluation.

A rollout is a prompt with a sampled completion and its reward; a group is all rollouts of one
problem. A training step ("step") consumes one batch of groups. The policy is the trained model. A
verifier is a service on another machine that supplies problems and rewards.

For an option of [loss] or [advantage], None means the default in the signature of the chosen
function; `peralta_zmq.build` checks which options that function takes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from peralta_zmq.config.sections import (
    CommaSeparated,
    Decay,
    Fraction,
    FractionOrZero,
    Names,
    Numbers,
    PlainName,
    Probability,
    Section,
    Strings,
    Table,
    Text,
)

Objective: TypeAlias = Literal[
    "reinforce", "importance", "on_policy", "ratio", "ppo", "cispo", "sapo", "vespo"
]
CorrectionMode: TypeAlias = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]
# Settings that [loss] had in an older version, with the value that has no effect.
OLDER_SETTINGS = {"use_decoupled_loss": True, "behav_imp_weight_cap": None, "ratio_type": None}
AboveOne: TypeAlias = Annotated[float, Field(gt=1)]
HashKeys: TypeAlias = Annotated[
    tuple[Literal["task", "prompt", "answer", "id"], ...], Field(min_length=1), CommaSeparated
]


class RewardSettings(Section):
    """The reward functions of an environment."""

    reward: Text | None = None
    """import path of a reward function (module:function) that replaces the task's own"""
    reward_functions: Names = ()
    """functions with TRL's signature, whose weighted sum is the reward: exact_match, regex,
    soft_overlong, boxed_answer, import paths, and `task` for the task's own; empty = only that"""
    reward_weights: Numbers | None = None
    """weights of reward_functions, in order; None = 1 for each"""
    reward_kwargs: Table = Field(default={})
    """keyword arguments of the reward function, as a TOML table or as JSON; with reward_functions
    a table of such tables by function: { regex = { pattern = "..." } }"""


class TaskSection(RewardSettings):
    """The task, which supplies problems and rewards.

    Its reward functions are those of every [[env]] without reward settings.
    """

    name: Text = "calculator"
    """a shipped task, or the import path of a custom module"""
    max_turns: Annotated[int, Field(ge=1, le=64)] = 8
    """completions of a rollout, for tasks that reply to completions or have tools; a longer
    episode is cut off"""
    skip_verification: bool = False
    """do not compute rewards in training (all are 0), for a loss that needs none: ref_kl, one
    with adv_tau 0 and teacher_tau above 0, or a custom one; needs train.keep_zero_std"""
    reward_timeout: PositiveFloat = 10.0
    """seconds for one call of a reward function: a completion, or the whole group for a function
    of reward_functions; after a timeout the group is discarded"""
    reward_workers: PositiveInt | None = None
    """processes that call reward functions, on each generator and verifier; None = number of CPU
    cores / generator.num_workers. Raise it for a reward function that waits"""
    reward_concurrency: PositiveInt = 16
    """calls of an async reward function, and requests to a verifier, awaited at the same time"""


class DataSection(Section):
    """Data files of the task; None = the default of the task."""

    train: Text | None = None
    """training problems: a shipped data set (math_1k) or the path of a CSV, JSONL or
    Parquet file"""
    eval: Text | None = None
    """held-out problems: a shipped data set (math_250) or the path of a CSV, JSONL or
    Parquet file"""
    prompt_column: Text | None = None
    """column with the question; a row may have input_token_ids instead"""
    answer_column: Text | None = None
    """column with the answer, which is never part of the prompt"""
    system_prompt: str | None = None
    """system message before each question"""
    args: Table = Field(default={})
    """other keyword arguments of the task's function `problems`, as a TOML table or as JSON"""
    chat_template_kwargs: Table = Field(default={})
    """variables of the model's chat template, for example { enable_thinking = true }"""


class EnvSection(RewardSettings, DataSection):
    """An environment: a task with its data. A run with one environment uses [task] and [data]."""

    name: PlainName | None = None
    """name in metrics and at the verifier; None = name of the task"""
    task: Text = "calculator"
    """a shipped task, or the import path of a custom module"""
    address: Names | None = None
    """http://HOST:PORT of the bin/verifier that runs the task, or several of them, which take turns
    and replace each other; None = no verifier"""

    @property
    def label(self) -> str:
        """Name of the environment in problems, groups and metrics."""
        return self.name or self.task

    @property
    def data_options(self) -> dict[str, Any]:
        """The data settings that are not None, as keyword arguments of the task's `problems`."""
        fields = set(DataSection.model_fields) - {"args", "chat_template_kwargs"}
        return {**self.model_dump(include=fields, exclude_none=True), **self.args}

    def with_rewards_of(self, task: TaskSection) -> EnvSection:
        """This environment, with the reward settings of `task` if it has none."""
        if any(getattr(self, name) for name in RewardSettings.model_fields):
            return self
        update = {name: getattr(task, name) for name in RewardSettings.model_fields}
        return self.model_copy(update=update)


class CurriculumSection(Section):
    """Selection of the problems that are sampled."""

    env_ratios: Numbers | None = None
    """relative number of samples of each [[env]], in order; None = its number of problems"""
    hash_keys: HashKeys = ("task", "prompt")
    """fields that together identify a problem: task, prompt, answer, id (given by the task)"""
    easy_threshold: FractionOrZero | None = None
    """exclude problems with a mean reward of at least this (easy pool); None = off"""
    hard_threshold: FractionOrZero | None = None
    """exclude problems with a mean reward of at most this (hard pool); None = off"""
    easy_fraction: FractionOrZero = 0.0
    """fraction of the easy pool that is sampled again when a run is resumed"""
    hard_fraction: FractionOrZero = 0.0
    """fraction of the hard pool that is sampled again when a run is resumed"""
    online_difficulty_filtering: bool = False
    """drop groups whose mean reward is exactly 0 or 1, and fill the batch with other groups"""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """groups in flight as a multiple of the groups per step; raise it if filtering drops groups"""


class SamplingSection(Section):
    """Sampling of completions."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """completions per problem, which form a group: advantages compare their rewards"""
    temperature: PositiveFloat | None = None
    """divisor of the logits before the softmax; None = 1, or as temp_scheduler defines"""
    temp_scheduler: Literal["linear", "cosine"] | None = None
    """temperature schedule over train.max_steps; None = constant"""
    temp_start: PositiveFloat | None = None
    """temp_scheduler: temperature at the first training step"""
    temp_end: PositiveFloat | None = None
    """temp_scheduler: temperature at the last training step"""
    top_p: Fraction = 1.0
    """nucleus sampling: keep the most probable tokens up to this probability mass; 1 = off"""
    top_k: NonNegativeInt = 0
    """keep this many most probable tokens; 0 = off"""
    min_p: FractionOrZero = 0.0
    """keep tokens with at least this fraction of the highest probability; 0 = off"""
    repetition_penalty: PositiveFloat = 1.0
    """above 1: lower the logits of tokens that occur in prompt or completion; 1 = off"""
    min_tokens: NonNegativeInt = 0
    """minimum number of sampled tokens before a completion may end"""
    max_completion_length: PositiveInt | None = 48
    """maximum number of sampled tokens, including the end token; None = as many as the prompt
    leaves of engine.max_model_len"""
    stop: Strings | None = None
    """end a completion when its text contains this string, or one of a list; it is removed"""


class TrainSection(Section):
    """Optimizer, batch and off-policy limits."""

    batch_size: PositiveInt = 128
    """rollouts per training step, a multiple of sampling.num_generations"""
    token_batch_size: PositiveInt | None = None
    """tokens per training step (prompts and completions), instead of batch_size"""
    max_steps: PositiveInt = 80
    """training steps of the whole run"""
    optim: Literal["adamw", "adamw_bf16", "adamw_8bit"] = "adamw"
    """AdamW with its state in float32, bfloat16 or 8 bits (8, 4 or 2 bytes per weight);
    adamw_8bit needs the package extra `optim`"""
    learning_rate: PositiveFloat = 2e-4
    """peak learning rate"""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """learning rate schedule after the warm-up"""
    warmup_steps: NonNegativeInt = 0
    """training steps in which the learning rate rises linearly from 0 to its peak"""
    adam_beta1: Decay = 0.9
    """AdamW: decay of the mean of gradients"""
    adam_beta2: Decay = 0.95
    """AdamW: decay of the mean of squared gradients"""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW: decoupled weight decay"""
    max_grad_norm: PositiveFloat = 1.0
    """gradient clipping: maximum norm of the gradient"""
    max_tokens_per_microbatch: PositiveInt = 16384
    """tokens per forward and backward pass; changes memory, not the gradient"""
    oversize: Literal["truncate", "drop"] = "truncate"
    """rollouts longer than max_tokens_per_microbatch: train on their beginning, or drop them"""
    keep_zero_std: bool = False
    """also train on groups with equal rewards; useful with a loss term for a reference, a teacher
    or the entropy, or with token_whitening over the whole step, which gives them advantages"""
    num_iterations: PositiveInt = 1
    """number of times that a training step uses its batch, as in TRL; each mini-batch is an
    optimizer update"""
    num_minibatches: PositiveInt = 1
    """mini-batches per training step: parts of the batch, each with an optimizer update"""
    ref_sync_steps: PositiveInt | None = None
    """training steps between two updates of the reference model from the policy; None = never"""
    ref_mixup_alpha: Fraction = 1.0
    """weight of the policy in the average of policy and previous reference model"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of matrix products; weights and gradients stay float32"""
    gradient_checkpointing: bool = False
    """recompute each layer in the backward pass: less memory, a third more time"""
    max_async_level: NonNegativeInt = 1
    """weight versions that generators may run ahead; with weights.interval 1: training steps; 0 =
    on-policy"""
    max_off_policy_steps: NonNegativeInt = 8
    """drop groups sampled by weights more than this many steps old; 0 if max_async_level is 0"""
    max_mismatch_kl: PositiveFloat = 0.1
    """report a generator if the KL between its logprobs and the trainer's exceeds this"""
    on_mismatch: Literal["report", "drop"] = "report"
    """generator above max_mismatch_kl: only report it, or also drop its groups"""
    num_workers: PositiveInt = 1
    """number of trainer and generator processes on this machine, which share its CPU cores"""


class EarlyStopSection(Section):
    """Limits of metrics that end the run; None = no limit.

    After `patience` steps in a row beyond a limit, the trainer saves a checkpoint and exits with
    status 2. The same command continues the run and counts from 0 again.
    """

    max_mismatch_kl: PositiveFloat | None = None
    """highest mismatch_kl, the KL estimate of the policy to the weights that sampled"""
    max_staleness: NonNegativeFloat | None = None
    """highest staleness/mean, in training steps"""
    min_entropy: PositiveFloat | None = None
    """lowest entropy, in nats per token"""
    max_reward: float | None = None
    """highest reward, for example when the task is solved"""
    min_reward: float | None = None
    """lowest reward"""
    patience: PositiveInt = 10
    """consecutive steps beyond a limit"""


class LossSection(Section):
    """The loss function; None = the value of the named loss (bin/trainer --help loss)."""

    name: Text = "reinforce"
    """a shipped loss, or the import path of a custom function (module:function)"""
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

    @model_validator(mode="before")
    @classmethod
    def _without_unset_older_settings(cls, settings: object) -> object:
        """Accept config.toml of an older run, which has all settings of that version."""
        if not isinstance(settings, dict):  # pydantic refuses it
            return settings
        return {
            name: value
            for name, value in cast("dict[str, Any]", settings).items()
            if name not in OLDER_SETTINGS or value not in (OLDER_SETTINGS[name], "None")
        }


class AdvantageSection(Section):
    """The advantage estimator; None = the default of the chosen estimator."""

    name: Text = "group_mean"
    """a shipped estimator, or the import path of a custom function (module:function)"""
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


class LoraSection(Section):
    """LoRA: train and publish only adapters; needs the extra `lora` of the package."""

    rank: PositiveInt | None = None
    """rank of the adapters; None = train all weights"""
    alpha: PositiveFloat = 32.0
    """the output of an adapter is scaled by alpha / rank"""
    dropout: Decay = 0.0
    """dropout on the input of the adapters while training"""
    target_modules: Names = ("all-linear",)
    """linear layers with an adapter, by the ends of their names (q_proj,v_proj);
    all-linear = all of them except the head"""


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
    """custom filters: for each import path a table with the keys enforce and kwargs"""


class EvalSection(Section):
    """Evaluation on held-out problems before, during and after training."""

    interval: PositiveInt = 100
    """training steps between two evaluations by the generators"""
    num_examples: int = -1
    """held-out problems per environment; -1 = all"""
    rollouts_per_example: PositiveInt = 1
    """completions per problem: 1 = greedy, more = sampled as in training, for pass@k and avg@k"""
    temperature: NonNegativeFloat | None = None
    """sampling temperature of an evaluation, 0 = greedy; None = 0 for one completion per problem,
    else as in training"""
    max_completion_length: PositiveInt | None = None
    """maximum number of sampled tokens in an evaluation; None = as in training"""
    eval_base_model: bool = True
    """also evaluate the model before training"""
    skip_eval_on_resume: bool = True
    """do not evaluate again at the step from which a run is resumed"""
    cancel_inflight_rollouts_on_eval: bool = False
    """cancel the groups in flight when an evaluation starts, instead of finishing them"""
    env: tuple[EnvSection, ...] = ()
    """environments to evaluate, one table [[eval.env]] each; empty = the training environments"""
