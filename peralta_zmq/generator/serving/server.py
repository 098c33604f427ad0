"""HTTP server of chats: routes, access control, streams.

    POST /v1/chat/completions    a completion of a chat, or a stream of its chunks
    GET  /v1/models              the name of the model
    GET  /v1/models/NAME         the same model; the base URL of a client may lack /v1

Handlers run in a thread of the server. They poll the tokens that the engine's thread samples, so
that a token costs the engine no switch of threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from peralta_zmq import models
from peralta_zmq.errors import ConfigError
from peralta_zmq.generator.serving.chats import (
    MAX_WAITING,
    ChatCompletion,
    ChatQueue,
    InterruptedChatError,
    QueueFullError,
)
from peralta_zmq.generator.serving.protocol import (
    ApiError,
    ChatRequest,
    Replies,
    TextStream,
    check_model,
    parse_request,
)
from peralta_zmq.http_server import FOREIGN_HOST, listen, may_answer
from peralta_zmq.observe.asgi_server import make_server

POLL_SECONDS = 0.05  # between two chunks of a stream, and two checks for a client that hung up
CLOSE_SECONDS = 2.0
MAX_BODY_BYTES = 2**20
logger = logging.getLogger(__name__)


class ChatServer:
    """Serves chats in a daemon thread. Use with `closing`.

    `model` is the name that requests may give. `token` is the API key; None = none is needed.
    Raises ConfigError if the port cannot be used.
    """

    def __init__(
        self,
        chats: ChatQueue,
        tokenizer: models.Tokenizer,
        *,
        host: str,
        port: int,
        token: str | None,
        model: str,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        try:
            self._socket = listen(host, port, host_setting="generator.serve_port")
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"generator.serve_port: port {port} cannot be used ({error}); choose another"
            ) from None
        self.port = int(self._socket.getsockname()[1])  # the assigned port if `port` is 0
        self.url = f"http://{host if token is None else socket.gethostname()}:{self.port}/v1"
        self._chats = chats
        api = Api(chats, tokenizer, model=model, template_kwargs=template_kwargs)
        self._server = make_server(make_app(api, token=token))
        self._thread = threading.Thread(target=self._serve, name="chats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; chats are interrupted."""
        self._chats.close()
        self._server.should_exit = True
        self._thread.join(CLOSE_SECONDS)
        self._socket.close()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception as error:  # noqa: BLE001 - must not affect the generator
            logger.warning("chat server stopped (%.300r); sampling continues", error)


def make_app(api: Api, *, token: str | None) -> ASGIApp:
    """The ASGI application, with access control."""
    routes = [
        Route("/chat/completions", api.complete_chat, methods=["POST"]),
        Route("/models", api.list_models),
        Route("/models/", api.list_models),
        Route("/models/{name:path}", api.list_models),
    ]
    handlers = {ApiError: _refuse, HTTPException: _refuse_route, Exception: api.fail}
    app = Starlette(routes=[Mount("/v1", routes=routes), *routes], exception_handlers=handlers)
    return AccessControl(app, token=token)


