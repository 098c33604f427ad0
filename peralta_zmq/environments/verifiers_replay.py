"""Replay of an episode for an environment of the library verifiers.

Such an environment is a coroutine that awaits the completions of an agent (`Env.run`). Reward
workers keep no state between turns, so each call runs the coroutine from its start, with the
completions so far: until it awaits another one, or to its end with the rewards. For equal
completions it must send equal messages.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from peralta_zmq.environments.tool_calls import assistant_message
from peralta_zmq.errors import TaskError, import_extra
from peralta_zmq.rollout import Message, ToolCall

# Imported with this module, because the import takes longer than many a reward may take.
library: Any = import_extra("verifiers.v1", extra="verifiers", needed_by="task verifiers:NAME")
THINK_END = "</think>"


async def replay(
    env: Any, task: Any, messages: Sequence[Message], *, has_tools: bool = False, ends: bool = False
) -> Agent:
    """Run the episode of a task with `messages`, those after the prompt of the task.

    If `ends`, the episode ends after them and is scored. Raises what the environment raises, and
    TaskError if it does not repeat `messages`.
    """
    agent = Agent(messages, has_tools=has_tools, ends=ends)

    async def run() -> None:
        agents = library.Agents(env.config, agent.named)
        await env.setup(agents)
        await env.run(task, agents)
        if agent.trace is None:
            raise TaskError("the environment ended without a turn of its agent")
        information = library.EnvInfo(id=env.config.env_id)
        traced = {"task": _trace_task(task), "traces": [agent.trace]}
        await env.finalize(task, library.Episode(env=information, ok=True, **traced))

    running = asyncio.ensure_future(run())
    waiting = asyncio.ensure_future(agent.waits.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        running.result()
    else:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return agent


class Agent:
    """The agent of an environment, in place of the library's class of the same name.

    Afterwards, `inserted` has the messages of the environment after the last completion, `calls`
    the calls of tools in it, and `trace` the library's record of the episode.
    """

    def __init__(self, messages: Sequence[Message], *, has_tools: bool, ends: bool) -> None:
        self.unread = deque(messages)
        self.has_tools = has_tools
        self.ends = ends
        self.waits = asyncio.Event()
        self.has_ended = False
        self.inserted: list[Message] = []
        self.calls: tuple[ToolCall, ...] = ()
        self.trace: Any = None
        self.trainable = True  # environments set it

    def named(self, name: str, config: Any) -> Agent:
        """This agent; the name and the library's config of an agent are recorded."""
        self._name = name
        self._config = config
        return self

    async def run(self, task: Any) -> Any:
        """One turn, with the calls of tools in it; returns the trace."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
            self.trace.stop("agent_completed")
        return self.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncGenerator[Interaction, None]:
        if self.trace is not None:
            raise TaskError("the environment lets its agent start a second episode")
        information = library.AgentInfo(config=self._config, name=self._name)
        state = library.state.state_cls(type(task))()
        self.trace = library.Trace(task=_trace_task(task), agent=information, state=state)
        for message in prompt_of(task.data):
            self.record(_library_message(message), sampled=False)
        yield Interaction(self, task)
        if self.unread:
            raise _not_repeated("its end")
        self.has_ended = True
        if not self.ends:
            await self.wait()  # the environment may need rewards to continue
        self.trace.stop("user_closed")
        self.trace.ok = True
        await task.score(self.trace)

    def record(self, message: Any, *, sampled: bool) -> None:
        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(library.MessageNode(parent=parent, message=message, sampled=sampled))
        if sampled:
            reason = "tool_calls" if message.tool_calls else "stop"
            call = library.ModelCall(node=len(nodes) - 1, finish_reason=reason)
            self.trace.calls.append(call)

    def insert(self, message: Message) -> None:
        """Add a message of the environment to the trace. Raises TaskError if it has changed."""
        if not self.unread:
            self.inserted.append(message)
        elif self.unread.popleft() != message:
            raise _not_repeated(message.content)
        self.record(_library_message(message), sampled=False)

    async def wait(self) -> None:
        """Wait for a completion or for results of tools, until the replay is cancelled."""
        self.waits.set()
        await asyncio.get_running_loop().create_future()


class Interaction:
    def __init__(self, agent: Agent, task: Any) -> None:
        self._agent = agent
        self._task = task
        self._stops = task.hooks("stop")
        self._has_begun = self._is_over = False

    @property
    def trace(self) -> Any:
        return self._agent.trace

    async def turn(self, message: Any = None) -> Any:
        """Send messages, or the prompt of the task, to the agent; returns its completions."""
        if self._is_over:
            raise TaskError("the environment continues an exchange that is over")
        begins_with_prompt = not self._has_begun and self._task.data.prompt is not None
        if begins_with_prompt != (message is None):
            raise TaskError(
                "an exchange must begin with turn() if the task has a prompt, and with "
                "turn(message) if it has none; each later turn needs a message"
            )
        self._has_begun = True
        if await self._is_stopped():
            self._is_over = True
            return library.Segment(messages=[], terminated=True)
        for each in _messages_of(message):
            self._agent.insert(each)
        return library.Segment(messages=await self._segment())

    async def _segment(self) -> list[Any]:
        """The completions up to the first one that calls no tools, with the results of tools."""
        agent = self._agent
        segment: list[Any] = []
        while True:
            if not agent.unread:
                await agent.wait()
            message = agent.unread.popleft()
            if agent.has_tools:
                message = assistant_message(message.content)
            segment.append(_library_message(message, number=len(self.trace.nodes)))
            agent.record(segment[-1], sampled=True)
            # As in the library, before the trace has the results of the tools.
            if not message.tool_calls or await self._is_stopped():
                return segment
            if not agent.unread:
                agent.calls = message.tool_calls
                await agent.wait()
            for call in segment[-1].tool_calls:
                result = agent.unread.popleft()
                segment.append(_library_message(result, call_id=call.id))
                agent.record(segment[-1], sampled=False)

    async def _is_stopped(self) -> bool:
        """Whether a @stop function ends the exchange, or there is no further completion."""
        for stop in self._stops:
            if await library.session.call_hook(stop, {library.Trace: self.trace}):
                self.trace.stop(stop.__name__)
                return True
        if self._agent.ends and not self._agent.unread:
            self.trace.stop("max_turns")
            return True
        return False


def prompt_of(data: Any) -> list[Message]:
    """The prompt of a task. Raises TaskError for images."""
    system = [Message("system", data.system_prompt)] if data.system_prompt else []
    return [*system, *_messages_of(data.prompt)]


def _messages_of(content: Any) -> list[Message]:
    if content is None:
        return []
    if isinstance(content, str):
        return [Message("user", content)]
    messages: list[Message] = []
    for each in content:
        message = library.dialects.parse_message(each) if isinstance(each, dict) else each
        if not isinstance(message.content, str | None) and any(
            part.type != "text" for part in message.content
        ):
            raise TaskError("a message of the environment has an image; only text is supported")
        calls = [
            ToolCall(call.name, json.loads(call.arguments))
            for call in getattr(message, "tool_calls", None) or ()
        ]
        text = library.types.content_text(message.content)
        name = getattr(message, "name", None)
        messages.append(Message(message.role, text, name or "", tuple(calls)))
    return messages


def _library_message(message: Message, *, number: int = 0, call_id: str = "") -> Any:
    match message.role:
        case "assistant":
            reasoning, end, content = message.content.rpartition(THINK_END)
            calls = [
                library.ToolCall(
                    id=f"call_{number}_{index}",
                    name=call.name,
                    arguments=json.dumps(call.arguments),
                )
                for index, call in enumerate(message.tool_calls)
            ]
            return library.AssistantMessage(
                content=content.lstrip() if end else content,
                reasoning_content=reasoning.removeprefix("<think>").strip() if end else None,
                tool_calls=calls or None,
            )
        case "tool":
            return library.ToolMessage(
                tool_call_id=call_id, content=message.content, name=message.name or None
            )
        case "system":
            return library.SystemMessage(content=message.content)
        case "user":
            return library.UserMessage(content=message.content)


def _trace_task(task: Any) -> Any:
    return library.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _not_repeated(what: str) -> TaskError:
    return TaskError(
        f"the environment did not repeat its earlier messages (but {what!r:.80}); it must send "
        "equal messages for equal completions: seed its random numbers from the task"
    )
