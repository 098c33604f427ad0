"""Environments of a run: problems, reward functions, and the pool that calls them.

An environment is a source of problems with reward functions; a verifier is a service that runs
environments for generators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from peralta_zmq import models, registry
from peralta_zmq.config import Config
from peralta_zmq.config.schema import host_and_port
from peralta_zmq.config.training_sections import EnvSection
from peralta_zmq.environments.dataset import (
    Environments,
    RewardSource,
    labeled_problem,
    load_problems,
)
from peralta_zmq.environments.reward_functions import RewardFunction
from peralta_zmq.environments.reward_pool import LocalRewards, RewardPool
from peralta_zmq.environments.verifier_client import RemoteEnvironment
from peralta_zmq.errors import ConfigError
from peralta_zmq.http_server import read_private_token
from peralta_zmq.observe.terminal import track
from peralta_zmq.rollout import Problem

VERIFIER_QUEUE = 256  # completions that may wait for a reward worker of a verifier


def open_environments(
    config: Config, split: Literal["train", "eval"], *, local: bool = False, limit: int = -1
) -> Environments:
    """All environments of a split, with at most `limit` problems each; -1 = no limit.

    For an environment with `env.address`, the verifiers at these addresses supply problems and
    rewards. With `local` True, as in the verifier itself, the address is ignored. Shows a progress
    bar if loading takes long. Raises ConfigError or TaskError.
    """
    sections = config.environments if split == "train" else config.eval_environments
    sizes: dict[str, int] = {}
    problems: list[Problem] = []
    reward_sources: dict[str, RewardSource] = {}
    pool = make_reward_pool(config, is_verifier=local)
    for env in sections:
        task: registry.Task | None = None
        if env.address is None or local:
            task = registry.resolve("task", env.task)
            load, options = task.problems, env.data_options
        else:
            reward_sources[env.label] = remote = _remote_environment(config, env)
            load, options = remote.problems, {}  # a verifier uses the options of its own config
        with_progress = functools.partial(track, f"loading {env.label}")
        loaded = load_problems(
            load, split, seed=config.run.seed, options=options, wrap=with_progress
        )
        loaded = loaded[: None if limit < 0 else limit]
        if task is not None:
            functions = make_reward_functions(env, task)
            reward_sources[env.label] = LocalRewards(functions, pool)
        keys = config.curriculum.hash_keys  # a problem's id is a hash of these parts
        problems += [labeled_problem(problem, env.label, keys) for problem in loaded]
        sizes[env.label] = len(loaded)
    return Environments(sizes, tuple(problems), reward_sources, pool)


def _remote_environment(config: Config, env: EnvSection) -> RemoteEnvironment:
    return RemoteEnvironment(
        [host_and_port(address, option="env.address") for address in env.address or ()],
        env=env.label,
        token=read_private_token(config.verifier.token_file, option="verifier.token_file"),
        concurrency=config.task.reward_concurrency,
        reward_timeout=config.task.reward_timeout,
    )


def make_reward_pool(config: Config, *, is_verifier: bool) -> RewardPool:
    """The pool of processes that call reward functions of this machine's environments."""
    section = config.task
    spare_cores = models.available_cores() // config.generator.num_workers
    return RewardPool(
        num_workers=section.reward_workers or max(1, spare_cores),
        concurrency=section.reward_concurrency,
        timeout_seconds=section.reward_timeout,
        queue_limit=VERIFIER_QUEUE if is_verifier else config.engine.slots,
    )


# Reward functions.


def make_reward_functions(env: EnvSection, task: registry.Task) -> list[RewardFunction]:
    """The reward functions of an environment with their options.

    Raises ConfigError for functions that cannot be imported or called, and for options of no
    function.
    """
    return [_own_function(env, task, env.reward_kwargs)]


def _own_function(
    env: EnvSection,
    task: registry.Task,
    options: Mapping[str, Any],
    *,
    label: str = "",
    weight: float = 1.0,
) -> RewardFunction:
    """The reward function of the task, or of the setting `reward`."""
    function: Callable[..., Any] = task.reward
    if env.reward is not None:
        function = registry.resolve("reward", env.reward)
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        raise ConfigError(
            f"task.reward_kwargs do not fit the reward function: {error}; "
            "change task.reward_kwargs or task.reward"
        ) from None
    is_bounded = env.reward is None and getattr(task, "REWARD_IS_BOUNDED", False)
    return RewardFunction(function, options, is_bounded, label=label, weight=weight)
