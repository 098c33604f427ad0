"""Settings of the training: task, sampling, optimizer, evaluation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from peralta_zmq.config.sections import (
    Fraction,
    FractionOrZero,
    Names,
    Numbers,
    PartialSection,
    PlainName,
    Section,
    Strings,
    Table,
    Text,
)


class RewardSettings(Section):
    """The reward functions of an environment."""

    reward: Names = ()
    """reward function instead of the task's own: answer_match, exact_match, regex, soft_overlong,
    or your own (file.py:function or module:function). Of several, `task` = the task's own, the
    reward is the weighted sum"""
    reward_weights: Numbers | None = None
    """weights of several reward functions, in order; None = 1 for each"""
    reward_kwargs: Table = Field(default={})
    """keyword arguments of the reward function; of several functions a table for each: { regex = {
    pattern = "..." } }"""


class TaskSection(RewardSettings):
    """The task, which supplies problems and rewards.

    Its reward functions are those of every [[env]] without reward settings.
    """

    name: Text | None = None
    """a shipped task, or your own (file.py or module); None = `rows` if data.train is a file or
    folder, else calculator"""
    max_turns: Annotated[int, Field(ge=1, le=64)] = 8
    """completions after which an episode with several turns is cut off"""
    reward_timeout: PositiveFloat = 10.0
    """seconds for one call of a reward function; after a timeout the group is discarded"""
    agent_timeout: PositiveFloat = 600.0
    """seconds for one session of an agent; after a timeout its group is discarded"""
    agent_history: Literal["branch", "refuse"] = "branch"
    """what a request of an agent becomes that does not continue its earlier ones: a rollout of its
    own, or an error"""
    reward_workers: PositiveInt | None = None
    """processes that call reward functions, on each generator and verifier; None = CPU cores /
    run.num_workers"""


class DataSection(Section):
    """Data files of the task; None = the default of the task."""

    train: Text | None = None
    """training problems: a shipped data set (math_1k), a CSV, JSONL or Parquet file, or a folder of
    save_to_disk of the library datasets"""
    eval: Text | None = None
    """held-out problems, as train; None = the default of the task, for `rows` a tenth of the
    training rows"""
    prompt_column: Text | None = None
    """column with the question, a text or a list of messages"""
    answer_column: Text | None = None
    """column with the answer, which is never part of the prompt"""
    system_prompt: str | None = None
    """system message before each question"""
    args: Table = Field(default={})
    """other keyword arguments of the task's function `problems`"""
    chat_template_kwargs: Table = Field(default={})
    """variables of the model's chat template, for example { enable_thinking = true }"""
    overlong: Literal["skip", "refuse"] = "skip"
    """skip prompts that leave no room for a completion, or refuse to start"""


class EnvSampling(PartialSection):
    """Settings of [sampling] for one environment; None = as there.

    A max_completion_length that is set to None is no limit, as in [sampling].
    """

    temperature: PositiveFloat | None = None
    top_p: Fraction | None = None
    top_k: NonNegativeInt | None = None
    min_p: FractionOrZero | None = None
    repetition_penalty: PositiveFloat | None = None
    min_tokens: NonNegativeInt | None = None
    max_completion_length: PositiveInt | None = None
    stop: Strings | None = None


class EnvTrainSampling(EnvSampling):
    """The same for training, with the size of its groups."""

    num_generations: Annotated[int, Field(ge=2)] | None = None


class EnvEvalSampling(EnvSampling):
    """The same for evaluations, in which a temperature of 0 means greedy."""

    temperature: NonNegativeFloat | None = None


