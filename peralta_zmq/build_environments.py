"""From the settings to what is asked and who judges: all environments as one set of problems.

Knows the config, tasks and verifiers; knows nothing of loops.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import length_hint
from typing import Any, Literal, TypeAlias

from peralta_zmq import environments, registry
from peralta_zmq.config import Config
from peralta_zmq.config.schema import host_and_port
from peralta_zmq.config.training_sections import EnvSection
from peralta_zmq.environments.problems import identity
from peralta_zmq.environments.reward_runner import RewardRunner
from peralta_zmq.environments.verifier_client import Remote
from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.observe.progress import progress_on
from peralta_zmq.password import read_token
from peralta_zmq.rollout import Problem

Split: TypeAlias = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Environments:
    """The problems of all environments one after the other, and who judges. Use with `closing`."""

    sizes: Mapping[str, int]  # problems of each, by name
    problems: tuple[Problem, ...]
    judges: Mapping[str, RewardRunner | Remote]

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """What an answer is worth where the problem comes from. Raises RewardError."""
        return self.judges[problem.task].reward(problem, completion_text)

    def close(self) -> None:
        """End the processes that judge."""
        for judge in self.judges.values():
            judge.close()

    @property
    def digest(self) -> bytes:
        """8 bytes that tell this set of problems, in this order, from any other."""
        told = "\n".join(each.id for each in self.problems)
        return hashlib.sha256(told.encode()).digest()[:8]


def open_environments(
    config: Config, split: Split, *, here: bool = False, limit: int = -1
) -> Environments:
    """The problems to train on, or those held out: at most `limit` of each environment.

    An environment with an address asks its verifier, unless all are judged `here`. What takes long
    shows its progress on standard error. Raises ConfigError or TaskError for one that cannot be
    opened.
    """
    chosen = config.environments if split == "train" else config.eval_environments
    sizes: dict[str, int] = {}
    problems: list[Problem] = []
    judges: dict[str, RewardRunner | Remote] = {}
    for env in chosen:
        task = _task_of(config, env, here=here)
        options = {} if isinstance(task, Remote) else env.data_options
        watch = partial(_watched, what=f"loading {env.label}")
        loaded = environments.load(task, split, seed=config.run.seed, options=options, watch=watch)
        named = [_named(each, env.label, config.curriculum.hash_keys) for each in loaded]
        kept = named if limit < 0 else named[:limit]
        sizes[env.label] = len(kept)
        judges[env.label] = task if isinstance(task, Remote) else judge_of(config, task)
        problems += kept
    return Environments(sizes, tuple(problems), judges)


def judge_of(config: Config, task: registry.Task) -> RewardRunner:
    """What tells how much an answer is worth: the task's reward, or the one that [task] names.

    Raises ConfigError for options that it does not take.
    """
    chosen = config.task
    function: Callable[..., Any] = task.reward
    if chosen.reward is not None:
        function = registry.resolve("reward", chosen.reward)
    try:
        inspect.signature(function).bind(None, None, **chosen.reward_kwargs)
    except TypeError as error:
        raise ConfigError(f"task.reward_kwargs do not fit the reward: {error}") from None
    return RewardRunner(
        function,
        deadline_seconds=chosen.reward_timeout,
        options=chosen.reward_kwargs,
        bounded=chosen.reward is None and getattr(task, "REWARD_IS_BOUNDED", False),
    )


def check_tokens(problems: Sequence[Problem], vocab_size: int) -> None:
    """Raise TaskError for `input_token_ids` that the model does not have."""
    for problem in problems:
        if problem.input_token_ids and max(problem.input_token_ids) >= vocab_size:
            raise TaskError(
                f"problem {problem.id} of '{problem.task}' has the token "
                f"{max(problem.input_token_ids)} in input_token_ids, but the model has "
                f"{vocab_size}; tokenize it with this model's tokenizer"
            )


def _watched(problems: Iterator[Problem], *, what: str) -> Iterator[Problem]:
    """The same, with progress where the task tells how many are to come."""
    with progress_on(what, length_hint(problems)) as progress:
        for done, problem in enumerate(problems):
            progress.reach(done)
            yield problem


def _task_of(config: Config, env: EnvSection, *, here: bool) -> registry.Task | Remote:
    if env.address is None or here:
        return registry.resolve("task", env.task)
    host, port = host_and_port(env.address, option="env.address")
    token = read_token(config.verifier.token_file, option="verifier.token_file")
    return Remote(host, port, env=env.label, token=token)


def _named(problem: Problem, label: str, keys: Sequence[str]) -> Problem:
    """The problem under the name of its environment, with the identity that the run wants."""
    asked = [each.content for each in problem.messages if each.role != "system"]
    values = {
        "task": label,
        "prompt": "\n".join(asked) or problem.question,
        "answer": problem.answer,
        "id": problem.id,
    }
    return replace(problem, task=label, id=identity([values[key] for key in keys]))
