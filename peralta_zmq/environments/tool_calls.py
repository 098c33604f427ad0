"""Tools of a task: their schemas, and the calls of tools in the text of a completion.

A tool is a Python function with type hints and a docstring. Its schema, in the format of OpenAI's
function calls, is rendered by the chat template. The model calls it, any number of times in a
completion, in one of these formats:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>             Hermes, Qwen 2 and 3
    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>            Qwen 3.5
    <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>                     GLM
    {"name": "add", "parameters": {"a": 1}}                        Llama 3, as the whole completion
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Union, cast

from peralta_zmq.atomic_files import parse_json
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Message, ToolCall

TYPE_NAMES: dict[object, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip
CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
FORMAT = '{"name": NAME, "arguments": {...}}'
# "name: text" or "name (type): text" in the section "Args:" of a docstring
ARGUMENT = re.compile(r"\s+\**(\w+)(?:\s*\([^)]*\))?:\s*(.*)")


# Schemas.


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a tool, from its type hints and its docstring with a section `Args:`.

    Raises TaskError for a tool without docstring or with other types than JSON has, and for a
    coroutine function.
    """
    if inspect.iscoroutinefunction(tool):
        raise TaskError(f"tool {tool.__name__} is a coroutine function; define it without async")
    description, arguments = _documented(tool)
    if not description:
        raise TaskError(f"tool {tool.__name__} has no docstring; describe the tool for the model")
    hints = typing.get_type_hints(tool)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(tool).parameters.values():
        name = parameter.name
        try:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise KeyError
            properties[name] = _type_schema(hints[name])
        except KeyError:
            raise TaskError(
                f"argument {name} of tool {tool.__name__} has no usable type hint; use str, int, "
                "float, bool, list, dict, Literal, or a union of them"
            ) from None
        if name in arguments:
            properties[name]["description"] = arguments[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": tool.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _documented(tool: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    text, _, rest = (inspect.getdoc(tool) or "").partition("\nArgs:\n")
    section = rest.partition("\n\n")[0].splitlines()
    matches = [match for line in section if (match := ARGUMENT.fullmatch(line))]
    return text.strip(), {match[1]: match[2].strip() for match in matches}


def _type_schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint; KeyError for a type that JSON does not have."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Literal:
        names = [*dict.fromkeys(TYPE_NAMES[type(each)] for each in arguments)]
        return {"type": names if len(names) > 1 else names[0], "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type_schema(each) for each in arguments]}
    schema: dict[str, Any] = {"type": TYPE_NAMES[origin or hint]}
    if schema["type"] == "array" and arguments:
        schema["items"] = _type_schema(arguments[0])
    return schema


# Calls.


def assistant_message(text: str, schemas: Sequence[Mapping[str, Any]] = ()) -> Message:
    """The message of a completion, with the calls of tools in its text as `tool_calls`.

    `schemas` tell which arguments are text, in formats without quotes.
    """
    if calls := CALL.findall(text):
        parsed = tuple(_parsed_call(call, schemas, closed=bool(end)) for call, end in calls)
        return Message("assistant", CALL.sub("", text).strip(), tool_calls=parsed)
    stripped = text.strip().removeprefix("<|python_tag|>")  # special token of Llama 3.1
    if stripped.startswith("{") and '"parameters"' in stripped:
        call = _parsed_call(stripped, (), closed=True)
        if not call.error:
            return Message("assistant", "", tool_calls=(call,))
    return Message("assistant", text)


def _parsed_call(text: str, schemas: Sequence[Mapping[str, Any]], *, closed: bool) -> ToolCall:
    if function := FUNCTION.fullmatch(text):
        return _call_of_texts(function[1], PARAMETER.findall(function[2]), schemas)
    if pairs := PAIR.findall(text):
        return _call_of_texts(text.partition("<arg_key>")[0].strip(), pairs, schemas)
    try:
        call = parse_json(text)
        json.dumps(call, ensure_ascii=False).encode()  # raises for an unpaired surrogate
    except ValueError as error:
        reason = f"{error}" if closed else "</tool_call> is missing"
        return ToolCall("", error=f"the tool call is not valid JSON ({reason}); write {FORMAT}")
    if isinstance(call, dict):
        fields = cast("dict[str, Any]", call)
        name = fields.get("name")
        arguments = fields.get("arguments", fields.get("parameters", {}))
        if isinstance(name, str) and isinstance(arguments, dict):
            return ToolCall(name, cast("dict[str, Any]", arguments))
    return ToolCall(
        "", error=f"the tool call has no name or no object of arguments; write {FORMAT}"
    )


def _call_of_texts(
    name: str, pairs: Sequence[tuple[str, str]], schemas: Sequence[Mapping[str, Any]]
) -> ToolCall:
    """A call whose arguments are text: JSON, unless the schema of the tool says that it is text."""
    functions: list[Any] = [schema.get("function") for schema in schemas]
    function = next((f for f in functions if isinstance(f, dict) and f.get("name") == name), {})
    properties: Any = (function.get("parameters") or {}).get("properties") or {}
    arguments = dict[str, Any]()
    for key, text in pairs:
        arguments[key] = text
        if (properties.get(key) or {}).get("type") != "string":
            with suppress(ValueError):
                value = parse_json(text)
                json.dumps(value, ensure_ascii=False).encode()  # raises for an unpaired surrogate
                arguments[key] = value
    return ToolCall(name, arguments)
