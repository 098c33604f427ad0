"""Agents: programs that ask the generator for completions over HTTP, and return a reward.

The agent of task `agent:MODULE:FUNCTION` is a function, which may be a coroutine function:

    async def solve(problem, base_url, api_key, model): ...

It takes those of these parameters that it names, `answer`, `max_turns` (the limit of the run), and
the columns of the row by their names. An OpenAI client takes `base_url` and `api_key`, each of its
requests `model`. The result is that of a reward function.

The agent of task `agent:COMMAND` is a program. It gets the problem as a JSON object in its standard
input, and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment; the last line that
it prints is the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

from peralta_zmq.environments import rows_task
from peralta_zmq.environments.agent_calls import FUNCTION, AgentCall
from peralta_zmq.environments.reward_pool import RewardPool
from peralta_zmq.errors import ConfigError, described
from peralta_zmq.imports import import_object
from peralta_zmq.rollout import Problem, Score


class AgentTask:
    """The task of an agent: the rows of [data], unless its module has a function `problems`."""

    def __init__(self, name: str) -> None:
        if not name or name.endswith((".py", ":")):
            raise ConfigError(
                f"task agent:{name} names no agent; use agent:FILE.py:FUNCTION, "
                "agent:MODULE:FUNCTION or agent:COMMAND"
            )
        self.agent = name
        self.problems: Callable[..., Iterator[Problem]] = rows_task.problems
        if FUNCTION.fullmatch(name):
            try:
                import_object(name)
                module = import_object(name.rpartition(":")[0])
            except Exception as error:  # noqa: BLE001  a user's module may raise anything
                raise ConfigError(f"agent {name} cannot be imported: {described(error)}") from None
            self.problems = getattr(module, "problems", self.problems)


class LocalAgents:
    """The agents of an environment, in a pool of their own; implements dataset.Agents."""

    def __init__(self, agent: str, pool: RewardPool, *, model: str, max_turns: int) -> None:
        self._agent = agent
        self._pool = pool
        self._model = model
        self._max_turns = max_turns

    @property
    def has_room(self) -> bool:
        return self._pool.has_room(is_async=True)

    def run(self, problem: Problem, *, base_url: str, api_key: str) -> Future[Score]:
        call = AgentCall(self._agent, problem, base_url, api_key, self._model, self._max_turns)
        return self._pool.submit([call], lambda results: results[0])

    def close(self) -> None:
        self._pool.close()
