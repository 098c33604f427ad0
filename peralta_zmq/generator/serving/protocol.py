"""JSON of OpenAI's chat API: requests to completions, completions to replies, error bodies.

A request with a field that the server would not honour is refused; a null is an absent field.
"""

from __future__ import annotations

import json
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from peralta_zmq import models
from peralta_zmq.atomic_files import parse_json
from peralta_zmq.errors import ConfigError
from peralta_zmq.generator.serving.chats import MAX_WAITING, ChatCompletion
from peralta_zmq.rollout import FinishReason, Message, Role, SampledToken, Sampling

ROLES: tuple[Role, ...] = ("system", "user", "assistant")
MAX_STOP = 4  # stop strings, as in OpenAI's API
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # in place of the bytes of an incomplete character
# Fields without an effect on completions, and fields that must have one of the values here. A field
# of a message may have those values, too.
IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "user")
NEUTRAL: Mapping[str, Sequence[object]] = {
    "annotations": [[]],
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "parallel_tool_calls": [True, False],
    "top_logprobs": [0],
    "logit_bias": [{}],
    "modalities": [["text"]],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto"],
    "store": [False],
    "tools": [[]],
    "tool_calls": [[]],
    "tool_choice": ["none", "auto"],
}


class ApiError(HTTPException):
    """A refused request: an HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(status, message)
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request: `n` completions of one prompt."""

    completions: Sequence[ChatCompletion]
    stream: bool
    include_usage: bool  # in a stream
    logprobs: bool


