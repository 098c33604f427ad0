"""JSON of OpenAI's chat API: requests to completions, completions to replies, error bodies.

A request with a field that the server would not honour is refused.
"""

from __future__ import annotations

import json
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

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
from peralta_zmq.engines.sessions import ChatCompletion, Session, Turn
from peralta_zmq.environments.reward_functions import checked_score
from peralta_zmq.environments.tool_calls import assistant_message
from peralta_zmq.errors import ConfigError, RewardError
from peralta_zmq.rollout import (
    Completion,
    Int32Array,
    Message,
    SampledToken,
    Sampling,
    Score,
    ToolCall,
)
from peralta_zmq.serving.chats import MAX_WAITING

SESSION_MODEL = "session:"  # start of a model name that ends with the key of a session
END_OF_REASONING = "</think>"
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
    "tool_choice": ["none", "auto"],
}


Body = TypeVar("Body", bound=BaseModel)


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


class _Function(_Fields):
    name: str
    arguments: str = "{}"  # JSON

    @property
    def call(self) -> ToolCall:
        try:
            arguments = parse_json(self.arguments)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ApiError(f"arguments of the tool call {self.name!r:.50} are not a JSON object")
        return ToolCall(self.name, arguments)


class _ToolCall(_Fields):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, Field(default=None, validate_default=True)]
    name: str = ""
    tool_call_id: str = ""
    reasoning_content: str = ""
    tool_calls: list[_ToolCall] = []

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
    tools: list[dict[str, Any]] = []

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


def _parsed(kind: type[Body], body: bytes) -> Body:
    try:
        return kind.model_validate(parse_json(body))
    except ValidationError as error:
        raise _refused(error) from None
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON ({error})") from None


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
    stream: bool = False
    include_usage: bool = False  # in a stream
    logprobs: bool = False
    messages: tuple[Message, ...] = ()
    tools: str = ""  # JSON; empty without tools

    def reply(self, completion: Completion) -> Message:
        """The assistant's message; calls that cannot be parsed are text, as all of a stream is."""
        reasoning, end, content = completion.text.partition(END_OF_REASONING)
        if self.stream or not end:
            reasoning = ""
            content = completion.text
        if reasoning:
            content = content.strip()
        message = assistant_message(content, json.loads(self.tools)) if self.tools else None
        if message is None or any(call.error for call in message.tool_calls):
            message = Message("assistant", content)
        return replace(message, reasoning=reasoning.removeprefix("<think>").strip())

    def record(self, chat: ChatCompletion, completion: Completion) -> None:
        if chat.session is not None:
            messages = (*self.messages, self.reply(completion))
            chat.session.record(Turn(completion, chat.previous, messages, self.tools))


def parse_request(
    body: bytes,
    *,
    session: Session | None = None,
    find_session: Callable[[str], Session | None] = lambda key: None,
    model: str,
    tokenizer: models.Tokenizer,
    template_kwargs: Mapping[str, Any],
    max_model_len: int,
) -> ChatRequest:
    """Check a request body and tokenize its messages; raises ApiError."""
    fields = _parsed(_Body, body)
    if session is None and str(fields.model).startswith(SESSION_MODEL):
        session = find_session(fields.model.removeprefix(SESSION_MODEL))
    else:
        check_model(fields.model, model)
    messages = _messages(fields.messages)
    if fields.tools and "tools" not in str(tokenizer.chat_template):
        raise ApiError("the chat template of the model renders no tools", param="tools")
    variables = {**template_kwargs, "tools": fields.tools} if fields.tools else template_kwargs
    tools = json.dumps(fields.tools, sort_keys=True) if fields.tools else ""
    try:
        prompt_ids, previous = _prompt(
            session, tokenizer, messages, variables, tools=tools, limit=max_model_len
        )
    except ConfigError as error:
        raise ApiError(str(error), param="messages") from None
    room = _room(prompt_ids, fields.max_completion_tokens or fields.max_tokens, max_model_len)
    if session is None:
        sampling = Sampling(
            temperature=fields.temperature,
            top_p=fields.top_p,
            stop=tuple(fields.stop),
            max_completion_length=room,
        )
    else:
        sampling = _session_sampling(session, room, fields.stop)
    seed = secrets.randbits(32) if fields.seed is None else fields.seed
    completions = [
        ChatCompletion(prompt_ids, each, session, previous)
        for each in _choices(sampling, fields.n, None if session else seed)
    ]
    return ChatRequest(
        completions,
        fields.stream,
        fields.stream_options.include_usage,
        fields.logprobs,
        tuple(messages),
        tools,
    )


