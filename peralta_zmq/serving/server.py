"""HTTP server of chats: routes, access control, streams.

    POST /v1/chat/completions    a completion of a chat, or a stream of its chunks
    GET  /v1/models              the name of the model
    GET  /v1/models/NAME         the same model; the base URL of a client may lack /v1
    POST /rl/sessions            a session: {"group": NAME, "size": K} -> {"id", "base_url",
                                 "api_key"}; K sessions of one name are a group
    POST /rl/sessions/ID/reward  its reward: {"reward": NUMBER or terms}
    POST /rl/sessions/ID/end     its end; without a reward, the group is dropped
    ... /rl/sessions/ID/v1/...   the routes above (or model "session:ID"), and in addition
    POST /rl/sessions/ID/inference/v1/generate    a completion of token ids

What a client samples through a session is recorded, and trained with the reward of the session.
Handlers poll the tokens that the engine's thread samples, so that a token costs no switch of
threads.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from peralta_zmq import models
from peralta_zmq.engines.sessions import (
    MAX_BRANCHES,
    AgentRun,
    ChatCompletion,
    InterruptedChatError,
    QueueFullError,
    Session,
)
from peralta_zmq.http_server import HttpServer, Limits, open_port, read_body
from peralta_zmq.serving.chats import MAX_WAITING, ChatQueue
from peralta_zmq.serving.protocol import (
    ApiError,
    ChatRequest,
    ChoiceStream,
    Replies,
    check_model,
    parse_request,
    parse_reward,
    parse_session,
    parse_token_request,
    token_reply,
)

MAX_OPEN = 8  # completions of a session at the same time


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
        session_seconds: float = 600.0,  # time limit of a session that a client opens
        limits: Limits | None = None,
    ) -> None:
        self._chats = chats
        self._sessions = chats.sessions
        self._session_seconds = session_seconds
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
        session = [
            Route("/reward", self.set_reward, methods=["POST"]),
            Route("/end", self.end_session, methods=["POST"]),
            Route("/inference/v1/generate", self.complete_tokens, methods=["POST"]),
            Mount("/v1", routes=routes),
        ]
        setting = "generator.serve_port"
        self._server = HttpServer(
            "chat server",
            [
                Route("/rl/sessions", self.open_session, methods=["POST"]),
                Mount("/rl/sessions/{key}", routes=session),
                Mount("/v1", routes=routes),
                *routes,
            ],
            listening=open_port(host, port, token=token, settings=(setting, setting), num_ports=20),
            token=token,
            token_setting="generator.token_file",
            refuse=_refuse,
            limits=limits,
        )
        self.port = self._server.port
        address = f"http://{host if token is None else socket.gethostname()}:{self.port}"
        self.url = f"{address}/v1"
        self._sessions.local_url = f"http://127.0.0.1:{self.port}"
        self._sessions.server_url = address
        self._sessions.token = token
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
        session = self._session(request.path_params.get("key"))
        chat_request = parse_request(
            await _json_body(request),
            session=session,
            find_session=self._session,
            model=self._model,
            tokenizer=self._tokenizer,
            template_kwargs=self._template_kwargs,
            max_model_len=self._chats.max_model_len,
        )
        replies = Replies(chat_request, self._tokenizer, self._model)
        self._check_turns(chat_request.completions)
        with _api_errors():
            self._submit(chat_request.completions)
            if chat_request.stream:
                chunks = self._stream(request, chat_request, replies)
                return StreamingResponse(chunks, media_type="text/event-stream")
            if not await self._wait(request, chat_request.completions):
                return Response()  # nobody reads it
            return _json(replies.whole())

    async def complete_tokens(self, request: Request) -> Response:
        session = self._session(request.path_params["key"])
        assert session is not None
        chat = parse_token_request(
            await _json_body(request),
            session=session,
            model=self._model,
            vocab_size=len(self._tokenizer),
            max_model_len=self._chats.max_model_len,
        )
        self._check_turns([chat])
        with _api_errors():
            self._submit([chat])
            if not await self._wait(request, [chat]):
                return Response()
            return _json(token_reply(chat, chat.result.result()))

    async def open_session(self, request: Request) -> Response:
        group, size = parse_session(await _json_body(request))
        with _api_errors():
            session = self._sessions.join(group, size, seconds=self._session_seconds)
        return _json({"id": session.key, "base_url": session.url, "api_key": session.api_key})

    async def set_reward(self, request: Request) -> Response:
        run = self._run(request)
        score = parse_reward(await _json_body(request))
        if run.given is not None:
            raise ApiError("the session has a reward already", status=409)
        run.given = score
        return _json({"reward": score.reward})

    async def end_session(self, request: Request) -> Response:
        run = self._run(request)
        run.end("a session ended without a reward")
        return _json({"turns": len(run.session.turns), "branches": run.session.num_branches})

    def _session(self, key: str | None) -> Session | None:
        """The session with a key; None without a key. Raises ApiError."""
        if key is None:
            return None
        session = self._sessions.find(key)
        if session is None or session.is_closed:
            raise ApiError("the session has ended, or never began", status=404, code="no_session")
        return session

    def _check_turns(self, chats: Sequence[ChatCompletion]) -> None:
        """Raise ApiError for turns that their session may not have."""
        if (session := chats[0].session) is None:
            return
        num_open = session.num_open + len(chats)
        if num_open > MAX_OPEN:
            message = f"a session can have {MAX_OPEN} open completions; wait for one"
            raise ApiError(message, status=429, code="rate_limit_exceeded", kind="requests")
        limit = self._sessions.max_turns
        chat = chats[0]
        continued = {turn.previous for turn in session.turns}
        branches = num_open > 1 or chat.previous is None or chat.previous in continued
        is_first = not session.turns and num_open == 1
        if chat.previous is not None and len(chat.previous.path) >= limit:
            raise ApiError(f"the session has had {limit} turns (task.max_turns)", code="max_turns")
        if branches and session.num_branches + num_open > MAX_BRANCHES:
            message = f"the session has {MAX_BRANCHES} histories, which is the limit"
            raise ApiError(message, status=409, code="history")
        if branches and not is_first and not self._sessions.may_branch:
            message = (
                "the messages do not continue those of an earlier request of the session; append "
                "to them, or set task.agent_history to branch"
            )
            raise ApiError(message, status=409, code="history")

    def _run(self, request: Request) -> AgentRun:
        run = self._sessions.find_run(request.path_params["key"])
        if run is None:
            message = "no session that a client opened, or it has ended"
            raise ApiError(message, status=404, code="no_session")
        return run

    def _submit(self, chats: Sequence[ChatCompletion]) -> None:
        if chats[0].session is None:
            self._chats.submit(chats)
            return
        for chat in chats:
            self._sessions.submit(chat)

    async def _wait(self, request: Request, chats: Sequence[ChatCompletion]) -> bool:
        """Wait for completions; False, and they are cancelled, if the client hangs up."""
        with self._open(chats):
            ended = _ended(chats)
            while not ended.done():
                if await _has_hung_up(request, ended):
                    return False
            return True

    @contextmanager
    def _open(self, chats: Sequence[ChatCompletion]) -> Generator[None]:
        """Count an open request of its session; cancels what it has not sampled at the end."""
        session = chats[0].session
        if session is not None:
            session.num_open += len(chats)
        try:
            yield
        finally:
            self._chats.cancel(chats)
            if session is not None:
                session.num_open -= len(chats)

    async def _stream(
        self, request: Request, chat_request: ChatRequest, replies: Replies
    ) -> AsyncIterator[str]:
        chats = chat_request.completions
        streams = [
            ChoiceStream(index, chat, self._tokenizer, chat_request)
            for index, chat in enumerate(chats)
        ]
        with self._open(chats):
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


async def _json_body(request: Request) -> bytes:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Web pages of other sites can send other types without the browser's permission.
        raise ApiError("the header Content-Type must be application/json", status=415)
    return await read_body(request, max_bytes=2**20)


@contextmanager
def _api_errors() -> Generator[None]:
    try:
        yield
    except QueueFullError:
        message = (
            f"{MAX_WAITING} completions are waiting already, or no group may begin now; try again "
            "later"
        )
        raise ApiError(message, status=429, code="rate_limit_exceeded", kind="requests") from None
    except InterruptedChatError as error:
        raise _interrupted(error) from None


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
