"""Adapter: the tasksets of the library verifiers as tasks (`verifiers:NAME`).

A taskset may come with an environment of its own, in which one agent has several turns. A problem
carries in `info` what a reward worker needs to build its task again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from peralta_zmq.environments.dataset import problem_id, unknown_option
from peralta_zmq.environments.tool_process import tool_messages
from peralta_zmq.environments.turns import Reply
from peralta_zmq.environments.verifiers_replay import library, prompt_of, replay
from peralta_zmq.errors import (
    ConfigError,
    TaskError,
    described,
    did_you_mean,
    import_extra,
)
from peralta_zmq.rollout import Message, Problem, Score
from peralta_zmq.signatures import Signature

PREFIX = "verifiers"
_mcp: Any = import_extra("mcp.server.mcpserver", extra=PREFIX, needed_by=f"task {PREFIX}:NAME")
TASKSETS = "verifiers.v1.tasksets"  # package of those that come with the library
HELD_OUT = 10  # one of this number of tasks is for evaluation
MAX_SKIPPED = 1000  # tasks in a row of the other split, in a taskset without end
OWN_OPTIONS = ("size", "eval_size", "system_prompt")  # those of this adapter


class VerifiersTask:
    """The task of one taskset. Raises ConfigError for a name that cannot be used."""

    def __init__(self, name: str) -> None:
        self._name = name
        _check_class(name)
        self.reward = reward
        self.reply: Callable[..., Reply] | None = None
        self.tool_schemas: Sequence[Any] = ()

    def problems(
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
            for number, task in enumerate(islice(tasks, count)):
                if number == 0:
                    self._check_task(env, task)
                if task.data.image:
                    raise _unusable(self._name, f"its tasks need the container {task.data.image}")
                yield self._problem(env, task, source)
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

    def _check_task(self, env: Any, task: Any) -> None:
        """Find the tools of a task, and whether it has several turns. Raises ConfigError."""
        if reason := _unsupported_task(task):
            raise _unusable(self._name, reason)
        for toolset, _ in _toolsets(env, task):
            if library.state.state_cls(type(toolset)) is not library.State:
                raise _unusable(self._name, f"the tools of {type(toolset).__name__} share a state")
            if getattr(toolset.config, "url", None):
                raise _unusable(self._name, f"{type(toolset).__name__} runs on another machine")
        self.tool_schemas = [tool.schema for tool in asyncio.run(_tools(env, task)).values()]
        if self.tool_schemas or type(env) is not library.SingleAgentEnv:
            self.reply = reply

    def _problem(self, env: Any, task: Any, source: str) -> Problem:
        messages = prompt_of(task.data)
        if task.data.prompt is None:  # the environment begins
            messages += asyncio.run(replay(env, task, ())).inserted
        data = task.data.model_dump(mode="json")
        answer = data.get("answer")
        tools = [schema["function"]["name"] for schema in self.tool_schemas]
        return Problem(
            problem_id((self._name, task.hash)),
            self._name,
            tuple(messages),
            answer="" if answer is None else str(answer),
            info={"source": source, "data": data, "tools": tools},
        )


# In reward workers.


def reply(problem: Problem, messages: Sequence[Message], *, tool_seconds: float = 0.0) -> Reply:
    """The results of tools that a completion calls, or the messages of the environment."""
    env, task = _task_of(problem)
    agent = asyncio.run(_replay(problem, env, task, messages))
    if agent.calls:
        tools = {name: _tool_function(env, task, name) for name in problem.info["tools"]}
        return tool_messages(agent.calls, tools, timeout_seconds=tool_seconds)
    return None if agent.has_ended else agent.inserted


def reward(problem: Problem, completion_text: str, messages: Sequence[Message] = ()) -> Score:
    """The weighted sum of the taskset's rewards; by name, its unweighted rewards and metrics."""
    env, task = _task_of(problem)
    episode = messages or [Message("assistant", completion_text)]
    agent = asyncio.run(_replay(problem, env, task, [*problem.messages, *episode], ends=True))
    trace = agent.trace
    if not trace.rewards:
        raise TaskError("the taskset gave no reward")
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    return Score(trace.reward, {**trace.metrics, **rewards})


def _replay(
    problem: Problem, env: Any, task: Any, messages: Sequence[Message], *, ends: bool = False
) -> Any:
    after_prompt = messages[len(prompt_of(task.data)) :]
    return replay(env, task, after_prompt, has_tools=bool(problem.info["tools"]), ends=ends)


