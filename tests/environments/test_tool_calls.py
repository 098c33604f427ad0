"""Schemas of tools, and the calls of tools in completions."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from peralta_zmq.environments.tool_calls import assistant_message, schema_of
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Message, ToolCall


def find(
    word: str, places: list[str], limit: int | None = None, order: Literal["up", "down"] = "up"
) -> str:
    """Find a word.

    The first place counts.

    Args:
        word: the word to find
        limit (int): number of results
    """
    return word


def undocumented(word: str) -> str:
    return word


def untyped(word) -> str:  # type: ignore[no-untyped-def]
    """Find a word."""
    return str(word)


def sort(
    order: Literal["up", "down"] | None = None,
    places: list[int] | None = None,
    limit: Literal[10, "all", None] = 10,
) -> str:
    """Sort words."""
    return f"{order} {places} {limit}"


async def awaited(word: str) -> str:
    """Find a word."""
    return word


def with_options(**options: Any) -> str:
    """Find a word."""
    return str(options)


def test_schema_has_types_and_descriptions_of_the_arguments() -> None:
    properties = {
        "word": {"type": "string", "description": "the word to find"},
        "places": {"type": "array", "items": {"type": "string"}},
        "limit": {
            "anyOf": [{"type": "integer"}, {"type": "null"}],
            "description": "number of results",
        },
        "order": {"type": "string", "enum": ["up", "down"]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["word", "places"]}
    description = "Find a word.\n\nThe first place counts."
    function = {"name": "find", "description": description, "parameters": parameters}
    assert schema_of(find) == {"type": "function", "function": function}


def test_schema_of_an_optional_argument_keeps_its_choices_and_items() -> None:
    null = {"type": "null"}
    assert schema_of(sort)["function"]["parameters"]["properties"] == {
        "order": {"anyOf": [{"type": "string", "enum": ["up", "down"]}, null]},
        "places": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, null]},
        "limit": {"type": ["integer", "string", "null"], "enum": [10, "all", None]},
    }


@pytest.mark.parametrize(("tool", "message"), [
    (undocumented, "tool undocumented has no docstring"),
    (awaited, "tool awaited is a coroutine function; define it without async"),
    (untyped, "argument word of tool untyped has no usable type hint"),
    (with_options, "argument options of tool with_options has no usable type hint"),
])  # fmt: skip
def test_tool_without_schema_is_refused(tool: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        schema_of(tool)


def test_calls_in_a_completion_become_tool_calls() -> None:
    add = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    message = assistant_message(f"I add.\n{add}\n{add}")
    call = ToolCall("add", {"a": 1})
    assert message == Message("assistant", "I add.", tool_calls=(call, call))
    llama = '{"name": "add", "parameters": {"a": 1}}'
    for text in (llama, f"<|python_tag|>{llama}"):
        assert assistant_message(text) == Message("assistant", "", tool_calls=(call,))


QWEN = (
    "<tool_call>\n<function=repeat>\n<parameter=text>\n12\n</parameter>\n"
    "<parameter=most>\n3\n</parameter>\n<parameter=other>\nsome <b>\ntext\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>repeat\n<arg_key>text</arg_key>\n<arg_value>12</arg_value>\n<arg_key>most</arg_key>"
    "\n<arg_value>3</arg_value>\n<arg_key>other</arg_key>\n<arg_value>some <b>\ntext</arg_value>"
    "\n</tool_call>"
)


def repeat(text: str, most: int) -> str:
    "Repeat."
    return text * most


@pytest.mark.parametrize("text", [QWEN, GLM])
def test_arguments_without_quotes_have_the_types_of_the_schema(text: str) -> None:
    message = assistant_message(f"So:\n\n{text}", [schema_of(repeat)])
    call = ToolCall("repeat", {"text": "12", "most": 3, "other": "some <b>\ntext"})
    assert message == Message("assistant", "So:", tool_calls=(call,))
    assert message.tool_calls[0].arguments == call.arguments
    (untyped,) = assistant_message(text).tool_calls
    assert untyped.arguments["text"] == 12
    (surrogate,) = assistant_message(text.replace("some", '"\\ud800"')).tool_calls
    assert "\\ud800" in surrogate.arguments["other"]


@pytest.mark.parametrize("text", ["1 + 2", '{"name": "add"}', '{"parameters": 1}', ""])
def test_completion_without_calls_keeps_its_text(text: str) -> None:
    assert assistant_message(text) == Message("assistant", text)


@pytest.mark.parametrize(("text", "error"), [
    ('<tool_call>{"name": "add", "argu', r"\(</tool_call> is missing\)"),
    ("<tool_call>add(1)</tool_call>", "not valid JSON .Expecting value"),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ('<tool_call>{"a":' + "[" * 500 + "]" * 500 + "}</tool_call>", "more than 100 levels of arr"),
    ('<tool_call>{"name": "add", "arguments": {"\\ud800": 1}}</tool_call>', "surrogates not allow"),
    ('<tool_call>{"name": "\\udcff"}</tool_call>', "surrogates not allowed"),
    ("<tool_call>[1]</tool_call>", "no name or no object of arguments"),
    ('<tool_call>{"name": 1}</tool_call>', "no name or no object of arguments"),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "no name or no object"),
])  # fmt: skip
def test_malformed_call_has_an_error_with_the_format(text: str, error: str) -> None:
    (call,) = assistant_message(text).tool_calls
    assert call.name == "" and call.error.endswith('write {"name": NAME, "arguments": {...}}')
    with pytest.raises(ValueError, match=error):
        raise ValueError(call.error)