class AccessControl:
    """ASGI middleware: refuses requests without the token, or without one foreign Host headers.

    Also refuses bodies that are not declared as JSON: web pages of other sites can send those to
    this machine without asking the browser's permission.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(Request(scope))
            await (_error(refusal) if refusal else self._app)(scope, receive, send)

    def _refusal(self, request: Request) -> ApiError | None:
        if not may_answer(request.headers, token=self._token):
            if self._token is None:
                return ApiError(FOREIGN_HOST)
            message = "wrong API key; use the one in generator.token_file"
            return ApiError(message, status=401, code="invalid_api_key")
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and content_type != "application/json":
            return ApiError("the header Content-Type must be application/json", status=415)
        return None


class Api:
    """The handlers of requests."""

    def __init__(
        self,
        chats: ChatQueue,
        tokenizer: models.Tokenizer,
        *,
        model: str,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._chats, self._model, self._template_kwargs = chats, model, template_kwargs
        self._tokenizer = deepcopy(tokenizer)  # a tokenizer cannot be used in two threads
        self._created = int(time.time())
        self._logged = set[str]()  # types of exceptions

    async def list_models(self, request: Request) -> Response:
        """Return the only model, in a list unless the path names it."""
        name = request.path_params.get("name")
        check_model(name, self._model)
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "peralta_zmq",
            "max_model_len": self._chats.max_model_len,
        }
        return _json({"object": "list", "data": [card]} if name is None else card)

    async def complete_chat(self, request: Request) -> Response:
        """Return a completion, or a stream."""
        chat_request = parse_request(
            await _body(request),
            model=self._model,
            tokenizer=self._tokenizer,
            template_kwargs=self._template_kwargs,
            max_model_len=self._chats.max_model_len,
        )
        replies = Replies(chat_request, self._tokenizer, self._model)
        try:
            self._chats.submit(chat_request.completions)
            if chat_request.stream:
                chunks = self._stream(request, chat_request, replies)
                return StreamingResponse(chunks, media_type="text/event-stream")
            return await self._reply(request, chat_request.completions, replies)
        except QueueFullError:
            message = f"{MAX_WAITING} completions are waiting already; try again later"
            raise ApiError(
                message, status=429, code="rate_limit_exceeded", kind="requests"
            ) from None
        except InterruptedChatError as error:
            raise _interrupted(error) from None

    async def _reply(
        self, request: Request, chats: Sequence[ChatCompletion], replies: Replies
    ) -> Response:
        """The whole reply. Raises InterruptedChatError."""
        try:
            results = _results(chats)
            while not results.done():
                if await _has_hung_up(request, results):
                    return Response()  # nobody reads it
            return _json(replies.whole())
        finally:
            self._chats.cancel(chats)

    async def _stream(
        self, request: Request, chat_request: ChatRequest, replies: Replies
    ) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        chats = chat_request.completions
        streams = [ChoiceStream(index, chat, self._tokenizer) for index, chat in enumerate(chats)]
        try:
            results = _results(chats)
            while not all(stream.has_ended for stream in streams):
                if await _has_hung_up(request, results):
                    return
                for stream in streams:
                    for chunk in stream.next_chunks(replies):
                        yield _event(chunk)
            if chat_request.include_usage:
                yield _event(replies.usage_chunk())
            yield "data: [DONE]\n\n"
        except InterruptedChatError as error:
            yield _event(_interrupted(error).body)
        finally:
            self._chats.cancel(chats)

    async def fail(self, request: Request, error: Exception) -> Response:
        """Log each type of exception once only: a client may repeat its request."""
        if (kind := type(error).__name__) not in self._logged:
            self._logged.add(kind)
            logger.warning("chat request failed (%.300r)", error)
        message = "internal error; see the log of the generator"
        return _error(ApiError(message, status=500, kind="server_error"))


class ChoiceStream:
    """The chunks of one choice."""

    def __init__(self, index: int, chat: ChatCompletion, tokenizer: models.Tokenizer) -> None:
        self._index, self._chat = index, chat
        self._text = TextStream(tokenizer, chat.sampling.stop)
        self._num_sent = 0  # tokens
        self.has_ended = False

    def next_chunks(self, replies: Replies) -> Sequence[dict[str, Any]]:
        """What was sampled since the last call. Raises InterruptedChatError."""
        if self.has_ended:
            return []
        completion = self._chat.result.result() if self._chat.result.done() else None
        tokens = self._chat.tokens[:]
        new_tokens = tokens[self._num_sent :]
        if completion is None and not new_tokens:
            return []
        text = (
            self._text.next_piece(tokens) if completion is None
            else self._text.last_piece(completion.text)
        )  # fmt: skip
        role = {} if self._num_sent else {"role": "assistant"}
        chunks = [replies.chunk(self._index, {**role, "content": text}, new_tokens)]
        self._num_sent = len(tokens)
        if completion is not None:
            self.has_ended = True
            end = replies.chunk(self._index, {}, finish_reason=completion.finish_reason)
            chunks.append(end)
        return chunks


def _results(chats: Sequence[ChatCompletion]) -> asyncio.Future[Any]:
    """Done when all completions have ended, with or without an error."""
    futures = [asyncio.wrap_future(chat.result) for chat in chats]
    return asyncio.gather(*futures, return_exceptions=True)


async def _has_hung_up(request: Request, results: asyncio.Future[Any]) -> bool:
    """Wait until `results` is done, at most POLL_SECONDS; True if the client hung up."""
    await asyncio.wait([results], timeout=POLL_SECONDS)
    return await request.is_disconnected()


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body is longer than {MAX_BODY_BYTES} bytes", status=413)
    return body


def _interrupted(error: InterruptedChatError) -> ApiError:
    return ApiError(str(error), status=503, kind="server_error", code="interrupted")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _refuse_route(request: Request, error: Exception) -> Response:
    """An unknown path or method, as OpenAI's API reports it."""
    assert isinstance(error, HTTPException)
    message = f"unknown request: {request.method} {request.scope['path']}"
    return _error(ApiError(message, status=error.status_code, code="unknown_url"))


def _error(error: ApiError) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return _json(error.body, status=error.status, headers=headers)


def _json(
    content: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response in ASCII, because texts may have unpaired surrogates."""
    return Response(json.dumps(content), status, headers=headers, media_type="application/json")


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
