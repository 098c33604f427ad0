"""Adapter: environments of the library verifiers as tasks (`verifiers:NAME`).

An episode is the agent of a problem (agents.py): verifiers' own Env runs it, with its harness,
runtime, tools and state, in a worker beside the generator. The model that it asks is the session.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import pkgutil
from collections.abc import Iterator
from itertools import islice
from typing import Any

from peralta_zmq.environments import verifiers_chat
from peralta_zmq.environments.agents import AgentTask
from peralta_zmq.environments.dataset import problem_id, unknown_option
from peralta_zmq.errors import (
    ConfigError,
    TaskError,
    described,
    did_you_mean,
    import_extra,
)
from peralta_zmq.rollout import Message, Problem, Score

PREFIX = "verifiers"
# Imported with this module, because the import takes longer than many a reward may take.
library: Any = import_extra("verifiers.v1", extra=PREFIX, needed_by=f"task {PREFIX}:NAME")
TASKSETS = "verifiers.v1.tasksets"  # package of those that come with the library
HELD_OUT = 10  # one of this number of tasks is for evaluation
MAX_SKIPPED = 1000  # tasks in a row of the other split, in a taskset without end
OWN_OPTIONS = ("size", "eval_size", "system_prompt")  # those of this adapter
KEY = "PERALTA_SESSION_API_KEY"  # environment variable; verifiers' runtimes do not inherit it


class VerifiersTask(AgentTask):
    """The task of one taskset. Raises ConfigError for a name that cannot be used."""

    def __init__(self, name: str) -> None:
        self._name = name
        _check_class(name)
        self.agent = f"{__name__}:{run_episode.__name__}"
        self.problems = self._problems

    def _problems(
        self,
        split: str,
        seed: int,  # unused: the order of the tasks is the taskset's
        *,
        size: int | None = None,
        eval_size: int = 100,
        system_prompt: str | None = None,
        **options: Any,
    ) -> Iterator[Problem]:
        """The tasks of a split; `options` are those of the taskset and of its environment.

        A tenth of the tasks, chosen by their prompt, is held out for evaluation. `size` and
        `eval_size` are the largest numbers of problems; None = all. `system_prompt` replaces that
        of the tasks. Raises ConfigError for an unknown option or an unsupported taskset, and
        TaskError if the tasks cannot be loaded, or the split has none.
        """
        count = size if split == "train" else eval_size
        if count is not None and count < 1:
            raise ConfigError(f"{count} tasks of {PREFIX}:{self._name}; use at least 1")
        source = json.dumps([self._name, options], sort_keys=True)
        env = _environment(source)
        if count is None and not env.taskset.bounded:
            raise ConfigError(f"taskset {PREFIX}:{self._name} has no end; set size in data.args")
        tasks = (
            task if system_prompt is None else task.with_system_prompt(system_prompt)
            for task in self._tasks(env, split)
        )
        try:
            for task in islice(tasks, count):
                _check_runtime(self._name, env, task)
                yield _problem(self._name, task, source)
        except (ConfigError, TaskError):
            raise
        except Exception as error:
            raise TaskError(f"taskset {PREFIX}:{self._name} raised {described(error)}") from error

    def _tasks(self, env: Any, split: str) -> Iterator[Any]:
        has_tasks = False
        num_skipped = 0  # since the last task of the split
        for task in env.taskset:
            if _is_held_out(task.data) is (split == "eval"):
                has_tasks = True
                num_skipped = 0
                yield task
                continue
            num_skipped += 1
            if num_skipped == MAX_SKIPPED and not env.taskset.bounded:
                has_tasks = False
                break
        if num_skipped and not has_tasks:
            some = "none" if split == "eval" else "each"
            raise TaskError(
                f"{some} of {num_skipped} tasks of {PREFIX}:{self._name} is held out for "
                f"evaluation (one of {HELD_OUT} is, by its prompt); use a taskset with more "
                "prompts, for evaluations in [[eval.env]]"
            )


def _problem(name: str, task: Any, source: str) -> Problem:
    data = task.data.model_dump(mode="json")
    answer = data.get("answer")
    return Problem(
        problem_id((name, task.hash)),
        name,
        tuple(_prompt_of(task.data)),
        answer="" if answer is None else str(answer),
        info={"source": source, "data": data},
    )


def _prompt_of(data: Any) -> Iterator[Message]:
    """The text of a task's prompt, for problem tables and samples."""
    if data.system_prompt:
        yield Message("system", data.system_prompt)
    if data.prompt is None:  # the environment begins
        yield Message("user", data.description or data.name or f"task {data.idx}")
    elif isinstance(data.prompt, str):
        yield Message("user", data.prompt)
    else:
        for each in data.prompt:
            message = library.dialects.parse_message(each) if isinstance(each, dict) else each
            if not isinstance(message.content, str | None) and any(
                part.type != "text" for part in message.content
            ):
                raise TaskError("a prompt has an image; only text is supported")
            yield Message(message.role, library.types.content_text(message.content))


