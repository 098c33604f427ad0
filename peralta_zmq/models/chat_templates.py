"""Chat prompts, and their continuation after a completion without tokenizing it again.

What follows a completion is rendered after a placeholder, and only that text is tokenized: some
templates change earlier messages, as Qwen3's, which drops the reasoning of earlier completions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any, cast
from uuid import uuid4

from jinja2 import TemplateError

from peralta_zmq.atomic_files import MALFORMED
from peralta_zmq.errors import ConfigError, RewardError, did_you_mean
from peralta_zmq.models.model_folders import Tokenizer
from peralta_zmq.rollout import Message, Problem, Role

# For a completion and for a reply; random, so that no message contains them.
PLACEHOLDER = uuid4().hex
REPLY = uuid4().hex


def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], limit: int = 0, /, **template_kwargs: Any
) -> list[int]:
    """Token ids of a chat up to the assistant's turn.

    `template_kwargs` are variables of the chat template; by default, thinking is disabled. A chat
    far above `limit` tokens (0 = none), which would take seconds, is cut above `limit`. Raises
    ConfigError if the template refuses the messages.
    """
    try:
        text = _rendered(tokenizer, messages, template_kwargs, prompt=True)
    except TemplateError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the chat template refuses the messages: {reason}") from None
    return _tokenized(tokenizer, text, limit or sys.maxsize)


def chat_prompts(tokenizer: Tokenizer, problems: Iterable[Problem]) -> Iterator[list[int] | str]:
    """The token ids of each problem's prompt, or the reason why the chat template refuses it."""
    unread = iter(problems)
    # A fast tokenizer distributes the prompts of a call over the cores.
    while batch := list(islice(unread, 256)):
        texts = list[str]()
        refusals = dict[int, str]()  # by index in the batch
        for index, problem in enumerate(batch):
            messages = () if problem.input_token_ids else problem.messages
            variables = problem.chat_template_kwargs
            try:
                texts.append(_rendered(tokenizer, messages, variables, prompt=True))
            except TemplateError as error:
                texts.append("")
                refusals[index] = str(error) or type(error).__name__
        encoded = cast(Any, tokenizer)(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for index, problem in enumerate(batch):
            yield list(problem.input_token_ids) or refusals.get(index) or encoded[index]


def continuation_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    ended: bool,
    limit: int = 0,
    chat_template_kwargs: Mapping[str, Any],
) -> list[int]:
    """Token ids between a sampled completion, the last of `messages`, and the next one.

    They begin with the end of the assistant's turn (without the end token if the completion has
    `ended` with it) and end with the prompt of the next turn. For templates that
    `check_continuations` accepts. Raises RewardError if the template does not append the messages.
    """
    start = [*messages[:-1], Message("assistant", PLACEHOLDER)]
    marked = [replace(message, content=REPLY) for message in new_messages]
    try:
        text, with_marks = (
            _rendered(tokenizer, [*start, *following], chat_template_kwargs, prompt=True)
            for following in (new_messages, marked)
        )
        if with_marks.rpartition(PLACEHOLDER)[2].count(REPLY) < len(marked):
            raise TemplateError("it does not render all of them after the completion")
    except TemplateError as error:
        roles = ", ".join(message.role for message in new_messages)
        raise RewardError(
            f"a reply has messages with the roles {roles}, which the chat template of "
            f"{tokenizer.name_or_path} does not append to a completion ({error}); let `reply` "
            "return messages that it appends, such as one of the user"
        ) from None
    ids = _tokenized(tokenizer, text.rpartition(PLACEHOLDER)[2], limit or sys.maxsize)
    return ids[1:] if ended else ids


def end_of_turn(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] = {}) -> int | None:
    """The special token that the chat template writes after a completion; None without one."""
    chat = [Message("user", "1"), Message("assistant", PLACEHOLDER)]
    try:
        text = _rendered(tokenizer, chat, template_kwargs, prompt=False)
    except TemplateError:
        return None
    first = _tokenized(tokenizer, text.partition(PLACEHOLDER)[2].lstrip())[:1]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return next((token for token in first if token in special), None)