class _Fields:
    """Fields of a JSON object; each is read once, and `finish` refuses the others."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._prefix = prefix

    def take(self, name: str) -> Any:
        """The value, or None."""
        return self._left.pop(name, None)

    def number(
        self, name: str, default: float, *, least: float, most: float, or_zero: bool = False
    ) -> float:
        """A number from `least` to `most`, or 0 if `or_zero`."""
        value = self._take(name, (int, float), "a number")
        if value is None:
            return default
        if not (least <= value <= most or (or_zero and value == 0)):
            zero = "0, or " if or_zero else ""
            raise ApiError(f"{name} {value} must be {zero}from {least:g} to {most:g}", param=name)
        return float(value)

    def integer(self, name: str, *, least: int | None = None) -> int | None:
        """An integer of at least `least`."""
        value = self._take(name, (int,), "an integer")
        if value is not None and least is not None and value < least:
            raise ApiError(f"{name} {value} must be at least {least}", param=name)
        return value

    def flag(self, name: str) -> bool:
        """A boolean; False if absent."""
        return bool(self._take(name, (bool,), "true or false"))

    def _take(self, name: str, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.take(name)
        if value is not None and type(value) not in kinds:  # a bool is no number
            raise ApiError(f"{self._prefix}{name} must be {expected}", param=name)
        return value

    def finish(self) -> None:
        """Refuse fields that were not read, unless they ask for nothing."""
        for name, value in self._left.items():
            if name in IGNORED or value in NEUTRAL.get(name, ()):
                continue
            neutral = f" or set it to {json.dumps(NEUTRAL[name][0])}" if name in NEUTRAL else ""
            raise ApiError(
                f"{self._prefix}{name} is not supported here; leave it out{neutral}",
                param=name,
                code="unsupported_parameter",
            )


def parse_request(
    body: bytes,
    *,
    model: str,
    tokenizer: models.Tokenizer,
    template_kwargs: Mapping[str, Any],
    max_model_len: int,
) -> ChatRequest:
    """Check a request body and tokenize its messages; raises ApiError."""
    try:
        parsed = parse_json(body)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ApiError("the body must be a JSON object")
    fields = _Fields(parsed)
    check_model(fields.take("model"), model)
    rows = fields.take("messages")
    if not isinstance(rows, list) or not rows:
        raise ApiError("messages must be a list of at least one message", param="messages")
    messages = [_message(row, f"messages[{index}]") for index, row in enumerate(rows)]
    try:
        prompt_ids = models.chat_prompt(tokenizer, messages, max_model_len, **template_kwargs)
    except ConfigError as error:
        raise ApiError(str(error), param="messages") from None
    limit = _limit(fields, len(prompt_ids), max_model_len)
    n = fields.integer("n", least=1) or 1
    if n > MAX_WAITING:
        raise ApiError(f"n {n} must be at most {MAX_WAITING}", param="n")
    seed = fields.integer("seed")
    seed = secrets.randbits(32) if seed is None else seed
    sampling = Sampling(
        # Smaller values would not be finite or not positive in float32.
        temperature=fields.number("temperature", 1.0, least=0.01, most=2.0, or_zero=True),
        top_p=fields.number("top_p", 1.0, least=1e-4, most=1.0),
        stop=_stop_strings(fields.take("stop")),
        max_completion_length=limit,
    )
    stream = fields.flag("stream")
    logprobs = fields.flag("logprobs")
    include_usage = _stream_options(fields.take("stream_options"), stream=stream)
    fields.finish()
    completions = [
        # Each choice has its own random numbers, which depend on the seed of the request only.
        ChatCompletion(
            np.array(prompt_ids, np.int32),
            replace(sampling, seed=zlib.crc32(f"{seed}/{choice}".encode())),
        )
        for choice in range(n)
    ]
    return ChatRequest(completions, stream, include_usage, logprobs)


def check_model(requested: Any, model: str) -> None:
    """Raise ApiError for another model than `model`; None stands for any."""
    if requested not in (None, model):
        raise ApiError(
            f"the model {json.dumps(requested)} does not exist; use {json.dumps(model)}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _message(value: Any, name: str) -> Message:
    """A message whose content is a string or a list of text parts."""
    if not isinstance(value, dict):
        raise ApiError(f"{name} must be an object with role and content", param=name)
    fields = _Fields(value, f"{name}.")
    role, content, author = (fields.take(key) for key in ("role", "content", "name"))
    if role == "developer":  # OpenAI's newer name
        role = "system"
    if role not in ROLES:
        raise ApiError(
            f"{name}.role {json.dumps(role)} is unknown; choose one of {', '.join(ROLES)}",
            param=f"{name}.role",
        )
    if content is None and role == "assistant":  # a message of tool calls or a refusal alone
        content = ""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        texts: list[Any] = [part.get("text") for part in parts if part.get("type") == "text"]
        are_texts = len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
        content = "".join(texts) if are_texts else None
    if not isinstance(content, str):
        raise ApiError(f"{name}.content must be text", param=f"{name}.content")
    if not isinstance(author, str | None):
        raise ApiError(f"{name}.name must be text", param=f"{name}.name")
    fields.finish()
    return Message(role, content, author or "")


def _limit(fields: _Fields, num_prompt: int, max_model_len: int) -> int:
    """Maximum number of sampled tokens: as requested, else what the prompt leaves."""
    newer, older = (
        fields.integer(name, least=1) for name in ("max_completion_tokens", "max_tokens")
    )
    requested = older if newer is None else newer
    if num_prompt + (requested or 1) > max_model_len:
        raise ApiError(
            f"the messages are at least {num_prompt} tokens and the completion may have "
            f"{requested or 1}, but the context of this generator is {max_model_len} tokens "
            "(engine.max_model_len); shorten the messages or lower max_completion_tokens",
            param="messages",
            code="context_length_exceeded",
        )
    return requested or max_model_len - num_prompt


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise ApiError("stop must be a string or a list of strings", param="stop")
    is_text = "".join(strings).encode("utf-8", "ignore").decode() == "".join(strings)
    if len(strings) > MAX_STOP or "" in strings or not is_text:
        reason = f"stop must be at most {MAX_STOP} strings, none empty or with a lone surrogate"
        raise ApiError(reason, param="stop")
    return tuple(strings)


def _stream_options(value: Any, *, stream: bool) -> bool:
    """The option include_usage."""
    if value is None:
        return False
    if not stream or not isinstance(value, dict):
        raise ApiError("stream_options is an object, with stream only", param="stream_options")
    fields = _Fields(value, "stream_options.")
    include_usage = fields.flag("include_usage")
    fields.finish()
    return include_usage


# Replies.


class Replies:
    """Makes the reply to a request, or the chunks of its stream."""

    def __init__(self, request: ChatRequest, tokenizer: models.Tokenizer, model: str) -> None:
        self._chats = request.completions
        self._has_logprobs = request.logprobs
        self._tokenizer = tokenizer
        self._model = model
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self) -> dict[str, Any]:
        """The reply; all completions must have ended."""
        choices = list[dict[str, Any]]()
        for index, chat in enumerate(self._chats):
            completion = chat.result.result()
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            choices.append({
                "index": index,
                "message": message,
                "logprobs": self._logprobs(chat.tokens),
                "finish_reason": completion.finish_reason,
            })  # fmt: skip
        return {**self._object("chat.completion", choices), "usage": self._usage()}

    def chunk(
        self,
        index: int,
        delta: Mapping[str, str],
        tokens: Sequence[SampledToken] = (),
        finish_reason: FinishReason | None = None,
    ) -> dict[str, Any]:
        """A chunk of the stream: what choice `index` has more than in its chunks so far."""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": finish_reason,
        }
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream with include_usage; all completions must have ended."""
        return {**self._object("chat.completion.chunk", []), "usage": self._usage()}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": fingerprint(self._chats),
            "choices": choices,
        }

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        entries = list[dict[str, Any]]()
        for token_id, logprob, _ in tokens:
            text = str(self._tokenizer.decode([token_id]))
            is_part = INCOMPLETE in text  # of a character of several bytes
            content = None if is_part else list(text.encode("utf-8", "replace"))
            entry = {"token": text, "logprob": logprob, "bytes": content, "top_logprobs": []}
            entries.append(entry)
        return {"content": entries, "refusal": None}

    def _usage(self) -> dict[str, int]:
        num_prompt = len(self._chats[0].prompt_ids)
        num_sampled = sum(len(chat.tokens) for chat in self._chats)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }


