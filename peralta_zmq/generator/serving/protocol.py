"""JSON of OpenAI's chat API: requests to completions, completions to replies, error bodies.

A request with a field that the server would not honour is refused.
"""

from __future__ import annotations

import json
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException

from peralta_zmq import models
from peralta_zmq.atomic_files import parse_json
from peralta_zmq.errors import ConfigError
from peralta_zmq.generator.serving.chats import MAX_WAITING, ChatCompletion
from peralta_zmq.rollout import FinishReason, Message, SampledToken, Sampling

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


class _Fields(BaseModel):
    """A JSON object; a null is an absent field. At most one unknown field is left to refuse."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _remove_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object")
        fields = dict[str, Any]()
        unknown = dict[str, Any]()
        for name, content in value.items():
            if content is None:
                continue
            if name in cls.model_fields:
                fields[name] = content
            elif not (unknown or name in IGNORED or content in NEUTRAL.get(name, ())):
                unknown[name] = content
        return fields | unknown


class _TextPart(_Fields):
    model_config = ConfigDict(extra="ignore")  # such as cache_control

    type: Literal["text"]
    text: str


class _Message(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(default=None, validate_default=True)]
    name: str = ""

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") == "assistant":
            return ""  # a message of tool calls or a refusal alone
        if not isinstance(content, list):
            return content
        parts = [_TextPart.model_validate(part) for part in content]
        return "".join(part.text for part in parts)


class _StreamOptions(_Fields):
    include_usage: bool = False


class _Body(_Fields):
    model: Any = None
    messages: Annotated[list[_Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    n: Annotated[int, Field(ge=1, le=MAX_WAITING)] = 1
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=1e-4, le=1)] = 1.0
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4), FailFast()] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    logprobs: bool = False

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float) -> float:
        if 0 < value < 0.01:  # logits / temperature would not be finite in float32
            raise ValueError("must be 0, or at least 0.01")
        return value

    @field_validator("stream_options")
    @classmethod
    def _check_stream(cls, value: _StreamOptions, info: ValidationInfo) -> _StreamOptions:
        if not info.data.get("stream"):
            raise ValueError("allowed with stream only")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _list_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def _refused(error: ValidationError) -> ApiError:
    """The first error, with the name of its field as in `messages[0].content`."""
    first = error.errors(include_url=False)[0]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
    param = "".join(parts).removeprefix(".")
    if first["type"] != "extra_forbidden":
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        value = "" if first["type"] == "missing" else f" {json.dumps(first['input'])[:50]}"
        return ApiError(f"{param or 'the body'}{value}: {reason}", param=param or None)
    values = NEUTRAL.get(str(first["loc"][-1]))
    neutral = f" or set it to {json.dumps(values[0])}" if values else ""
    reason = f"{param} is not supported here; leave it out{neutral}"
    return ApiError(reason, param=param, code="unsupported_parameter")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request: `n` completions of one prompt."""

    completions: Sequence[ChatCompletion]
    stream: bool
    include_usage: bool  # in a stream
    logprobs: bool


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
        fields = _Body.model_validate(parse_json(body))
    except ValidationError as error:
        raise _refused(error) from None
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON ({error})") from None
    check_model(fields.model, model)
    messages = [
        Message("system" if row.role == "developer" else row.role, row.content, row.name)
        for row in fields.messages
    ]
    try:
        prompt_ids = models.chat_prompt(tokenizer, messages, max_model_len, **template_kwargs)
    except ConfigError as error:
        raise ApiError(str(error), param="messages") from None
    requested = fields.max_completion_tokens or fields.max_tokens
    if len(prompt_ids) + (requested or 1) > max_model_len:
        raise ApiError(
            f"the messages are at least {len(prompt_ids)} tokens and the completion may have "
            f"{requested or 1}, but the context of this generator is {max_model_len} tokens "
            "(engine.max_model_len); shorten the messages or lower max_completion_tokens",
            param="messages",
            code="context_length_exceeded",
        )
    sampling = Sampling(
        temperature=fields.temperature,
        top_p=fields.top_p,
        stop=tuple(fields.stop),
        max_completion_length=requested or max_model_len - len(prompt_ids),
    )
    seed = secrets.randbits(32) if fields.seed is None else fields.seed
    completions = [
        # Each choice has its own random numbers, which depend on the seed of the request only.
        ChatCompletion(
            np.array(prompt_ids, np.int32),
            replace(sampling, seed=zlib.crc32(f"{seed}/{choice}".encode())),
        )
        for choice in range(fields.n)
    ]
    include_usage = fields.stream_options.include_usage
    return ChatRequest(completions, fields.stream, include_usage, fields.logprobs)


def check_model(requested: Any, model: str) -> None:
    """Raise ApiError for another model than `model`; None stands for any."""
    if requested not in (None, model):
        raise ApiError(
            f"the model {json.dumps(requested)} does not exist; use {json.dumps(model)}",
            status=404,
            param="model",
            code="model_not_found",
        )


# Replies.


class Replies:
    """Makes the reply to a request after all its completions, or the chunks of its stream."""

    def __init__(self, request: ChatRequest, tokenizer: models.Tokenizer, model: str) -> None:
        self._chats = request.completions
        self._has_logprobs = request.logprobs
        self._tokenizer = tokenizer
        self._model = model
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self) -> dict[str, Any]:
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
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": finish_reason,
        }
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self) -> dict[str, Any]:
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
        """The text that no further token can change: an end token, stop string or character."""
        stop = self._chat.sampling.stop
        text = models.text_of(self._tokenizer, [token_id for token_id, _, _ in tokens[:-1]])
        end = len(text.rstrip(INCOMPLETE)) - max((len(each) - 1 for each in stop), default=0)
        return text[: max(0, min((text.find(each) for each in stop if each in text), default=end))]


def fingerprint(chats: Sequence[ChatCompletion]) -> str:
    """`step-7`, or `step-7..9`: the policy steps of the sampled tokens, which never decrease."""
    steps = [chat.tokens[index].step for chat in chats if chat.tokens for index in (0, -1)]
    oldest = min(steps)
    newest = max(steps)
    return f"step-{oldest}" if oldest == newest else f"step-{oldest}..{newest}"
