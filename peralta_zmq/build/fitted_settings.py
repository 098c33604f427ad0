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
from peralta_zmq.build.engines import all_samplings
from peralta_zmq.build.environments import open_environments
from peralta_zmq.build.memory_checks import MemoryPlanner
from peralta_zmq.config import FITTED, Config, is_set, with_settings
from peralta_zmq.environments.dataset import Split
from peralta_zmq.errors import ConfigError
from peralta_zmq.memory import gib, read_shape
from peralta_zmq.rollout import Problem

ROLLOUTS = 64  # per step
MAX_COMPLETION = 1024  # tokens


class FittedConfig(NamedTuple):
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
    reasons: dict[str, str] = {}

    def choose(name: str, value: Any, reason: str) -> None:
        nonlocal config
        if name in unset:
            config = with_settings(config, {name: value})
            reasons[name] = reason

    choose("train.learning_rate", *_learning_rate(config, folder))
    choose("eval.interval", max(1, config.train.max_steps // 4), "1/4 of the run")
    lengths = _Lengths.of(config, folder, splits, local=local)
    group = max(config.group_sizes.values())
    num_groups = max(1, ROLLOUTS // group)
    is_small = lengths.num_trained < num_groups
    choose(
        "train.batch_size",
        min(num_groups, lengths.num_trained) * group,
        "a group of each training problem" if is_small else f"whole groups of {group}",
    )
    choose("sampling.max_completion_length", *_completion_length(config, lengths))
    completion = max(sampling.max_completion_length for sampling in all_samplings(config))
    if lengths.has_turns:  # room for four turns, with replies that are as long as completions
        completion *= 2 * min(config.task.max_turns, 4)
    length = min(_rounded(lengths.prompt + completion), lengths.context)
    longer = f"; {lengths.num_longer} are much longer" if lengths.num_longer else ""
    choose(
        "engine.max_model_len", length, f"the longest prompt has {lengths.prompt} tokens{longer}"
    )
    if "train.max_tokens_per_microbatch" in unset:
        choose("train.max_tokens_per_microbatch", *_microbatch(config, folder, memory_gib))
    return FittedConfig(config, reasons)


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


def _learning_rate(config: Config, folder: Path) -> tuple[float, str]:
    """A small model, and adapters, are trained with a higher rate."""
    if config.lora.rank is not None:
        return 1e-4, "LoRA"
    try:
        shape = read_shape(folder, trust_remote_code=config.model.trust_remote_code)
    except ConfigError:  # an architecture that cannot be planned
        return 1e-5, "full fine-tuning of a large model"
    size = f"full fine-tuning of {shape.num_parameters / 1e6:.3g} M parameters"
    return (1e-4 if shape.num_parameters < 20_000_000 else 1e-5), size


class _Lengths(NamedTuple):
    """Number and lengths of the problems; lengths are in tokens."""

    num_trained: int  # training problems, at least 1; ROLLOUTS if they were not read
    prompt: int  # longest of all splits, without the few that are much longer than others
    num_longer: int  # prompts that are much longer
    answer: int  # longest
    context: int  # longest sequence of the model
    thinks: bool  # the chat template has the mark of a model that writes its reasoning first
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
                has_turns |= bool(environments.agents)
                has_turns |= any(each.has_turns for each in environments.functions.values())
        problems.sort(key=_prompt_characters)
        # Much longer: over four times as long as 95 % of the prompts.
        usual = _prompt_characters(problems[int(0.95 * (len(problems) - 1))])
        kept = [problem for problem in problems if _prompt_characters(problem) <= 4 * usual]
        # Only the 200 longest prompts and answers by characters are tokenized.
        prompts = models.chat_prompts(tokenizer, kept[-200:])
        lengths = [len(prompt) for prompt in prompts if isinstance(prompt, list)]
        answers = sorted({problem.answer for problem in problems}, key=len)[-200:]
        encoded: list[list[int]] = tokenizer(answers, add_special_tokens=False)["input_ids"]
        return cls(
            num_trained=num_trained,
            prompt=max(lengths, default=0),
            num_longer=len(problems) - len(kept),
            answer=max(map(len, encoded), default=0),
            context=int(getattr(sizes, "max_position_embeddings", None) or 1 << 20),
            thinks="<think>" in str(tokenizer.chat_template or ""),
            has_turns=has_turns,
        )


def _prompt_characters(problem: Problem) -> int:
    texts = sum(len(message.content) for message in problem.messages)
    return max(texts, 4 * len(problem.input_token_ids))


def _completion_length(config: Config, lengths: _Lengths) -> tuple[int, str]:
    """Tokens of a completion: 256 to MAX_COMPLETION, less if a set context length needs it."""
    longest = MAX_COMPLETION if lengths.thinks else _rounded(2 * lengths.answer)
    tokens = min(MAX_COMPLETION, max(256, longest))
    limit = config.engine.max_model_len if is_set(config, "engine.max_model_len") else None
    room = (limit or lengths.context) - lengths.prompt
    if 16 <= room < tokens:
        return room, f"prompts of up to {lengths.prompt} tokens leave this much"
    if lengths.thinks:
        return tokens, "the model thinks before it answers"
    if tokens > 256:
        return tokens, f"the longest answer has {lengths.answer} tokens"
    return tokens, "the usual length of an answer"


def _microbatch(config: Config, folder: Path, memory_gib: float | None) -> tuple[int, str]:
    """Tokens of a micro-batch: the largest power of two from 1024 to 16384 that fits.

    Trainer and generators of this machine may use 70 % of the free memory.
    """
    smallest = max(1024, config.engine.max_model_len)
    try:
        planner = MemoryPlanner.of(config, folder, memory_gib=memory_gib)
    except ConfigError:
        return smallest, "the memory of this architecture cannot be planned"
    beside = (config.run.num_workers - 1) * planner.plan(config, "generator").peak
    free = planner.plan(config, "trainer").limit
    if memory_gib is None:
        free = min(free, models.free_bytes(models.choose_device(config.model.device)))
    tokens = 16384
    while tokens > smallest:
        changed = with_settings(config, {"train.max_tokens_per_microbatch": tokens})
        peak = planner.plan(changed, "trainer").peak
        if peak <= 0.7 * free - beside:
            return tokens, f"needs about {gib(peak)} of {gib(free)} GiB"
        tokens //= 2
    return smallest, f"the least for sequences of {config.engine.max_model_len} tokens"


def _rounded(tokens: int) -> int:
    """The next multiple of 64."""
    return -(-tokens // 64) * 64
