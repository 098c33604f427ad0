"""The knobs: one model per TOML section, every field with its default, bounds and meaning.

Leaf names are TRL's where TRL has one. `settings` puts them together; no file is read.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from peralta_zmq.config.objective import Table
from peralta_zmq.config.section import Decay, Fraction, Names, Port, Section, Text

MAX_BETA_BF16 = 0.99  # 1/100 of a number is more than the 1/256 that bfloat16 resolves
TRACKERS = ("tensorboard", "trackio", "wandb")


class RunSection(Section):
    """Which run this is."""

    name: Text = "demo"
    """name of the run and of its folder"""
    dir: Text = "runs"
    """folder that holds the folders of runs"""
    seed: NonNegativeInt = 0
    """source of all randomness of the run"""
    num_local_generators: PositiveInt = 2
    """generators that `bin/lan local` starts beside the trainer on this machine"""
    report_to: Names = ()
    """where the trainer sends its metrics besides the run's folder: tensorboard, trackio, wandb"""


class ModelSection(Section):
    """The language model."""

    name: Text = "embedded"
    """a Hugging Face folder, a name in the local hub cache, or 'embedded'"""
    device: Text = "auto"
    """cpu, cuda, cuda:1, mps, or auto = the accelerator of this machine if it has one"""
    teacher: Text | None = None
    """model of the same vocabulary to which loss.teacher_tau pulls; None = the base itself"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """number format in which generators compute; the trainer's master weights are float32"""


class TaskSection(Section):
    """What is to be learned."""

    name: Text = "calculator"
    """a shipped task, or the dotted name of a module of your own"""
    reward: Text | None = None
    """a dotted name of your own (module:function) in the place of the task's reward"""
    reward_kwargs: Table = Field(default={})
    """options of the reward, as a TOML table or as JSON"""
    reward_timeout: PositiveFloat = 10.0
    """seconds that the reward of one answer may take; then its group is given up"""


class SamplingSection(Section):
    """How completions are drawn."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """completions per problem, compared with each other (a group)"""
    temperature: PositiveFloat | None = None
    """divides the logits before the softmax; None = 1, or what temp_scheduler says"""
    temp_scheduler: Literal["linear", "cosine"] | None = None
    """course of the temperature over train.max_steps; None = constant"""
    temp_start: PositiveFloat | None = None
    """temp_scheduler: temperature of the first weights"""
    temp_end: PositiveFloat | None = None
    """temp_scheduler: temperature of the weights that the last step learns from"""
    top_p: Fraction = 1.0
    """keep the most likely tokens up to this probability mass; 1 = off"""
    top_k: NonNegativeInt = 0
    """keep this many most likely tokens; 0 = off"""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """keep tokens at least this probable in proportion to the most likely one; 0 = off"""
    repetition_penalty: PositiveFloat = 1.0
    """above 1, tokens that prompt or completion already has become less likely; 1 = off"""
    min_tokens: NonNegativeInt = 0
    """generated tokens before a completion may end"""
    max_completion_length: PositiveInt = 48
    """generated tokens at most, the end token included"""
    stop: Text | None = None
    """a completion ends when its text has this string, which is then cut off"""


class EngineSection(Section):
    """The machinery that samples."""

    name: Text = "native"
    """a shipped engine, or a dotted name of your own (module:attribute)"""
    slots: PositiveInt = 32
    """completions sampled together; a finished one makes room for the next"""
    max_model_len: PositiveInt = 512
    """tokens of prompt and completion that a slot holds; memory grows with slots times this"""


class GeneratorSection(Section):
    """This one generator."""

    name: Text | None = None
    """name in metrics and logs; None = hostname-index"""
    index: NonNegativeInt = 0
    """which share of the problems this generator walks, from 0 to count - 1"""
    count: PositiveInt = 1
    """shares into which the problems are split, one per generator"""
    num_workers: PositiveInt = 1
    """processes that share the cores of the generator's machine"""