def _rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any],
    *,
    prompt: bool,
) -> str:
    """The text of a chat, with the prompt of the assistant's turn if `prompt`.

    Any error in the code of the template is a TemplateError.
    """
    variables: dict[str, Any] = {"enable_thinking": False, **template_kwargs}
    try:
        text = tokenizer.apply_chat_template(
            list(map(_to_dict, messages)), tokenize=False, add_generation_prompt=prompt, **variables
        )
        cast(str, text).encode()  # a tokenizer refuses lone surrogates
    except (TemplateError, *MALFORMED, ArithmeticError, IndexError) as error:
        raise TemplateError(" ".join(str(error).split())[:200]) from None
    return cast(str, text)


def _to_dict(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return fields


def _tokenized(tokenizer: Tokenizer, text: str, limit: int = sys.maxsize) -> list[int]:
    """The token ids of a text; of one far above `limit` tokens, a beginning above `limit`."""
    ids: list[int] = []
    for characters in (16, 128):  # more than a token has on average, and at most
        part = text[: characters * limit]
        ids = tokenizer.encode(part, add_special_tokens=False)
        if part == text or len(ids) > 2 * limit:  # the end of a part may have other tokens
            break
    return ids


# Checks before the first completion.


def check_template_kwargs(tokenizer: Tokenizer, problems: Iterable[Problem]) -> None:
    """Raise ConfigError for a variable of a problem that the chat template does not contain."""
    words = set(re.findall(r"[A-Za-z_]\w*", str(tokenizer.chat_template)))
    for name in {name for problem in problems for name in problem.chat_template_kwargs}:
        if name in words:
            continue
        if name == "tools":
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path} renders no tools, but a task has "
                "some; choose a model whose template has the variable tools"
            )
        hint = did_you_mean(name, words)
        raise ConfigError(
            f"data.chat_template_kwargs.{name} is not a variable of the model's chat "
            f"template{', ' * bool(hint)}{hint}; remove it, or correct its name"
        )


def check_continuations(tokenizer: Tokenizer, problems: Iterable[Problem]) -> None:
    """Raise ConfigError if episodes of the problems cannot be continued token by token.

    Messages must keep their text when others follow, except before a completion within its own turn
    (as Qwen3's empty reasoning block), and an end token must follow a completion. Checks one
    problem of each task.
    """
    for problem in {problem.task: problem for problem in problems}.values():
        has_tools = "tools" in problem.chat_template_kwargs
        roles: list[Role] = ["tool", "user"] if has_tools else ["user"]
        for role in roles:
            if reason := _unstable(tokenizer, problem, role):
                raise ConfigError(
                    f"the chat template of {tokenizer.name_or_path} {reason}, so that task "
                    f"'{problem.task}' with several turns cannot keep the sampled tokens; choose "
                    "another model, or give it a chat template that only appends"
                )


def _without_end(
    tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any]
) -> str:
    """The text of a chat without what depends on the assistant's turn: Phi-3's end token."""
    texts = (_rendered(tokenizer, messages, variables, prompt=prompt) for prompt in (False, True))
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
    return "".join(character for character, _ in pairs)


def _unstable(tokenizer: Tokenizer, problem: Problem, role: Role) -> str:
    """Why a message of a role cannot continue the episode of a problem; empty if it can."""
    variables = problem.chat_template_kwargs
    turn = (Message("assistant", PLACEHOLDER), Message(role, REPLY))
    try:
        start, once, twice = (
            _without_end(tokenizer, chat, variables) if chat else ""
            for chat in ([*problem.messages, *turn * count] for count in range(3))
        )
    except TemplateError as error:
        return f"refuses a message with the role {role} ({error})"
    if once.count(PLACEHOLDER) != 1 or twice.count(PLACEHOLDER) != 2:
        return "drops completions when messages follow"
    if REPLY not in once:
        return f"drops messages with the role {role}"
    after_once, after_twice = (text.partition(PLACEHOLDER)[2] for text in (once, twice))
    starts = (once, start), (twice, start), (after_twice, after_once)
    if not all(text.startswith(beginning) for text, beginning in starts):
        return "changes earlier messages when others follow"
    end = _tokenized(tokenizer, after_once)[:1]
    if not {*end} & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}:
        return "writes no end token after a completion"
    return ""