class EnvSection(RewardSettings, DataSection):
    """An environment: a task with its data. A run with one environment uses [task] and [data]."""

    name: PlainName | None = None
    """name in metrics and at the verifier; None = name of the task"""
    task: Text | None = None
    """name of the task, as task.name"""
    address: Names | None = None
    """http://HOST:PORT of the bin/verifier that runs the task, or a list of them, which take turns;
    None = no verifier"""
    sampling: EnvTrainSampling | None = None
    """settings of [sampling] that differ in this environment: temperature, top_p, top_k, min_p,
    repetition_penalty, num_generations, min_tokens, max_completion_length, stop"""
    rollouts_per_example: PositiveInt | None = None
    """completions per problem in evaluations; None = eval.rollouts_per_example"""
    eval_sampling: EnvEvalSampling | None = None
    """the same settings for evaluations of this environment; temperature 0 = greedy"""

    @property
    def task_name(self) -> str:
        """Name of the task; a file in the form of the calculator's data sets is for this task."""
        source = self.train or self.eval
        path = Path(os.path.expanduser(source or ""))
        is_path = bool(source) and (len(path.parts) > 1 or bool(path.suffix) or path.is_dir())
        return self.task or ("rows" if is_path and not _is_for_calculator(path) else "calculator")

    @property
    def has_agent(self) -> bool:
        """Whether its completions are those that an agent asks for."""
        return self.task_name.startswith(("agent:", "verifiers:"))

    @property
    def label(self) -> str:
        """Name of the environment in problems, groups and metrics."""
        return self.name or self.task_name

    @property
    def reward_labels(self) -> list[str]:
        """Names of the reward functions in metrics."""
        return [name.replace(":", ".").rpartition(".")[2] for name in self.reward]

    @property
    def data_options(self) -> dict[str, Any]:
        """The data settings that are not None, as keyword arguments of the task's `problems`."""
        fields = set(DataSection.model_fields) - {"args", "chat_template_kwargs", "overlong"}
        return {**self.model_dump(include=fields, exclude_none=True), **self.args}

    def with_rewards_of(self, task: TaskSection) -> EnvSection:
        """This environment, with the reward settings of `task` if it has none."""
        if any(getattr(self, name) for name in RewardSettings.model_fields):
            return self
        update = {name: getattr(task, name) for name in RewardSettings.model_fields}
        return self.model_copy(update=update)


def _is_for_calculator(path: Path) -> bool:
    """Whether the first line of a file has the calculator's column for answers."""
    try:
        with path.open("rb") as file:
            return b"python_expression" in file.readline(1 << 16)
    except (OSError, ValueError):
        return False  # reading the rows reports it


class CurriculumSection(Section):
    """Selection of the problems that are sampled."""

    env_ratios: Numbers | None = None
    """shares of the samples of each [[env]]; None = its number of problems"""
    easy_threshold: FractionOrZero | None = None
    """exclude problems with a mean reward of at least this (easy pool); None = off"""
    hard_threshold: FractionOrZero | None = None
    """exclude problems with a mean reward of at most this (hard pool); None = off"""
    online_difficulty_filtering: bool = False
    """replace groups whose mean reward is exactly 0 or 1"""


