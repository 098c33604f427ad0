"""Calls of agents, in reward workers that await calls; see agents.py."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from peralta_zmq.environments.reward_functions import checked_score, completion_arguments
from peralta_zmq.errors import RewardError
from peralta_zmq.rollout import Problem, Score
from peralta_zmq.signatures import Signature

FUNCTION = re.compile(r"[\w./-]+:[\w.]+")
OUTPUT_BYTES = 1 << 16  # the end of a command's output, which is read


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of an agent, in a reward worker that awaits calls."""

    agent: str  # MODULE:FUNCTION, or a command
    problem: Problem
    base_url: str
    api_key: str
    model: str
    max_turns: int
    is_async: ClassVar[bool] = True
    num_completions: ClassVar[int] = 1
    reports_timeout: ClassVar[bool] = False

    @property
    def names(self) -> tuple[str]:
        is_function = FUNCTION.fullmatch(self.agent)
        return (self.agent if is_function else f"{__name__}:{run_command.__name__}",)

    def start(self, function: Callable[..., Any]) -> Any:
        available = {
            **completion_arguments(self.problem),
            "answer": self.problem.answer,
            "problem": self.problem,
            "base_url": self.base_url,
            "api_key": self.api_key,
            "model": self.model,
            "max_turns": self.max_turns,
        }
        if function is run_command:
            return run_command(self.agent, available)
        arguments = Signature(function).accepted(available)
        if inspect.iscoroutinefunction(function):
            return function(**arguments)
        return asyncio.to_thread(function, **arguments)

    def checked(self, result: object) -> Score | str:
        try:
            return checked_score(result)
        except ValueError as error:
            return f"returned {error}"

    def result_of(self, result: Score | str) -> Score:
        if isinstance(result, str):
            raise RewardError(
                f"the agent of {self.problem.task} {result}, for problem {self.problem.id}; fix "
                "the agent (its time limit is task.agent_timeout)"
            )
        return result


async def run_command(command: str, available: Mapping[str, Any]) -> float:
    """The number in the last line that the command prints. Kills its processes if cancelled."""
    problem: Problem = available["problem"]
    content = {
        "id": problem.id,
        "messages": [{"role": each.role, "content": each.content} for each in problem.messages],
        "answer": problem.answer,
        **problem.info,
    }
    address = {
        "OPENAI_BASE_URL": available["base_url"],
        "OPENAI_API_KEY": available["api_key"],
        "OPENAI_MODEL": available["model"],
    }
    process = await asyncio.create_subprocess_exec(
        *shlex.split(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **address},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    output = b""
    try:
        process.stdin.write(json.dumps(content).encode())
        process.stdin.close()  # when all is written
        while part := await process.stdout.read(OUTPUT_BYTES):
            output = (output + part)[-OUTPUT_BYTES:]
        await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    lines = output.decode("utf-8", "replace").strip().splitlines()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}")
    try:
        return float(lines[-1])
    except (IndexError, ValueError):
        last = lines[-1] if lines else ""
        raise ValueError(f"the last line of its output, {last!r:.80}, is no number") from None
