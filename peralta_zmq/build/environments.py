"""Environments of a run: problems, reward functions, and the pool that calls them."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal, cast

from peralta_zmq import models, registry
from peralta_zmq.addresses import host_and_port, read_private_token
from peralta_zmq.config import Config
from peralta_zmq.config.training_sections import EnvSection
from peralta_zmq.environments import rows_task
from peralta_zmq.environments.agents import AgentTask, LocalAgents
from peralta_zmq.environments.dataset import (
    Agents,
    Environments,
    Functions,
    labeled_problem,
    load_problems,
    read_problems,
)
from peralta_zmq.environments.reward_functions import (
    RewardFunction,
    completion_arguments,
    group_arguments,
    is_group_function,
)
from peralta_zmq.environments.reward_pool import LocalFunctions, RewardPool
from peralta_zmq.environments.turns import turns_of
from peralta_zmq.environments.verifier_client import RemoteEnvironment
from peralta_zmq.errors import ConfigError, TaskError, did_you_mean
from peralta_zmq.learning.demonstrations import Demonstrations, demonstration
from peralta_zmq.learning.packing import Packing
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.observe.terminal import track
from peralta_zmq.rollout import Problem, Rollout
from peralta_zmq.signatures import Signature, call_error

logger = logging.getLogger(__name__)
OWN_REWARD = "task"  # in task.reward: the reward function of the task


def open_environments(
    config: Config, split: Literal["train", "eval"], *, local: bool = False, limit: int = -1
) -> Environments:
    """All environments of a split, with at most `limit` problems each; -1 = no limit.

    The verifiers at `env.address` supply problems and rewards, unless `local`, as in the verifier
    itself. Shows a progress bar if loading takes long. Raises ConfigError or TaskError.
    """
    sections = config.environments if split == "train" else config.eval_environments
    sizes: dict[str, int] = {}
    problems: list[Problem] = []
    functions: dict[str, Functions] = {}
    agents: dict[str, Agents] = {}
    pool = make_reward_pool(config, is_verifier=local)
    for env in sections:
        is_remote = env.address is not None and not local
        if is_remote:
            source = _remote_environment(config, env)
        else:
            source = registry.resolve("task", env.task_name)
        loaded = load_problems(
            source.problems,
            split,
            seed=config.run.seed,
            options={} if is_remote else env.data_options,  # a verifier uses its own config's
            wrap=functools.partial(track, f"loading {env.label}"),
        )
        loaded = loaded if limit < 0 else loaded[:limit]
        if isinstance(source, RemoteEnvironment):
            functions[env.label] = source
        elif isinstance(source, AgentTask):
            if local:
                raise ConfigError(f"{env.task_name}: an agent runs beside a generator only")
            agents[env.label] = LocalAgents(
                source.agent,
                make_agent_pool(config),
                model=config.run.name,
                max_turns=config.task.max_turns,
            )
            loaded = [labeled_problem(problem, env.label) for problem in loaded]
        else:
            rewards = make_reward_functions(config, env, source, example=loaded[0])
            if any(each.function is rows_task.reward for each in rewards):
                rows_task.check_answers(loaded)
            turns = turns_of(source)  # some tasks have them after loading
            functions[env.label] = LocalFunctions(rewards, pool, turns)
            # A verifier has labeled its problems.
            loaded = [labeled_problem(problem, env.label) for problem in loaded]
        schemas = functions[env.label].schemas if env.label in functions else ()
        variables = _template_variables(env, schemas)
        problems += [replace(problem, chat_template_kwargs=variables) for problem in loaded]
        sizes[env.label] = len(loaded)
    return Environments(sizes, tuple(problems), functions, pool, agents)


def _template_variables(env: EnvSection, schemas: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {**env.chat_template_kwargs, **({"tools": list(schemas)} if schemas else {})}


def _remote_environment(config: Config, env: EnvSection) -> RemoteEnvironment:
    return RemoteEnvironment(
        [host_and_port(address, option="env.address") for address in env.address or ()],
        env=env.label,
        token=read_private_token(config.security.token_file),
        reward_timeout=config.task.reward_timeout,
    )


def make_reward_pool(config: Config, *, is_verifier: bool) -> RewardPool:
    section = config.task
    spare_cores = models.available_cores() // config.run.num_workers
    return RewardPool(
        num_workers=section.reward_workers or max(1, spare_cores),
        timeout_seconds=section.reward_timeout,
        queue_limit=256 if is_verifier else config.engine.slots,  # waiting completions
    )


def make_agent_pool(config: Config) -> RewardPool:
    slots = config.engine.slots
    return RewardPool(
        num_workers=0,
        num_awaiting=min(4, slots),  # an agent that blocks its process ends all agents there
        concurrency=-(-slots // min(4, slots)),
        timeout_seconds=config.task.agent_timeout,
        queue_limit=slots,
    )


def make_demonstrations(
    config: Config, model: models.Model, scorer: Scorer
) -> Demonstrations | None:
    """The demonstrations of `loss.sft_file`, if set, as the tokens of a chat with the model.

    Raises TaskError for a file that cannot be read.
    """
    section = config.loss
    if section.sft_file is None:
        return None
    tokenizer = models.load_tokenizer(
        models.model_folder(config.model.name), trust_remote_code=config.model.trust_remote_code
    )
    env = config.environments[0]
    variables = _template_variables(env, _tool_schemas(config, env))
    vocab_size = int(model.config.vocab_size)
    end = models.end_of_turn(tokenizer, variables)
    end_ids = [cast(int, token) for token in (end, tokenizer.eos_token_id) if token is not None][:1]

    def rollout_of(problem: Problem) -> Rollout:
        prompt = problem.input_token_ids or models.chat_prompt(
            tokenizer, problem.messages, **variables
        )
        completion = tokenizer.encode(problem.answer, add_special_tokens=False)
        if (token := max([*prompt, *completion, *end_ids])) >= vocab_size:
            raise TaskError(
                f"row {problem.row} of loss.sft_file has token {token}, but the model has "
                f"{vocab_size}; resize its embeddings to the tokenizer, or remove the added tokens"
            )
        return demonstration([*prompt], [*completion, *end_ids])

    demonstrated = read_problems(
        section.sft_file,
        "sft",
        prompt_column="prompt",
        answer_column="completion",
        system_prompt=env.system_prompt or "",
    )
    rollouts = [*map(rollout_of, demonstrated)]
    limit = config.train.max_tokens_per_microbatch
    if num_long := sum(len(rollout.token_ids) > limit for rollout in rollouts):
        logger.warning(
            "%d of %d demonstrations in loss.sft_file are longer than "
            "train.max_tokens_per_microbatch %d: their beginning is trained",
            num_long, len(rollouts), limit,
        )  # fmt: skip
    return Demonstrations(
        rollouts=rollouts,
        weight=section.sft_weight,
        batch_size=max(1, config.train.batch_size // 8),  # one for eight rollouts
        seed=config.run.seed,
        compute_logprobs=scorer,
        packing=Packing(max_tokens=limit, share_prompts=scorer.packs),
    )


def _tool_schemas(config: Config, env: EnvSection) -> Sequence[Mapping[str, Any]]:
    """The schemas of the tools of an environment, as in its rollouts.

    Raises ConfigError or TaskError.
    """
    if env.address is not None:
        with closing(_remote_environment(config, env)) as remote:
            remote.problems("train", config.run.seed)
        return remote.schemas
    task = registry.resolve("task", env.task_name)
    if hasattr(task, "tool_schemas"):  # which may be known after loading
        next(iter(task.problems("train", config.run.seed, **env.data_options)), None)
    turns = turns_of(task)
    return turns.schemas if turns else ()


# Reward functions.


def make_reward_functions(
    config: Config, env: EnvSection, task: registry.Task, *, example: Problem
) -> list[RewardFunction]:
    """The reward functions of an environment with their options and weights.

    They may have the fields of `example`, a problem, as parameters. Raises ConfigError for
    functions that cannot be imported or called, and for options of no function.
    """
    has_turns = config.task.max_turns > 1 and turns_of(task) is not None
    length = config.engine.max_model_len if has_turns else config.max_completion_length_of(env)
    weights = env.reward_weights or [1.0] * len(env.reward)
    if len(env.reward) < 2:
        name = env.reward[0] if env.reward else OWN_REWARD
        function = _reward_function(name, task, env.reward_kwargs, example, length=length)
        return [replace(function, weight=weights[0] if weights else 1.0)]
    labels = env.reward_labels
    for label, options in env.reward_kwargs.items():
        if label not in labels or not isinstance(options, Mapping):
            hint = "" if label in labels else did_you_mean(label, labels)
            raise ConfigError(
                f"reward_kwargs.{label} is not a table of options of one of the functions "
                f"{', '.join(labels)}; {hint or 'give one table for each function'}"
            )
    if len(set(labels)) < len(labels):
        raise ConfigError(
            f"reward {', '.join(env.reward)}: two functions have the same name in metrics; "
            "give each function its own name"
        )
    functions: list[RewardFunction] = []
    for name, label, weight in zip(env.reward, labels, weights, strict=True):
        options = env.reward_kwargs.get(label, {})
        function = _reward_function(
            name, task, options, example, length=length, takes_group=name != OWN_REWARD
        )
        functions.append(replace(function, label=label, weight=weight))
    return functions


def _reward_function(
    name: str,
    task: registry.Task,
    options: Mapping[str, Any],
    example: Problem,
    *,
    length: int,
    takes_group: bool = False,
) -> RewardFunction:
    """A reward function, which may have TRL's signature, or must have it if `takes_group`.

    `length` is the default of its parameter max_completion_length.
    """
    if name == OWN_REWARD:
        function: Callable[..., Any] = task.reward
        path = f"{task.__name__}:reward" if isinstance(task, ModuleType) else ""
        is_bounded = _is_bounded(task, function)
    else:
        function = registry.resolve("reward", name)
        path = registry.import_path("reward", name)
        is_bounded = False
    if takes_group or (name != OWN_REWARD and is_group_function(function)):
        options = _group_options(name, function, options, example, length=length)
        is_bounded = _is_bounded(function, function)
        return RewardFunction(function, options, is_bounded, takes_group=True, path=path)
    columns = Signature(function, 2).accepted(completion_arguments(example))
    if error := call_error(function, None, None, **{**columns, **options}):
        raise ConfigError(
            f"task.reward_kwargs do not fit the reward function: {error}; "
            "change task.reward_kwargs or task.reward"
        )
    return RewardFunction(function, options, is_bounded, path=path)


def _is_bounded(owner: object, function: Callable[..., Any]) -> bool:
    """Whether `owner` declares a limited run time for a function, which a coroutine never has."""
    is_declared = getattr(owner, "REWARD_IS_BOUNDED", False)
    return is_declared and not inspect.iscoroutinefunction(function)


def _group_options(
    name: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    example: Problem,
    *,
    length: int,
) -> dict[str, Any]:
    """The options of a function with TRL's signature.

    Raises ConfigError for unknown options, and for parameters that nothing supplies.
    """
    signature = Signature(function)
    available = group_arguments(example, ["text"], [()])
    for option in options:
        if option in available or not signature.accepts(option):
            names = [each for each in signature.names if each not in available]
            raise ConfigError(
                f"reward_kwargs: '{option}' is not an option of reward function '{name}'; "
                f"its options are {', '.join(names) or 'none'}"
            )
    filled = dict(options)
    if "max_completion_length" in signature.names:
        filled.setdefault("max_completion_length", length)
    missing = [name for name in signature.required if name not in {*available, *filled}]
    if missing:
        raise ConfigError(
            f"reward function '{name}' needs '{missing[0]}', which is neither an option in "
            f"reward_kwargs nor a field of the problems ({', '.join(sorted(available))}); "
            "set the option"
        )
    return filled
