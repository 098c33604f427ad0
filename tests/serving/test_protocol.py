"""Requests and replies of OpenAI's chat API."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest

from peralta_zmq import models
from peralta_zmq.engines.sessions import ChatCompletion
from peralta_zmq.rollout import Completion, Message, SampledToken, Sampling
from peralta_zmq.serving.protocol import (
    ApiError,
    ChatRequest,
    ChoiceStream,
    Replies,
    parse_request,
)

HELLO = [{"role": "user", "content": "add 2 to 3."}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.load_tokenizer(models.EMBEDDED)


def parse(tokenizer: Any, body: bytes | None = None, **fields: Any) -> ChatRequest:
    return parse_request(
        json.dumps({"messages": HELLO, **fields}).encode() if body is None else body,
        model="demo", tokenizer=tokenizer, template_kwargs={}, max_model_len=64,
    )  # fmt: skip


def test_fields_become_sampling_parameters_and_the_prompt_of_a_problem(tokenizer: Any) -> None:
    request = parse(
        tokenizer, model="demo", temperature=0.5, top_p=0.9, max_tokens=7, stop=["a", "b"], n=2,
        seed=-4, logprobs=True, top_logprobs=0, stream=True, stream_options={"include_usage": True},
        user="me", presence_penalty=0.0, response_format={"type": "text"}, tools=None,
    )  # fmt: skip
    assert (request.stream, request.include_usage, request.logprobs) == (True, True, True)
    first, second = (chat.sampling for chat in request.completions)
    assert (first.temperature, first.top_p, first.stop) == (0.5, 0.9, ("a", "b"))
    assert first.max_completion_length == 7 and first.seed != second.seed >= 0
    prompt = models.chat_prompt(tokenizer, [Message("user", "add 2 to 3.")])
    assert request.completions[0].prompt_ids.tolist() == prompt
    again = parse(tokenizer, seed=-4, n=2)
    assert [chat.sampling.seed for chat in again.completions] == [first.seed, second.seed]


def test_defaults_are_those_of_the_api_and_the_rest_of_the_context(tokenizer: Any) -> None:
    (chat,) = parse(tokenizer).completions
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.stop) == (1.0, 1.0, ())
    assert chat.sampling.max_completion_length == 64 - len(chat.prompt_ids)
    part = {"type": "text", "text": "add 2 ", "cache_control": {"type": "ephemeral"}}
    parts = [part, {"type": "text", "text": "to 3."}]
    (again,) = parse(tokenizer, messages=[{"role": "user", "content": parts}]).completions
    assert again.prompt_ids.tolist() == chat.prompt_ids.tolist()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"body": b'{"messages": ['}, None, "the body is not valid JSON"),
        ({"body": b"[" * 100_000}, None, "the body is not valid JSON"),
        ({"body": b"\xff"}, None, "the body is not valid JSON"),
        ({"model": json.loads("[" * 101 + "]" * 101)}, None, "more than 100 levels"),
        ({"body": b"[]"}, None, "the body []: must be a JSON object"),
        ({"messages": []}, "messages", "messages []: List should have at least 1 item"),
        ({"messages": ["hi"]}, "messages[0]", 'messages[0] "hi": must be a JSON object'),
        (
            {"messages": [*HELLO, {"role": "robot", "content": ""}]},
            "messages[1].role",
            "role \"robot\": should be 'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "null: should be a valid string"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content", "string"),
        ({"messages": [{**HELLO[0], "name": 3}]}, "messages[0].name", "a valid string"),
        ({"messages": [{**HELLO[0], "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id",
         "Field required"),
        ({"messages": [{**HELLO[0], "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}]},
         None, "arguments of the tool call 'f' are not a JSON object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content.type", "should be 'text'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "refuses the messages"),
        ({"messages": [{"role": "user", "content": "1 " * 99}]}, "messages",
         "but the context of this generator is 64 tokens (engine.max_model_len); shorten"),
        ({"max_completion_tokens": 64}, "messages", "the completion may have 64"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens 0: should be greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "should be a valid integer"),
        ({"temperature": "hot"}, "temperature", "should be a valid number"),
        ({"temperature": -1e-10}, "temperature", "should be greater than or equal to 0"),
        ({"temperature": 2.5}, "temperature", "temperature 2.5: should be less than or equal to 2"),
        ({"temperature": float("nan")}, "temperature", "should be"),
        ({"temperature": 1e-40}, "temperature", "temperature 1e-40: must be 0, or at least 0.01"),
        ({"top_p": 1e-46}, "top_p", "top_p 1e-46: should be greater than or equal to 0.0001"),
        ({"n": 33}, "n", "n 33: should be less than or equal to 32"),
        ({"seed": True}, "seed", "should be a valid integer"),
        ({"stop": ["a"] * 5}, "stop", "at most 4 items"),
        ({"stop": ""}, "stop[0]", "at least 1 character"),
        ({"stop": 3}, "stop", "should be a valid list"),
        ({"stop": "\ud800"}, "stop[0]", "a valid string"),
        ({"stream": 1}, "stream", "should be a valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "with stream only"),
        ({"top_logprobs": 2}, "top_logprobs", "is not supported here; leave it out or set it to 0"),
        ({"tools": [{}]}, "tools", "the chat template of the model renders no tools"),
        ({"enable_thinking": False}, "enable_thinking", "is not supported here; leave it out"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "leave it out"),
        ({"reasoning_effort": "none"}, "reasoning_effort", "leave it out"),
        ({"repetition_penalty": 0}, "repetition_penalty", "leave it out"),
        ({"temprature": 1}, "temprature", "temprature is not supported here; leave it out"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_request_is_refused_with_field_and_remedy(
    tokenizer: Any, fields: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse(tokenizer, **fields)
    assert caught.value.status_code == 400
    error = caught.value.body["error"]
    assert message in str(error["message"])
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "developer", "content": "Add."}, *HELLO]},
        {"messages": [{"role": "system", "content": "Add.", "name": "me"}, *HELLO]},
        {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": []}, *HELLO]},
        {"messages": [*HELLO, {"role": "assistant"}, *HELLO]},
        {"tool_choice": "auto"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
    ],
    ids=str,
)
def test_forms_of_openai_clients_are_accepted(tokenizer: Any, changes: dict[str, Any]) -> None:
    (chat,) = parse(tokenizer, **changes).completions
    messages = [
        Message({"developer": "system"}.get(row["role"], row["role"]), row.get("content") or "")
        for row in changes.get("messages", HELLO)
    ]
    assert chat.prompt_ids.tolist() == models.chat_prompt(tokenizer, messages)


@pytest.mark.parametrize("messages", [[{**HELLO[0], "content": "1 " * 400_000}], HELLO * 10_000])
def test_long_chat_is_refused_before_all_of_it_is_tokenized(tokenizer: Any, messages: Any) -> None:
    with pytest.raises(ApiError, match="the context of this generator is 64 tokens") as caught:
        parse(tokenizer, messages=messages)
    (num_tokens,) = re.findall(r"are at least (\d+) tokens", str(caught.value))
    assert 64 < int(num_tokens) <= 64 * 16


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [%s1]}' % (b"1," * 250_000),
        b'{"messages": [{"role": "user", "content": [%s1]}]}' % (b"1," * 250_000),
        b'{"messages": [], "stop": [%s1]}' % (b"1," * 250_000),
        b'{"messages": [], %s}' % b",".join(b'"%d": 1' % name for name in range(50_000)),
        b'{"messages": [{%s}]}' % b",".join(b'"%d": 1' % name for name in range(50_000)),
    ],
    ids=lambda body: body[:60].decode(),
)
def test_body_with_many_errors_is_refused_at_the_first(tokenizer: Any, body: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ApiError):
        parse(tokenizer, body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


def test_other_model_is_refused_as_not_found(tokenizer: Any) -> None:
    with pytest.raises(ApiError, match='the model "gpt-4" does not exist; use "demo"') as caught:
        parse(tokenizer, model="gpt-4")
    assert (caught.value.status_code, caught.value.body["error"]["code"]) == (
        404,
        "model_not_found",
    )


@pytest.mark.parametrize(
    ("text", "stop", "whole"),
    [
        ("five plus \u00e9\u4e16 is \U0001f600!", (), "five plus \u00e9\u4e16 is \U0001f600!"),
        ("the answer STOP after", ("STOP",), "the answer "),
        ("the answer STO", ("STOP",), "the answer STO"),
        ("the answer is 5<|im_end|>", (), "the answer is 5"),
    ],
)
def test_pieces_of_a_stream_join_to_the_text_without_stop_strings(
    tokenizer: Any, text: str, stop: tuple[str, ...], whole: str
) -> None:
    tokens = [SampledToken(token, 0.0, 0) for token in tokenizer.encode(text)]
    chat = ChatCompletion(np.array([1], np.int32), Sampling(stop=stop))
    request = ChatRequest([chat], stream=True)
    replies = Replies(request, tokenizer, "demo")
    stream, pieces = ChoiceStream(0, chat, tokenizer, request), list[str]()

    def read() -> None:
        chunks = stream.next_chunks(replies)
        pieces.extend(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    for token in tokens:
        chat.tokens.append(token)
        read()
    assert whole.startswith("".join(pieces))
    ids, logprobs = np.array([token[0] for token in tokens]), np.zeros(len(tokens), np.float32)
    chat.complete(Completion(0, chat.prompt_ids, ids, logprobs, np.zeros_like(ids), "stop", whole))
    read()
    assert stream.has_ended and "".join(pieces) == whole and len(list(filter(None, pieces))) > 2
    assert "\N{REPLACEMENT CHARACTER}" not in whole