# In workers of agents.


async def run_episode(problem: Problem, base_url: str, api_key: str, max_turns: int) -> Score:
    """Run the episode of a problem, whose model is the session at `base_url`.

    Returns the weighted sum of the taskset's rewards; by name, its unweighted rewards and metrics.
    Raises RuntimeError with the errors of an episode that failed.
    """
    source: str = problem.info["source"]
    env = await _served(source, max_turns)
    task_class = type(env.taskset).task_type()
    data = task_class.data_type().model_validate(problem.info["data"])
    # One address for all sessions, so that the library needs one client.
    server, _, key = base_url.removesuffix("/v1").rpartition("/rl/sessions/")
    os.environ[KEY] = api_key
    client = library.EvalClientConfig(base_url=f"{server}/v1", api_key_var=KEY)
    context = library.ModelContext(model=f"session:{key}", client=client)
    episode = await env.run_episode(task_class(data, env.taskset.config.task), context)
    if not episode.ok:
        errors = [*episode.errors, *(error for each in episode.traces for error in each.errors)]
        texts = [f"{error.type}: {' '.join(error.message.split()):.300}" for error in errors]
        raise RuntimeError("; ".join(texts) or "the episode failed")
    if len(episode.traces) != 1:
        raise RuntimeError(f"the environment ran its agent {len(episode.traces)} times, not once")
    (trace,) = episode.traces
    if not trace.rewards:
        raise RuntimeError("the taskset gave no reward")
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    return Score(trace.reward, {**trace.metrics, **rewards})


_environments: dict[tuple[str, int], asyncio.Future[Any]] = {}  # by source and maximum of turns
_serving = set[asyncio.Task[None]]()


async def _served(*key: Any) -> Any:
    """The environment with its shared resources, which this process keeps until it ends."""
    if key not in _environments:
        _environments[key] = asyncio.get_running_loop().create_future()
        _serving.add(asyncio.create_task(_serve(*key)))
    return await asyncio.shield(_environments[key])


async def _serve(*key: Any) -> None:
    ready = _environments[key]
    try:
        env = _environment(*key)
        async with env.serving():
            ready.set_result(env)
            await asyncio.Event().wait()
    except Exception as error:  # noqa: BLE001  an environment may raise anything
        del _environments[key]  # the next episode tries again
        if not ready.done():
            ready.set_exception(error)


