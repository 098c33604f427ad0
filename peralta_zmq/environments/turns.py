"""Further turns of an episode: the reply of the task, and the results of tools.

A task may define `reply(problem, messages)`, which returns the messages that follow a completion,
the last of `messages`, or None to end the episode. It may also have `tools`, a list of functions: a
completion that calls tools is followed by their results, without a call of `reply`. A task with
`tool_schemas` instead executes the calls itself, in `reply(problem, messages, tool_seconds=...)`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from peralta_zmq.environments.tool_calls import assistant_message, schema_of
from peralta_zmq.environments.tool_process import tool_messages
from peralta_zmq.errors import RewardError, TaskError
from peralta_zmq.rollout import Message, Problem
from peralta_zmq.signatures import call_error

REPLY_ROLES = ("system", "user", "tool")
Reply: TypeAlias = "list[Message] | None"


@dataclass(frozen=True, slots=True)
class Turns:
    """The functions of a task with several turns, each by the name MODULE:NAME."""

    reply: str = ""  # empty: a completion that calls no tool ends the episode
    is_async: bool = False  # `reply` is a coroutine function
    tools: Mapping[str, str] = field(default_factory=dict[str, str])  # by the name of the tool
    schemas: tuple[Mapping[str, Any], ...] = ()  # of the tools

    def call(
        self, problem: Problem, messages: Sequence[Message], *, tool_seconds: float
    ) -> ReplyCall | None:
        """The call for the messages that follow a completion; None if the episode ends."""
        *earlier, last = messages
        if self.tools and not last.tool_calls:
            last = assistant_message(last.content, self.schemas)
        continued = (*earlier, last)
        if last.tool_calls:
            functions = tuple(self.tools.values())
            tools = tuple(self.tools)
            return ReplyCall(functions, problem, continued, tools=tools, tool_seconds=tool_seconds)
        if self.reply:
            seconds = tool_seconds if self.schemas and not self.tools else 0.0
            return ReplyCall((self.reply,), problem, continued, self.is_async, tool_seconds=seconds)
        return None


def turns_of(task: object) -> Turns | None:
    """The functions for further turns of a task; None if it has only one turn.

    Raises TaskError for tools that cannot be used, and functions that a worker cannot import.
    """
    reply = getattr(task, "reply", None)
    tools = cast("Sequence[Callable[..., Any]]", getattr(task, "tools", ()))
    own_schemas = cast("Sequence[Mapping[str, Any]]", getattr(task, "tool_schemas", ()))
    if own_schemas and tools:
        raise TaskError("the task has tools and tool_schemas; remove one of them")
    if own_schemas and (not reply or call_error(reply, None, None, tool_seconds=1.0)):
        raise TaskError(
            "a task with tool_schemas executes the calls itself; define "
            "reply(problem, messages, *, tool_seconds)"
        )
    if reply is None and not tools:
        return None
    schemas = (*map(schema_of, tools), *own_schemas)
    names = Counter(schema["function"]["name"] for schema in schemas if "function" in schema)
    if twice := [name for name, number in names.items() if number > 1]:
        raise TaskError(f"two tools of the task have the name {twice[0]}; rename one of them")
    return Turns(
        reply=_import_name(reply) if reply else "",
        is_async=inspect.iscoroutinefunction(reply),
        tools={tool.__name__: _import_name(tool) for tool in tools},
        schemas=schemas,
    )


def _import_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", "<")
    if "<" in name:  # as in f.<locals>.g and <lambda>
        raise TaskError(
            f"{function!r:.80} cannot be imported by a reward worker; make `reply` and each of "
            "`tools` a function of a module"
        )
    return f"{function.__module__}:{name}"


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """One call of a task's `reply`, or of the tools that a completion calls."""

    names: tuple[str, ...]  # MODULE:NAME of `reply`, or of each tool
    problem: Problem
    messages: tuple[Message, ...]
    is_async: bool = False
    tools: tuple[str, ...] = ()  # names of the tools; empty for a call of `reply`
    tool_seconds: float = 0.0  # limit for all tools; 0 if the call executes none
    num_completions: int = 1  # that wait for the result

    @property
    def reports_timeout(self) -> bool:
        """Whether the result may say that time is up: a tool ends without its worker."""
        return self.tool_seconds > 0

    def start(self, *functions: Callable[..., Any]) -> Any:
        if self.tools:
            tools = dict(zip(self.tools, functions, strict=True))
            calls = self.messages[-1].tool_calls
            try:
                return tool_messages(calls, tools, timeout_seconds=self.tool_seconds)
            except OSError as error:
                return RewardError(
                    f"the tools of problem {self.problem.id} cannot be executed: {error}; they "
                    "need memory, and disk space in the folder for temporary files"
                )
        (reply,) = functions
        options = {"tool_seconds": self.tool_seconds} if self.tool_seconds else {}
        return reply(self.problem, list(self.messages), **options)

    def checked(self, result: Any) -> Reply | str | RewardError:
        return result if self.tools else _checked(result)

    def result_of(self, result: Reply | str | RewardError) -> Reply:
        if isinstance(result, RewardError):
            raise result
        if isinstance(result, str):
            raise RewardError(
                f"function {' or '.join(self.names)} {result}, for a completion of problem "
                f"{self.problem.id}; fix the function (its timeout is task.reward_timeout)"
            )
        return result


def _checked(result: object) -> Reply | str:
    """The result of `reply` as plain messages, or what is wrong with it."""
    if result is None:
        return None
    if not isinstance(result, list) or not result:
        return f"returned {result!r:.80}, which is neither a list of messages nor None"
    messages: list[Message] = []
    for message in cast("list[object]", result):
        if not isinstance(message, Message) or not isinstance(cast(Any, message.content), str):
            return f"returned a list with {message!r:.80}, which is not a Message with text"
        if message.role not in REPLY_ROLES:
            return (
                f"returned a message with the role {message.role!r:.40}; "
                f"choose one of {', '.join(REPLY_ROLES)}"
            )
        try:
            texts = map(str.encode, (message.role, message.content, message.name))
            messages.append(Message(*cast(Any, map(bytes.decode, texts))))
        except UnicodeEncodeError as error:
            return f"returned a message that is no valid text: {error}"
    return messages
