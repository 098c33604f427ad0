"""Checks of the environments of a run: [task] and [data], or the tables [[env]] and [[eval.env]].

Raises ConfigError for the first contradiction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from peralta_zmq.addresses import host_and_port
from peralta_zmq.config import training_sections as training
from peralta_zmq.errors import ConfigError

# Settings of an [[env]] that have no effect in an [[eval.env]], and those that have.
TRAINING_ONLY = {"num_generations": "rollouts_per_example", "sampling": "eval_sampling"}


def check_environments(
    task: training.TaskSection,
    data: training.DataSection,
    *,
    env: Sequence[training.EnvSection],
    eval_env: Sequence[training.EnvSection],
) -> None:
    """Check that environments are defined in one way only, and each of them."""
    if env and (task.name is not None or data != training.DataSection()):
        raise ConfigError(
            "[[env]] and the settings of [task] or [data] exclude each other; "
            "move the settings into an [[env]]"
        )
    _check_args("data", data)
    _check_rewards("task", task)
    for option, rows in (("env", env), ("eval.env", eval_env)):
        _check_environment_rows(option, rows)
        for each in rows:
            _check_args(option, each)
            _check_rewards(option, each)
    for each in eval_env:
        _check_evaluation(each)
    for each in env if eval_env else ():
        for name in TRAINING_ONLY.values():
            if getattr(each, name) is not None:
                raise ConfigError(
                    f"env.{name} has no effect with [[eval.env]]; set eval.env.{name} instead"
                )


def _check_environment_rows(option: str, environments: Sequence[training.EnvSection]) -> None:
    """Check labels and addresses; `option` is env or eval.env, for errors."""
    for label, count in Counter(env.label for env in environments).items():
        if count > 1:
            raise ConfigError(
                f"{option}.name '{label}' is used by {count} environments; "
                "give each of them its own name"
            )
    for env in environments:
        for address in env.address or ():
            host_and_port(address, option=f"{option}.address")


def _check_evaluation(env: training.EnvSection) -> None:
    """Check that an environment that is only evaluated has no settings of the training."""
    for name, instead in TRAINING_ONLY.items():
        if getattr(env, name) is not None:
            raise ConfigError(
                f"eval.env.{name} has no effect in evaluations; set eval.env.{instead} instead"
            )


def _check_args(option: str, settings: training.DataSection) -> None:
    """Check that `args` has no data setting; `option` is data, env or eval.env."""
    for name in settings.args:
        if name in training.DataSection.model_fields:
            raise ConfigError(
                f"{option}.args.{name} is a setting of its own; set {option}.{name} instead"
            )


def _check_rewards(option: str, settings: training.RewardSettings) -> None:
    """Check that weights fit the reward functions; `option` is task, env or eval.env."""
    functions, weights = settings.reward_functions, settings.reward_weights
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"{option}.reward_weights has {len(weights)} numbers for {len(functions)} "
            f"{option}.reward_functions ({', '.join(functions) or 'none'}); give one for each"
        )
    if settings.reward is not None and functions and "task" not in functions:
        raise ConfigError(
            f"{option}.reward {settings.reward} is not among {option}.reward_functions "
            f"({', '.join(functions)}); remove it, or add `task`, which stands for it"
        )