def _choices(sampling: Sampling, count: int, seed: int | None) -> list[Sampling]:
    """The sampling of each choice; its random numbers depend on the seed only, if there is one."""
    if seed is None:
        return [sampling] * count
    seeds = (zlib.crc32(f"{seed}/{choice}".encode()) for choice in range(count))
    return [replace(sampling, seed=each) for each in seeds]


def _session_sampling(session: Session, room: int, stop: Sequence[str] = ()) -> Sampling:
    """That of the run, because the trainer computes the logprobs of its temperature."""
    sampling = session.sampling
    length = min(room, sampling.max_completion_length)
    return replace(
        sampling,
        max_completion_length=length,
        fills_context=False,
        stop=(*sampling.stop, *stop),
        min_tokens=min(sampling.min_tokens, length),
    )


def _messages(rows: Sequence[_Message]) -> list[Message]:
    messages = list[Message]()
    names = dict[str, str]()  # name of the tool by id of the call
    for row in rows:
        names |= {call.id: call.function.name for call in row.tool_calls}
        messages.append(
            Message(
                "system" if row.role == "developer" else row.role,
                row.content,
                row.name or names.get(row.tool_call_id, ""),
                tuple(call.function.call for call in row.tool_calls),
                row.reasoning_content,
            )
        )
    return messages


def _prompt(
    session: Session | None,
    tokenizer: models.Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    tools: str,
    limit: int,
) -> tuple[Int32Array, Turn | None]:
    """The tokens of a chat, and the turn of the session that they continue.

    The history of a session keeps its recorded tokens. Raises ConfigError if the chat template
    refuses the messages.
    """
    previous = session.find_chat(messages, tools) if session else None
    if previous is not None:
        try:
            inserted = models.continuation_ids(
                tokenizer,
                previous.chat,
                messages[len(previous.chat) :],
                ended=previous.completion.has_end_token,
                limit=limit,
                chat_template_kwargs=variables,
            )
            return np.concatenate([previous.token_ids, np.array(inserted, np.int32)]), previous
        except RewardError:  # the template does not append the messages
            pass
    prompt_ids = np.array(models.chat_prompt(tokenizer, messages, limit, **variables), np.int32)
    return prompt_ids, session.find(prompt_ids) if session else None


def _room(prompt_ids: Int32Array, requested: int | None, max_model_len: int) -> int:
    """The largest number of tokens of a completion. Raises ApiError if there is no room."""
    if len(prompt_ids) + (requested or 1) > max_model_len:
        raise ApiError(
            f"the messages are at least {len(prompt_ids)} tokens and the completion may have "
            f"{requested or 1}, but the context of this generator is {max_model_len} tokens "
            "(engine.max_model_len); shorten the messages or lower max_completion_tokens",
            param="messages",
            code="context_length_exceeded",
        )
    return requested or max_model_len - len(prompt_ids)


class _SamplingParams(_Fields):
    model_config = ConfigDict(extra="ignore")  # a session has the sampling of the run

    max_tokens: Annotated[int | None, Field(ge=1)] = None
    stop_token_ids: list[int] = []


class _TokenBody(_Fields):
    model_config = ConfigDict(extra="ignore")  # such as cache_salt and priority

    model: Any = None
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), FailFast()]
    sampling_params: _SamplingParams = _SamplingParams()


