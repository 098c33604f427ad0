"""Chats continued after a completion: its tokens stay as they were sampled."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from peralta_zmq import models
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Message, Problem, ToolCall

# The text formats of three families, in short templates.
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = (
    "{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
# Consecutive results of tools share one turn of the user.
TOOL = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN2 = (
    TOOLS + "{% for message in messages %}{% if message.role == 'tool' %}" + TOOL + "{% else %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}" + CALLS + "<|im_end|>\n"
    "{% endif %}{% endfor %}" + PROMPT
)  # fmt: skip
# Drops the reasoning of completions before the user's last message; the others begin with it.
QWEN3 = (
    "{% set last = namespace(user=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    + TOOLS + "{% for message in messages %}{% if message.role == 'tool' %}" + TOOL + "{% else %}"
    "{% set text = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.index0 > last.user %}"
    "<think>\n{{ thought if '</think>' in message.content }}\n</think>\n\n{% endif %}"
    "{{ text }}" + CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
    + "{% if add_generation_prompt and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)  # fmt: skip
LLAMA3 = (
    "<|begin_of_text|>{{ tools | tojson if tools }}{% for message in messages %}<|start_header_id|>"
    "{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{% if message.tool_calls %}"
    '{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}'
    "{% elif message.role == 'tool' %}{{ message.content | tojson }}"
    "{% else %}{{ message.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Ends a chat with the end token of the tokenizer, unless the assistant's turn follows.
PHI3 = QWEN2 + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
FAMILIES = {
    "qwen2": (QWEN2, ""), "qwen3": (QWEN3, ""), "llama3": (LLAMA3, "<|eot_id|>"), "phi3": (PHI3, "")
}  # fmt: skip
SCHEMAS = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
START = (Message("system", "Add."), Message("user", "1 plus 2?"))


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> models.Tokenizer:
    template, end = FAMILIES[request.param]
    return tokenizer_of(template, end)


def tokenizer_of(template: str, end: str = "") -> models.Tokenizer:
    """The embedded model's tokenizer with another template and end token."""
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    tokenizer.chat_template = template
    if end:
        tokenizer.add_special_tokens({"eos_token": end})
    return tokenizer


def ids_of(tokenizer: models.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def text_of(tokenizer: models.Tokenizer, token_ids: list[int]) -> str:
    return models.text_of(tokenizer, np.array(token_ids))


def problem(**variables: Any) -> Problem:
    return Problem("1", "sums", START, "3", chat_template_kwargs=variables)


@pytest.mark.parametrize("completion", ["1 + 2", " 1  + 2\n", "<think>\nsum\n</think>\n\n3"])
@pytest.mark.parametrize("ended", [True, False])
def test_continuation_keeps_sampled_tokens_in_every_family(
    tokenizer: models.Tokenizer, completion: str, ended: bool
) -> None:
    """Sampled tokens that a tokenizer would not produce for their text, one per character."""
    models.check_continuations(tokenizer, [problem()])
    sampled = [token for char in completion for token in ids_of(tokenizer, char)]
    assert sampled != ids_of(tokenizer, completion)
    end = [cast(int, tokenizer.eos_token_id)]
    prompt = models.chat_prompt(tokenizer, START)
    messages = [*START, Message("assistant", completion)]
    added = models.continuation_ids(
        tokenizer, messages, [Message("user", "sure?")], ended=ended, chat_template_kwargs={}
    )
    assert (added[:1] == end) is not ended
    user = models.chat_prompt(tokenizer, [Message("user", "sure?")])
    newline = "" if tokenizer.eos_token == "<|eot_id|>" else "\n"
    assert text_of(tokenizer, prompt + sampled + end * ended + added) == (
        text_of(tokenizer, prompt) + completion + str(tokenizer.eos_token) + newline
        + text_of(tokenizer, user).removeprefix("<|begin_of_text|>")
    )  # fmt: skip


def test_continuation_renders_results_of_tools(tokenizer: models.Tokenizer) -> None:
    models.check_continuations(tokenizer, [problem(tools=SCHEMAS)])
    models.check_template_kwargs(tokenizer, [problem(tools=SCHEMAS)])
    prompt = models.chat_prompt(tokenizer, START, tools=SCHEMAS)
    assert '"description": "Adds."' in text_of(tokenizer, prompt)
    call = Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1, "b": 2}),))
    result = Message("tool", "3", "add")
    added = models.continuation_ids(
        tokenizer, [*START, call], [result, result], ended=True,
        chat_template_kwargs={"tools": SCHEMAS},
    )  # fmt: skip
    text = text_of(tokenizer, added)
    assert text.count("3") == 2
    assert "tool_call>" not in text
    again = models.continuation_ids(
        tokenizer, [*START, call, result, Message("assistant", "3")], [Message("user", "sure?")],
        ended=True, chat_template_kwargs={"tools": SCHEMAS},
    )  # fmt: skip
    assert "sure?" in text_of(tokenizer, again) and "1 plus 2" not in text_of(tokenizer, again)


SYSTEM_LAST = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]"
    "{% if loop.last %}{{ messages[0].content }}{% endif %}{{ message.content }}[/INST]"
    "{% elif message.role == 'assistant' %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
LAST_ONLY = "{{ messages[-1].content }}<|im_end|>"
NO_END = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
NO_TOOLS = (
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.content }}<|im_end|>{% endfor %}"
)
ONE_USER = (
    "{% for message in messages %}{% if message.role == 'user' and loop.index0 > 1 %}"
    "{{ raise_exception('no second user') }}{% endif %}"
    "{{ message.content }}<|im_end|>{% endfor %}"
)
DROPS_TOOLS = (
    "{% for message in messages if message.role != 'tool' %}"
    "{{ message.content }}<|im_end|>{% endfor %}"
)
NUMBERED = (
    "{% for message in messages %}{{ loop.revindex }} {{ message.content }}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(("template", "reason"), [
    (SYSTEM_LAST, "changes earlier messages when others follow"),
    (NUMBERED, "changes earlier messages when others follow"),
    (LAST_ONLY, "drops completions when messages follow"),
    (NO_END, "writes no end token after a completion"),
    (NO_TOOLS, r"refuses a message with the role tool \(no tools here\)"),
    (ONE_USER, r"refuses a message with the role user \(no second user\)"),
    (DROPS_TOOLS, "drops messages with the role tool"),
])  # fmt: skip
def test_template_that_cannot_be_continued_is_refused_by_name(template: str, reason: str) -> None:
    tokenizer = tokenizer_of(template)
    with pytest.raises(ConfigError, match=f"embedded {reason}, so that task 'sums' with several"):
        models.check_continuations(
            tokenizer, [problem(**{"tools": []} if "role" in reason else {})]
        )


def test_template_without_tools_is_refused() -> None:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    with pytest.raises(ConfigError, match=r"embedded renders no tools, but a task has some"):
        models.check_template_kwargs(tokenizer, [problem(tools=SCHEMAS)])
