"""HTTP server of chats: routes, access control, streams.

    POST /v1/chat/completions    a completion of a chat, or a stream of its chunks
    GET  /v1/models              the name of the model
    GET  /v1/models/NAME         the same model; the base URL of a client may lack /v1

Handlers poll the tokens that the engine's thread samples, so that a token costs no switch of
threads.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from peralta_zmq import models
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
    ChoiceStream,
    Replies,
    check_model,
    parse_request,
)
from peralta_zmq.http_server import HttpServer, Limits, open_port, read_body


class ChatServer:
    """Serves chats in a daemon thread, with the API key `token` (None = none is needed)."""

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
        limits: Limits | None = None,
    ) -> None:
        self._chats = chats
        self._model = model
        self._template_kwargs = template_kwargs
        self._tokenizer = deepcopy(tokenizer)  # a tokenizer cannot be used in two threads
        self._created = int(time.time())
        routes = [
            Route("/chat/completions", self.complete_chat, methods=["POST"]),
            Route("/models", self.list_models),
            Route("/models/", self.list_models),
            Route("/models/{name:path}", self.list_models),
        ]
        setting = "generator.serve_port"
        self._server = HttpServer(
            "chat server",
            [Mount("/v1", routes=routes), *routes],
            listening=open_port(host, port, token=token, settings=(setting, setting), num_ports=20),
            token=token,
            token_setting="generator.token_file",
            refuse=_refuse,
            limits=limits,
        )
        self.port = self._server.port
        self.url = f"http://{host if token is None else socket.gethostname()}:{self.port}/v1"
        self._server.start()

    def close(self) -> None:
        """Stop serving; chats are interrupted."""
        self._chats.close()
        self._server.close()

    async def list_models(self, request: Request) -> Response:
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
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            # Web pages of other sites can send other types without the browser's permission.
            raise ApiError("the header Content-Type must be application/json", status=415)
        chat_request = parse_request(
            await read_body(request, max_bytes=2**20),
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
            try:
                ended = _ended(chat_request.completions)
                while not ended.done():
                    if await _has_hung_up(request, ended):
                        return Response()  # nobody reads it
                return _json(replies.whole())
            finally:
                self._chats.cancel(chat_request.completions)
        except QueueFullError:
            message = f"{MAX_WAITING} completions are waiting already; try again later"
            raise ApiError(
                message, status=429, code="rate_limit_exceeded", kind="requests"
            ) from None
        except InterruptedChatError as error:
            raise _interrupted(error) from None

    async def _stream(
        self, request: Request, chat_request: ChatRequest, replies: Replies
    ) -> AsyncIterator[str]:
        chats = chat_request.completions
        streams = [ChoiceStream(index, chat, self._tokenizer) for index, chat in enumerate(chats)]
        try:
            ended = _ended(chats)
            while not all(stream.has_ended for stream in streams):
                if await _has_hung_up(request, ended):
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


def _ended(chats: Sequence[ChatCompletion]) -> asyncio.Future[Any]:
    futures = [asyncio.wrap_future(chat.result) for chat in chats]
    return asyncio.gather(*futures, return_exceptions=True)


async def _has_hung_up(request: Request, ended: asyncio.Future[Any]) -> bool:
    """Wait until `ended` is done, or until the next chunk of a stream; True for a hang-up."""
    await asyncio.wait([ended], timeout=0.05)
    return await request.is_disconnected()


def _interrupted(error: InterruptedChatError) -> ApiError:
    return ApiError(str(error), status=503, kind="server_error", code="interrupted")


def _refuse(request: Request, error: HTTPException) -> Response:
    """The response to a refused request, with an error object as in OpenAI's API."""
    if not isinstance(error, ApiError):
        message = error.detail
        if error.status_code in (404, 405):
            message = f"unknown request: {request.method} {request.scope['path']}"
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        error = ApiError(message, status=error.status_code, kind=kind)
    headers = {"Retry-After": "1"} if error.status_code in (429, 503) else None
    return _json(error.body, status=error.status_code, headers=headers)


def _json(
    content: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response in ASCII, because texts may have unpaired surrogates."""
    return Response(json.dumps(content), status, headers=headers, media_type="application/json")


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