class ChoiceStream:
    """The chunks of one choice, as its tokens are sampled."""

    def __init__(self, index: int, chat: ChatCompletion, tokenizer: models.Tokenizer) -> None:
        self._index = index
        self._chat = chat
        self._tokenizer = tokenizer
        self._num_tokens = 0  # in the chunks so far, as `_num_characters`
        self._num_characters = 0
        self.has_ended = False

    def next_chunks(self, replies: Replies) -> Sequence[dict[str, Any]]:
        """What was sampled since the last call. Raises InterruptedChatError."""
        if self.has_ended:
            return []
        completion = self._chat.result.result() if self._chat.result.done() else None
        tokens = self._chat.tokens[:]
        new_tokens = tokens[self._num_tokens :]
        if completion is None and not new_tokens:
            return []
        text = self._certain_text(tokens) if completion is None else completion.text
        delta = {"content": text[self._num_characters :]}
        if not self._num_tokens:
            delta = {"role": "assistant", **delta}
        chunks = [replies.chunk(self._index, delta, new_tokens)]
        self._num_tokens = len(tokens)
        self._num_characters = max(self._num_characters, len(text))
        if completion is not None:
            self.has_ended = True
            end = replies.chunk(self._index, {}, finish_reason=completion.finish_reason)
            chunks.append(end)
        return chunks

    def _certain_text(self, tokens: Sequence[SampledToken]) -> str:
        """The text of `tokens` without what a further token may change.

        This is the text that may be the start of a stop string or of a character, and the text of
        the last token, which may be an end token.
        """
        stop = self._chat.sampling.stop
        text = models.text_of(self._tokenizer, [token_id for token_id, _, _ in tokens[:-1]])
        end = len(text.rstrip(INCOMPLETE)) - max((len(each) - 1 for each in stop), default=0)
        return text[: max(0, min((text.find(each) for each in stop if each in text), default=end))]


def fingerprint(chats: Sequence[ChatCompletion]) -> str:
    """`step-7`, or `step-7..9`: the policy steps of the weights that have sampled `chats` so far.

    The steps of a completion never decrease.
    """
    steps = [chat.tokens[index][2] for chat in chats if chat.tokens for index in (0, -1)]
    oldest = min(steps)
    newest = max(steps)
    return f"step-{oldest}" if oldest == newest else f"step-{oldest}..{newest}"