class SamplingSection(Section):
    """Sampling of completions."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """completions per problem, which form a group: advantages compare their rewards"""
    temperature: PositiveFloat = 1.0
    """divisor of the logits before the softmax"""
    top_p: Fraction = 1.0
    """nucleus sampling: probability mass of the tokens that are kept; 1 = off"""
    top_k: NonNegativeInt = 0
    """keep this many most probable tokens; 0 = off"""
    min_p: FractionOrZero = 0.0
    """keep tokens with at least this fraction of the highest probability; 0 = off"""
    repetition_penalty: PositiveFloat = 1.0
    """lower the logits of tokens that occurred before; 1 = off"""
    min_tokens: NonNegativeInt = 0
    """minimum number of sampled tokens before a completion may end"""
    max_completion_length: PositiveInt | None = 256
    """maximum number of sampled tokens; None = as many as the prompt leaves of
    engine.max_model_len. Left out: 256, more for long answers or a model that thinks"""
    stop: Strings | None = None
    """text, or list of texts, that ends a completion and is removed from it"""
    skip_special_tokens: bool = False
    """remove special tokens from the texts that rewards and replies get"""


class TrainSection(Section):
    """Optimizer, batch and off-policy limits."""

    batch_size: PositiveInt = 64
    """rollouts per training step, a multiple of sampling.num_generations. Left out: 64, at most one
    group per problem"""
    max_steps: PositiveInt = 80
    """training steps of the whole run"""
    optim: Literal["adamw", "adamw_bf16", "adamw_8bit"] = "adamw"
    """AdamW with its state in float32, bfloat16 or 8 bits (8, 4 or 2 bytes per weight); adamw_8bit
    needs the extra `optim`"""
    learning_rate: PositiveFloat = 1e-5
    """peak learning rate. Left out: 1e-5, but 1e-4 with LoRA or for a model below 20 M
    parameters"""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """learning rate schedule after the warm-up"""
    warmup_steps: NonNegativeInt = 0
    """training steps in which the learning rate rises from 0 to its peak"""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW: decoupled weight decay"""
    master_noise: bool = True
    """full fine-tuning: start the float32 master weights between the numbers of weights.dtype, so
    that small updates are not lost in rounding"""
    max_grad_norm: PositiveFloat = 1.0
    """gradient clipping: maximum norm of the gradient"""
    max_tokens_per_microbatch: PositiveInt = 4096
    """tokens per forward and backward pass; of a longer rollout the beginning is trained. Left out:
    the largest power of two that fits"""
    keep_zero_std: bool = False
    """also train on groups with equal rewards, for a reference, a teacher, the entropy or
    token_whitening"""
    num_iterations: PositiveInt = 1
    """number of times that a training step uses its batch, as in TRL"""
    num_minibatches: PositiveInt = 1
    """mini-batches per training step: parts of the batch, each with an optimizer update"""
    ref_sync_steps: PositiveInt | None = None
    """training steps after which the reference model becomes a copy of the policy; None = never"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of matrix products; auto = bfloat16 where it is faster"""
    gradient_checkpointing: bool = False
    """recompute each layer in the backward pass: less memory, a third more time"""
    max_async_level: NonNegativeInt = 1
    """weight versions that generators may run ahead; 0 = on-policy"""
    max_off_policy_steps: NonNegativeInt = 8
    """drop groups sampled by weights more than this many steps old"""
    samples_while_waiting: Literal["auto", "always", "never"] = "auto"
    """a trainer that waits for half of its time samples, too, at low priority; auto = on a CPU with
    generators on other machines"""
    memory_fraction: Fraction | None = None
    """fraction of the memory of its device that the trainer may use; None = all"""

    @property
    def staleness_limit(self) -> int:
        """Largest staleness of a group that is trained, in training steps."""
        return 0 if self.max_async_level == 0 else self.max_off_policy_steps


class EarlyStopSection(Section):
    """Limits of metrics that end the run; None = no limit.

    After 10 steps in a row beyond a limit, the trainer saves a checkpoint and exits with status 2.
    The same command continues the run and counts from 0 again.
    """

    min_entropy: PositiveFloat | None = None
    """lowest entropy, in nats per token"""
    max_reward: float | None = None
    """highest reward, for example when the task is solved"""


class LoraSection(Section):
    """LoRA: train and publish only adapters; needs the extra `lora` of the package."""

    rank: PositiveInt | None = None
    """rank of the adapters; None = train all weights"""
    alpha: PositiveFloat = 32.0
    """the output of an adapter is scaled by alpha / rank"""
    base_dtype: Literal["bfloat16", "float32", "int8", "nf4"] = "bfloat16"
    """format of the base model on the trainer: 2, 4, 1.03 or 0.53 bytes per weight of a linear
    layer"""
    target_modules: Names = ("all-linear",)
    """linear layers with an adapter, by the ends of their names (q_proj,v_proj); all-linear = all
    except the head"""


class EvalSection(Section):
    """Evaluation on held-out problems before, during and after training."""

    interval: PositiveInt = 20
    """training steps between two evaluations. Left out: a quarter of train.max_steps"""
    num_examples: int = -1
    """held-out problems per environment; -1 = all"""
    rollouts_per_example: PositiveInt = 1
    """completions per problem: 1 = greedy, more = sampled as in training, for pass@k and avg@k"""
    sampling: EnvEvalSampling | None = None
    """settings of [sampling] that differ in evaluations; the temperature is 0 (greedy) by default
    for one completion per problem"""
    eval_base_model: bool = True
    """also evaluate the model before training"""
    cancel_inflight_rollouts_on_eval: bool = False
    """interrupt the groups in flight when an evaluation starts and resume them after it, instead of
    finishing them before"""
    env: tuple[EnvSection, ...] = ()
    """environments to evaluate, one table [[eval.env]] each; empty = the training environments"""