def parse_token_request(
    body: bytes, *, session: Session, model: str, vocab_size: int, max_model_len: int
) -> ChatCompletion:
    """Check a request for a completion of token ids; raises ApiError."""
    fields = _parsed(_TokenBody, body)
    check_model(fields.model, model)
    if (largest := max(fields.token_ids)) >= vocab_size:
        raise ApiError(f"token id {largest} is not below {vocab_size}", param="token_ids")
    prompt_ids = np.array(fields.token_ids, np.int32)
    room = _room(prompt_ids, None, max_model_len)
    requested = fields.sampling_params.max_tokens or room
    sampling = _session_sampling(session, min(room, requested))
    return ChatCompletion(prompt_ids, sampling, session, session.find(prompt_ids))


def token_reply(chat: ChatCompletion, completion: Completion) -> dict[str, Any]:
    """The reply to a request with token ids, in the form of vLLM's /inference/v1/generate."""
    assert chat.session is not None
    chat.session.record(Turn(completion, chat.previous))
    ids = completion.token_ids.tolist()
    content = [
        {"token": f"token_id:{token_id}", "logprob": logprob}
        for token_id, logprob in zip(ids, completion.logprobs.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": completion.finish_reason,
    }
    return {
        "request_id": f"gen-{secrets.token_hex(12)}",
        "prompt_token_ids": completion.prompt_ids.tolist(),
        "choices": [choice],
        "system_fingerprint": fingerprint([chat]),
    }


class _SessionBody(_Fields):
    group: Annotated[str, Field(min_length=1, max_length=200)]
    size: Annotated[int, Field(ge=2, le=256)]


class _RewardBody(_Fields):
    reward: Any


def parse_session(body: bytes) -> tuple[str, int]:
    """Name and size of the group that a session joins; raises ApiError."""
    fields = _parsed(_SessionBody, body)
    return fields.group, fields.size


def parse_reward(body: bytes) -> Score:
    try:
        return checked_score(_parsed(_RewardBody, body).reward)
    except ValueError as error:
        raise ApiError(f"the reward is {error}", param="reward") from None


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
        self._request = request
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
            reply = self._request.reply(completion)
            message: dict[str, Any] = {"role": "assistant", "content": reply.content}
            message["refusal"] = None
            if reply.reasoning:
                message["reasoning_content"] = reply.reasoning
            if reply.tool_calls:
                message["tool_calls"] = _calls(reply)
            choices.append({
                "index": index,
                "message": message,
                "logprobs": self._logprobs(chat.tokens),
                "finish_reason": _finish_reason(completion, reply),
            })  # fmt: skip
            self._request.record(chat, completion)
        return {**self._object("chat.completion", choices), "usage": self._usage()}

    def chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        tokens: Sequence[SampledToken] = (),
        finish_reason: str | None = None,
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


def _calls(reply: Message) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in reply.tool_calls
    ]


def _finish_reason(completion: Completion, reply: Message) -> str:
    return "tool_calls" if reply.tool_calls else completion.finish_reason


class ChoiceStream:
    """The chunks of one choice, as its tokens are sampled; with tools, one chunk at the end."""

    def __init__(
        self, index: int, chat: ChatCompletion, tokenizer: models.Tokenizer, request: ChatRequest
    ) -> None:
        self._request = request
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
        if completion is None and (self._request.tools or not new_tokens):
            return []
        reply = None if completion is None else self._request.reply(completion)
        text = self._certain_text(tokens) if reply is None else reply.content
        delta: dict[str, Any] = {"content": text[self._num_characters :]}
        if not self._num_tokens:
            delta = {"role": "assistant", **delta}
        if reply is not None and reply.tool_calls:
            calls = enumerate(_calls(reply))
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
        chunks = [replies.chunk(self._index, delta, new_tokens)]
        self._num_tokens = len(tokens)
        self._num_characters = max(self._num_characters, len(text))
        if completion is not None and reply is not None:
            self.has_ended = True
            reason = _finish_reason(completion, reply)
            chunks.append(replies.chunk(self._index, {}, finish_reason=reason))
            self._request.record(self._chat, completion)
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
