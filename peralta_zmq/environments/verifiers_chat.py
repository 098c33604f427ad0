"""A harness of the library verifiers that chats in the process of the environment.

The library's harness `null` chats in a process of its own, whose start takes more than a second of
processor time in each turn. This one has the conversation and the calls of tools only.
"""

from __future__ import annotations

import functools
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

from peralta_zmq.errors import import_extra

_needed_by = "task verifiers:NAME"
openai: Any = import_extra("openai", extra="verifiers", needed_by=_needed_by)
library: Any = import_extra("verifiers.v1", extra="verifiers", needed_by=_needed_by)
_compaction: Any = import_extra(
    "verifiers.v1.harnesses.utils.compaction", extra="verifiers", needed_by=_needed_by
)
_mcp: Any = import_extra(
    "verifiers.v1.harnesses.utils.mcp", extra="verifiers", needed_by=_needed_by
)
_dialect: Any = import_extra("verifiers.v1.dialects.chat", extra="verifiers", needed_by=_needed_by)
_runtimes: Any = import_extra("verifiers.v1.runtimes", extra="verifiers", needed_by=_needed_by)

ID = "peralta_zmq_chat"  # the library finds a harness by the name of a module
sys.modules.setdefault(ID, sys.modules[__name__])
__all__ = ["ChatHarness"]


@functools.cache
def _http_client() -> Any:
    """One for all episodes: each would load the certificates again."""
    return openai.DefaultAsyncHttpxClient(timeout=None)


class ChatHarness(library.Harness[library.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Chat until a reply calls no tool, or the context is full."""
        system_prompt, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(_dialect.message_to_wire, prompt or ())
        client = openai.AsyncOpenAI(
            base_url=endpoint, api_key=secret, http_client=_http_client(), max_retries=0
        )
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        try:
            async with AsyncExitStack() as stack:
                tools = await _mcp.connect_mcp({"mcpServers": servers}, stack)
                await _chat(client, ctx.model, messages, *tools)
        except openai.APIStatusError as error:
            if not _compaction.is_context_overflow(error):
                return _runtimes.ProgramResult(1, "", str(error))
        return _runtimes.ProgramResult(0, "", "")


async def _chat(
    client: Any,
    model: str,
    messages: list[dict[str, Any]],
    schemas: list[dict[str, Any]],
    dispatch: dict[str, tuple[str, str]],
    servers: dict[str, Any],
) -> None:
    options = {"tools": schemas} if schemas else {}
    while True:
        reply = await client.chat.completions.create(model=model, messages=messages, **options)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = await _result(call.function, dispatch, servers)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def _result(
    function: Any, dispatch: dict[str, tuple[str, str]], servers: dict[str, Any]
) -> Any:
    """What a tool returned, or the mistake in its call."""
    if function.name not in dispatch:
        return f"error: unknown tool {function.name!r}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await _mcp.call_mcp(servers, dispatch, function.name, arguments)