@functools.lru_cache(maxsize=64)
def _environment(source: str, max_turns: int | None = None) -> Any:
    """The environment with the taskset; `source` is a JSON list of its name and its options."""
    name, options = json.loads(source)
    config_class = library.env_config_type(name)
    taskset_class = library.taskset_config_type(name)
    of_taskset = set(taskset_class.model_fields) - {"id", "system_prompt"}
    of_env = set(config_class.model_fields) - set(library.EnvConfig.model_fields)
    for option in options:
        if option not in of_taskset | of_env:
            names = sorted({*of_taskset, *of_env, *OWN_OPTIONS})
            raise unknown_option(f"task {PREFIX}:{name}", option, names)
    taskset = {key: value for key, value in options.items() if key in of_taskset}
    rest = {key: value for key, value in options.items() if key not in of_taskset}
    (agent,) = _agents(name)
    defaults: dict[str, Any] = {"runtime": {"type": "subprocess"}, "max_turns": max_turns}
    if library.default_harness_id(name) != name:
        defaults["harness"] = {"id": verifiers_chat.ID}
    try:
        rest[agent] = {**defaults, **rest.get(agent, {})}
        config = config_class.model_validate({**rest, "taskset": {"id": name, **taskset}})
        return library.environment_class(name)(config)
    except (ImportError, TypeError, ValueError) as error:  # pydantic's is a ValueError
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"task {PREFIX}:{name} refuses its options {options}: {reason:.300}; correct data.args"
        ) from None


# Which tasksets can be used.


def _check_class(name: str) -> None:
    try:
        library.utils.loaders.taskset_class(name)
        agents = _agents(name)
    except ModuleNotFoundError as error:
        missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
        if missing.name != module and not f"{missing.name}".startswith(TASKSETS):
            raise _unusable(name, f"its module cannot be imported ({missing})") from None
        raise _unknown(name) from None
    except Exception as error:  # noqa: BLE001  its module may raise anything
        reason = " ".join(str(error).split())
        is_old = "module 'verifiers'" in reason or "from 'verifiers'" in reason
        if is_old or _has_old_environment(name):
            reason = "it was made for verifiers before 0.4 (load_environment); it needs a Taskset"
        raise _unusable(name, reason) from None
    if len(agents) != 1:
        raise _unusable(name, f"its environment has several agents ({', '.join(agents)})")


def _check_runtime(name: str, env: Any, task: Any) -> None:
    """Raise ConfigError if the task or its harness needs a container, and none is set."""
    (agent,) = _agents(name)
    spec = getattr(env.config, agent)
    harness_id = spec.harness.id if spec.harness else name
    harness = library.utils.loaders.harness_class(harness_id)
    needs = type(task).NEEDS_CONTAINER or task.data.image or harness.NEEDS_CONTAINER
    if needs and spec.runtime.type == "subprocess":
        is_harness = harness.NEEDS_CONTAINER
        what = f"its harness {harness_id} needs" if is_harness else "its tasks need"
        image = f" {task.data.image}" if task.data.image else ""
        remedy = f'set {agent} = {{ runtime = {{ type = "podman" }} }} in data.args'
        raise _unusable(name, f"{what} a container{image}; {remedy}")


def _agents(name: str) -> list[str]:
    fields = library.env_config_type(name).model_fields
    return [each for each in fields if isinstance(fields[each].default, library.AgentConfig)]


def _has_old_environment(name: str) -> bool:
    try:
        return hasattr(library.import_taskset(name), "load_environment")
    except Exception:  # noqa: BLE001  its module may raise anything
        return False


def _is_held_out(data: Any) -> bool:
    """Whether a task is for evaluation: by its prompt, or without one by its whole content."""
    content = data.model_dump(mode="json", exclude={"idx", "id", "name", "description"})
    if data.prompt is not None:
        content = content["prompt"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT == 0


def _unknown(name: str) -> ConfigError:
    folders = (None, [f"{path}/tasksets" for path in library.__path__])
    modules = [each.name for folder in folders for each in pkgutil.iter_modules(folder)]
    hint = did_you_mean(name.replace("-", "_"), modules, f"{PREFIX}:{{}}")
    return ConfigError(
        f"unknown task {PREFIX}:{name}; {hint}{' Else ' * bool(hint)}install the package of the "
        "taskset, or put its module into a folder of PYTHONPATH"
    )


def _unusable(name: str, reason: str) -> ConfigError:
    return ConfigError(f"task {PREFIX}:{name} cannot be used: {reason}")