def _task_of(problem: Problem) -> tuple[Any, Any]:
    env = _environment(problem.info["source"])
    task_class = type(env.taskset).task_type()
    data = task_class.data_type().model_validate(problem.info["data"])
    return env, task_class(data, env.taskset.config.task)


@functools.lru_cache(maxsize=64)
def _environment(source: str) -> Any:
    """The environment with the taskset; `source` is a JSON list of its name and its options."""
    name, options = json.loads(source)
    config_class = library.env_config_type(name)
    taskset_class = library.taskset_config_type(name)
    of_taskset = set(taskset_class.model_fields) - {"id", "system_prompt"}
    of_env = set(config_class.model_fields) - set(library.EnvConfig.model_fields) - {*_agents(name)}
    for option in options:
        if option not in of_taskset | of_env:
            names = sorted({*of_taskset, *of_env, *OWN_OPTIONS})
            raise unknown_option(f"task {PREFIX}:{name}", option, names)
    taskset = {key: value for key, value in options.items() if key in of_taskset}
    rest = {key: value for key, value in options.items() if key not in of_taskset}
    try:
        config = config_class.model_validate({**rest, "taskset": {"id": name, **taskset}})
        return library.environment_class(name)(config)
    except (TypeError, ValueError) as error:  # pydantic's is a ValueError
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"task {PREFIX}:{name} refuses its options {options}: {reason:.300}; correct data.args"
        ) from None


# Tools.


class _Tool(NamedTuple):
    server: Any
    name: str  # on the server
    schema: dict[str, Any]


def _toolsets(env: Any, task: Any) -> list[tuple[Any, bool]]:
    """The toolsets of a task and of its taskset, and whether they are set up for a task."""
    of_task = type(task).toolsets(task.config)
    taskset = env.taskset
    shared = type(taskset).toolsets(taskset.config)
    return [*((each, True) for each in of_task), *((each, False) for each in shared)]


async def _tools(env: Any, task: Any) -> dict[str, _Tool]:
    tools: dict[str, _Tool] = {}
    for toolset, is_of_task in _toolsets(env, task):
        await toolset.setup()
        if is_of_task:
            await toolset.setup_task(task.data)
        server = _mcp.MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        for tool in await server.list_tools():
            name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
            function = {"name": name, "description": tool.description or ""}
            function["parameters"] = tool.input_schema
            tools[name] = _Tool(server, tool.name, {"type": "function", "function": function})
    return tools


def _tool_function(env: Any, task: Any, name: str) -> Callable[..., str]:

    async def result(arguments: dict[str, Any]) -> str:
        tool = (await _tools(env, task))[name]
        called = await tool.server.call_tool(tool.name, arguments)
        return "\n".join(block.text for block in called.content if block.type == "text")

    def call(**arguments: Any) -> str:
        return asyncio.run(result(arguments))

    call.__name__ = name
    return call


# Which tasksets can be used.


def _check_class(name: str) -> None:
    try:
        reason = _unsupported_class(name, library.utils.loaders.taskset_class(name))
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
    if reason:
        raise _unusable(name, reason)


def _unsupported_class(name: str, taskset_class: Any) -> str:
    env_class = library.environment_class(name)
    task_class = taskset_class.task_type()
    agents = _agents(name)
    if len(agents) != 1:
        return f"its environment has several agents ({', '.join(agents)})"
    if library.default_harness_id(name) == name:
        return "it has a harness of its own"
    if task_class.NEEDS_CONTAINER:
        return "its tasks need a container"
    for method in ("setup", "finalize"):
        if getattr(task_class, method) is not getattr(library.Task, method):
            return f"its tasks prepare or read a runtime ({method})"
    for method in ("start", "stop"):
        if getattr(env_class, method) is not getattr(library.Env, method):
            return f"its environment has resources for many episodes ({method})"
    return ""


def _unsupported_task(task: Any) -> str:
    for function in (*task.hooks("metric"), *task.hooks("reward")):
        if "runtime" in Signature(function).required:
            return f"its function {function.__name__} needs a runtime"
    for function in task.hooks("stop"):
        if library.session.hook_boundary(function, allow_trace=True) is not library.Trace:
            return f"its function {function.__name__} stops requests or responses, not the trace"
    for judge in task.plugged_judges():
        if "runtime" in Signature(judge.score).names:
            return f"its judge {judge.reward_name} needs a runtime"
    if library.utils.decorators.discover_decorated(task, "intercept"):
        return "its tasks intercept requests or responses"
    return ""


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