class TrainSection(Section):
    """The optimizer and its pace."""

    batch_size: PositiveInt = 128
    """rollouts per optimizer step, a multiple of sampling.num_generations"""
    token_batch_size: PositiveInt | None = None
    """tokens per optimizer step, of prompts and completions, in the place of batch_size"""
    max_steps: PositiveInt = 80
    """optimizer steps of the whole run"""
    optim: Literal["adamw", "adamw_bf16", "adamw_8bit"] = "adamw"
    """AdamW whose state is float32, bfloat16, or 8 bits (extra `optim`): 8, 4, 2 bytes a weight"""
    learning_rate: PositiveFloat = 2e-4
    """peak step size of AdamW"""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """course of the learning rate after the warm-up"""
    warmup_steps: NonNegativeInt = 0
    """steps in which the learning rate rises from 0 to its peak"""
    adam_beta1: Decay = 0.9
    """memory of AdamW's mean of gradients"""
    adam_beta2: Decay = 0.95
    """memory of AdamW's mean of squared gradients"""
    weight_decay: NonNegativeFloat = 0.0
    """pull of the weights towards 0, decoupled from the gradient"""
    max_grad_norm: PositiveFloat = 1.0
    """longer gradients are scaled down to this norm"""
    max_tokens_per_microbatch: PositiveInt = 16384
    """tokens in one forward and backward pass; less memory, same gradient"""
    oversize: Literal["truncate", "drop"] = "truncate"
    """rollouts longer than max_tokens_per_microbatch: train their beginning, or not at all"""
    keep_zero_std: bool = False
    """learn also from groups whose rewards are all equal: a reference, a teacher or an entropy
    bonus pulls there too; compared over the whole step (token_whitening) they have advantages"""
    num_iterations: PositiveInt = 1
    """updates of the optimizer in one step, each on its share of the groups (mini-batches)"""
    ref_sync_steps: PositiveInt | None = None
    """steps between two refreshes of the reference from the policy; None = it stays the base"""
    ref_mixup_alpha: Fraction = 1.0
    """share of the policy in a refreshed reference; the rest is the reference before"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of the matrix products; weights and gradients stay float32"""
    gradient_checkpointing: bool = False
    """compute each layer again in the backward pass; less memory, a third more time"""
    max_async_level: NonNegativeInt = 1
    """steps' worth of groups that generators run ahead of the newest weights; 0 = on-policy"""
    max_off_policy_steps: NonNegativeInt = 8
    """groups sampled by weights older than this many steps are dropped"""
    max_mismatch_kl: PositiveFloat = 0.1
    """a generator whose logprobs are farther than this from the trainer's is reported"""
    on_mismatch: Literal["report", "drop"] = "report"
    """what becomes of the groups of such a generator: trained all the same, or set aside"""
    num_workers: PositiveInt = 1
    """processes that share the cores of the trainer's machine"""


class WireSection(Section):
    """Where trainer and generators meet."""

    host: Text = "127.0.0.1"
    """machine of the trainer, as generators reach it"""
    port: Port = 5555
    """port for rollouts; announcements, counters and hellos use the three after it"""
    bind: Text = "127.0.0.1"
    """address on which the trainer listens; 0.0.0.0 = every network of its machine"""
    hwm: PositiveInt = 1
    """groups that one generator's queue holds before it waits"""


class WeightsSection(Section):
    """Where the trainer publishes and generators look."""

    dir: Text | None = None
    """folder that all machines see, s3://BUCKET/PREFIX, or for generators http://TRAINER:PORT;
    None = weights in the run's folder"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """number format of published weights; only bfloat16 makes small deltas"""
    keyframe_interval: PositiveInt = 10
    """every so many versions one is whole, the others are deltas; 1 = all whole"""
    keep_last: PositiveInt = 3
    """newest versions to keep, with what they are made from"""
    keep_interval: PositiveInt | None = None
    """keep every so many versions for good; None = none"""
    keep_seconds: NonNegativeFloat = 10.0
    """older versions stay so long for slow readers; 600 suits a NAS"""
    poll_seconds: PositiveFloat = 2.0
    """seconds between two looks at the folder when nothing was announced"""
    wait_for_weights_timeout: PositiveFloat | None = None
    """seconds after which a generator gives up waiting for its first weights; None = never"""
    update: Literal["in_flight", "between_groups"] = "in_flight"
    """apply a new version between two tokens, or when no group is under way"""
    max_mbit_per_s: PositiveFloat | None = None
    """share of a slow link that publishing may take; None = all"""
    serve_port: Port | None = None
    """port on which the trainer serves its weights folder over HTTP; None = not served"""
    token_file: Text | None = None
    """file of mode 0600 with the password for serve_port, the same on every machine"""


class CheckpointSection(Section):
    """What a restarted trainer continues from."""

    interval: PositiveInt = 20
    """optimizer steps between two checkpoints"""
    keep_last: PositiveInt | None = 2
    """newest checkpoints to keep; None here and in keep_interval = all"""
    keep_interval: PositiveInt | None = None
    """keep besides every checkpoint whose step is a multiple of this"""
    keep_journal: bool = False
    """keep the journal of steps older than every checkpoint, for bin/replay of the whole run"""
    resume_step: Annotated[int, Field(ge=-1)] = -1
    """roll back, once, to the checkpoint of this step; -1 = go on from the newest"""


class SecuritySection(Section):
    """Who may connect to the trainer."""

    keys: Text | None = None
    """folder of keys, made with bin/doctor keygen; None = everyone, without encryption"""
    insecure: bool = False
    """listen beyond this machine without keys"""


class DashboardSection(Section):
    """The page that the trainer shows."""

    enabled: bool = True
    """whether there is one while the trainer runs"""
    host: Text = "127.0.0.1"
    """address on which it listens; any other than this machine's own needs a token_file"""
    port: Port = 8470
    """port of the page; a taken one gives way to the next"""
    token_file: Text | None = None
    """file of mode 0600 with the password of the page; None = none"""


class LogSection(Section):
    """Messages."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """the least important messages to show"""
