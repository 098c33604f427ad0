"""Defaults that follow the model, the data and the machine, for settings that the user leaves out.

The trainer chooses the settings FITTED before it starts, and publishes them with the weights:
generators adopt them. The run's config.toml holds them, so that a resumed run keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from peralta_zmq import models
from peralta_zmq.atomic_files import parse_object
from peralta_zmq.build.engines import make_eval_sampling, make_sampling
from peralta_zmq.build.environments import open_environments
from peralta_zmq.build.memory_checks import MemoryPlanner
from peralta_zmq.config import FITTED, Config, is_set, with_settings
from peralta_zmq.environments.dataset import Split
from peralta_zmq.errors import ConfigError
from peralta_zmq.memory import gib, read_shape
from peralta_zmq.rollout import Problem

SMALL_MODEL = 20_000_000  # parameters
ROLLOUTS = 64  # per step
MIN_COMPLETION = 256  # tokens
MAX_COMPLETION = 1024
THINKING_MARK = "<think>"  # in the chat template of a model that writes its reasoning first
MIN_ROOM = 16  # smallest completion length that a set context length may cause, in tokens
MULTIPLE = 64  # lengths are multiples of it
COUNTED = 200  # longest prompts and answers by characters, whose tokens are counted
USUAL_SHARE = 0.95  # prompts longer than LONGER times this quantile do not count
LONGER = 4
CONTEXT_TURNS = 4  # turns for which the context has room
EVALUATIONS = 4  # number of evaluations in a run
MIN_MICROBATCH = 1024  # tokens
MAX_MICROBATCH = 16384
MEMORY_SHARE = 0.7  # part of the free memory that trainer and generators of this machine may use


class FittedConfig(NamedTuple):
    """Settings of a run, and why the program chose some of them."""

    config: Config
    reasons: Mapping[str, str]  # by setting, such as train.learning_rate


def fit_settings(
    config: Config,
    *,
    splits: Sequence[Split] = ("train", "eval"),
    local: bool = False,
    memory_gib: float | None = None,
) -> FittedConfig:
    """The settings with the defaults that follow model, data and machine.

    Reads the data of `splits` and the tokenizer, not the weights. `local` is that of
    `open_environments`; `memory_gib` replaces the memory of this machine. Raises ConfigError or
    TaskError.
    """
    unset = [name for name in FITTED if not is_set(config, name)]
    if not unset:
        return FittedConfig(config, {})
    folder = models.model_folder(config.model.name)
    try:
        shape = read_shape(folder, trust_remote_code=config.model.trust_remote_code)
        num_parameters = shape.num_parameters
        size = f"{num_parameters / 1e6:.3g} M parameters"
    except ConfigError:  # an unknown architecture
        num_parameters = SMALL_MODEL
        size = "a large model"
    chosen: dict[str, tuple[Any, str]] = {}

    def choose(name: str, value: Any, reason: str) -> None:
        if name in unset:
            chosen[name] = (value, reason)

    has_adapters = config.lora.rank is not None
    choose(
        "train.learning_rate",
        1e-4 if has_adapters or num_parameters < SMALL_MODEL else 1e-5,
        "LoRA" if has_adapters else f"full fine-tuning of {size}",
    )
    group = max(config.group_sizes.values())
    interval = max(1, config.train.max_steps // EVALUATIONS)
    choose("eval.interval", interval, f"1/{EVALUATIONS} of the run")
    lengths = _Lengths.of(config, folder, splits, local=local)
    num_groups = max(1, ROLLOUTS // group)
    is_small = lengths.num_trained < num_groups
    choose(
        "train.batch_size",
        min(num_groups, lengths.num_trained) * group,
        "a group of each training problem" if is_small else f"whole groups of {group}",
    )
    completion, reason = _completion_length(config, lengths)
    choose("sampling.max_completion_length", completion, reason)
    config = with_settings(config, {name: value for name, (value, _) in chosen.items()})
    if "engine.max_model_len" in unset:
        completion = _longest_completion(config)
        if lengths.has_turns:  # replies are assumed to be as long as completions
            completion *= 2 * min(config.task.max_turns, CONTEXT_TURNS)
        length = min(_rounded(lengths.prompt + completion), lengths.context)
        choose("engine.max_model_len", length, lengths.prompt_text)
    config = with_settings(config, {name: value for name, (value, _) in chosen.items()})
    if "train.max_tokens_per_microbatch" in unset:
        tokens, reason = _microbatch(config, folder, memory_gib)
        chosen["train.max_tokens_per_microbatch"] = (tokens, reason)
        config = with_settings(config, {"train.max_tokens_per_microbatch": tokens})
    return FittedConfig(config, {name: reason for name, (_, reason) in chosen.items()})


def manifest_field(config: Config) -> str:
    """The settings FITTED as JSON, for `adopted`."""
    return json.dumps({name: attrgetter(name)(config) for name in FITTED})


def adopted(config: Config, field: str | None) -> Config:
    """A generator's settings, with those of the trainer that the generator leaves out.

    `field` is the `manifest_field` of a weight version. Raises ConfigError for invalid settings.
    """
    try:
        values = parse_object(field or "{}")
        unset = {
            name: values[name] for name in FITTED if name in values and not is_set(config, name)
        }
        return with_settings(config, unset)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the weights have invalid settings ({reason}); restart the trainer"
        ) from None


class _Lengths(NamedTuple):
    """Number and lengths of the problems; lengths are in tokens."""

    num_trained: int  # training problems, at least 1; ROLLOUTS if they were not read
    prompt: int  # longest of all splits, without the few that are much longer than others
    num_longer: int  # prompts that are much longer
    answer: int  # longest
    context: int  # of the model
    thinks: bool  # the chat template has THINKING_MARK
    has_turns: bool

    @classmethod
    def of(cls, config: Config, folder: Path, splits: Sequence[Split], *, local: bool) -> _Lengths:
        trust = config.model.trust_remote_code
        tokenizer = models.load_tokenizer(folder, trust_remote_code=trust)
        sizes = models.text_config(folder, trust_remote_code=trust)
        problems: list[Problem] = []
        num_trained = ROLLOUTS
        has_turns = False
        for split in splits:
            limit = config.eval.num_examples if split == "eval" else -1
            opened = open_environments(config, split, local=local, limit=limit)
            with closing(opened) as environments:
                if split == "train":
                    num_trained = max(1, len(environments.problems))
                problems += environments.problems
                has_turns = has_turns or bool(environments.reply_sources)
        problems.sort(key=_prompt_characters)
        usual = _prompt_characters(problems[int(USUAL_SHARE * (len(problems) - 1))])
        kept = [problem for problem in problems if _prompt_characters(problem) <= LONGER * usual]
        prompts = models.chat_prompts(tokenizer, kept[-COUNTED:])
        lengths = [len(prompt) for prompt in prompts if isinstance(prompt, list)]
        answers = sorted({problem.answer for problem in problems}, key=len)[-COUNTED:]
        encoded: list[list[int]] = tokenizer(answers, add_special_tokens=False)["input_ids"]
        return cls(
            num_trained=num_trained,
            prompt=max(lengths, default=0),
            num_longer=len(problems) - len(kept),
            answer=max(map(len, encoded), default=0),
            context=int(getattr(sizes, "max_position_embeddings", None) or 1 << 20),
            thinks=THINKING_MARK in str(tokenizer.chat_template or ""),
            has_turns=has_turns,
        )

    @property
    def prompt_text(self) -> str:
        """Why the context has its length."""
        if self.num_longer:
            return f"prompts of {self.prompt} tokens; {self.num_longer} are much longer"
        return f"the longest prompt has {self.prompt} tokens"


def _prompt_characters(problem: Problem) -> int:
    texts = sum(len(message.content) for message in problem.messages)
    return max(texts, 4 * len(problem.input_token_ids))


def _longest_completion(config: Config) -> int:
    """Largest number of sampled tokens in training and evaluation, in all environments."""
    samplings = [make_sampling(config, env, seed=0) for env in config.environments]
    samplings += [make_eval_sampling(config, env, seed=0) for env in config.eval_environments]
    return max(sampling.max_completion_length for sampling in samplings)


def _completion_length(config: Config, lengths: _Lengths) -> tuple[int, str]:
    """Tokens of a completion, and the reason."""
    longest = MAX_COMPLETION if lengths.thinks else _rounded(2 * lengths.answer)
    tokens = min(MAX_COMPLETION, max(MIN_COMPLETION, longest))
    limit = config.engine.max_model_len if is_set(config, "engine.max_model_len") else None
    room = (limit or lengths.context) - lengths.prompt
    if MIN_ROOM <= room < tokens:
        return room, f"prompts of up to {lengths.prompt} tokens leave this much"
    if lengths.thinks:
        return tokens, "the model thinks before it answers"
    if tokens > MIN_COMPLETION:
        return tokens, f"the longest answer has {lengths.answer} tokens"
    return tokens, "the usual length of an answer"


def _microbatch(config: Config, folder: Path, memory_gib: float | None) -> tuple[int, str]:
    """Tokens of a micro-batch: the largest power of two that fits, and the reason."""
    smallest = max(MIN_MICROBATCH, config.engine.max_model_len)
    try:
        planner = MemoryPlanner.of(config, folder, memory_gib=memory_gib)
    except ConfigError:
        return smallest, "the memory of this architecture cannot be planned"
    plan = planner.plan(config, "trainer")
    beside = (config.run.num_workers - 1) * planner.plan(config, "generator").peak
    free = plan.limit
    if memory_gib is None:
        free = min(free, models.free_bytes(models.choose_device(config.model.device)))
    limit = MEMORY_SHARE * free - beside
    tokens = MAX_MICROBATCH
    while tokens > smallest:
        changed = with_settings(config, {"train.max_tokens_per_microbatch": tokens})
        peak = planner.plan(changed, "trainer").peak
        if peak <= limit:
            return tokens, f"needs about {gib(peak)} of {gib(free)} GiB"
        tokens //= 2
    return smallest, f"the least for sequences of {config.engine.max_model_len} tokens"


def _rounded(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE
