"""HTTP service for the problems and rewards of environments (`bin/verifier`).

    GET  /healthz  {"environments": {NAME: number of train problems}, "waiting", "workers"}
    GET  /problems?env=NAME&split=train|eval
                   ProblemsResponse
    POST /score    ScoreRequest -> {"scores": [{"reward", "rewards", "turn_rewards"}]}
    POST /reply    ReplyRequest -> {"messages": those to insert; null ends the episode}

verifier_client.py has the forms. The answers to the problems stay on this machine. The digest
identifies the problems of an environment with their answers, rewards and replies, so that a client
does not get rewards of other problems. Functions are called by a pool of workers; bounded reward
functions by the server's thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from typing import TypeVar

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from peralta_zmq.addresses import read_private_token
from peralta_zmq.build import dry_run, fitted_settings, open_environments
from peralta_zmq.config import Config
from peralta_zmq.environments.dataset import Environments, Functions
from peralta_zmq.environments.verifier_client import (
    ProblemsResponse,
    ReplyRequest,
    ReplyResponse,
    ScoreRequest,
    url_of,
)
from peralta_zmq.errors import ConfigError, PeraltaError
from peralta_zmq.http_server import HttpServer, Limits, open_port, read_body
from peralta_zmq.rollout import Problem

MAX_REQUEST_BYTES = 64 << 20
Form = TypeVar("Form", bound=BaseModel)
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError or TaskError if it cannot start."""
    with suppress(ConfigError):  # without the model the defaults stay
        config = fitted_settings.fit_settings(config, local=True).config
    section = config.verifier
    token = read_private_token(config.security.token_file)
    with closing(Verifier(config, host=section.host, port=section.port, token=token)) as verifier:
        verifier.log_dry_run(config)
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stopped.set())
        names = ", ".join(verifier.environments)
        logger.info("verifier on %s serves %s", url_of((section.host, verifier.port)), names)
        stopped.wait()


class Verifier:
    """HTTP server of the environments, in background threads. Use with `closing`.

    Clients must send `token` as a password; None = no password. Raises ConfigError if the port is
    in use, or reachable from other machines without a `token`.
    """

    def __init__(
        self,
        config: Config,
        *,
        host: str,
        port: int,
        token: str | None,
        limits: Limits | None = None,
    ) -> None:
        self._splits: dict[str, Environments] = {
            split: open_environments(config, split, local=True) for split in dry_run.SPLITS
        }
        self._problems = {
            (split, problem.task, problem.id): problem
            for split, environments in self._splits.items()
            for problem in environments.problems
        }
        self._digests = {
            (env, split): self._digest(env, split)
            for split, environments in self._splits.items()
            for env in environments.sizes
        }
        self._reward_timeout = config.task.reward_timeout
        self._starting = asyncio.Lock()  # the pools are used by one thread at a time
        routes = [
            Route("/healthz", self.health),
            Route("/problems", self.problems),
            Route("/score", self.score, methods=["POST"]),
            Route("/reply", self.reply, methods=["POST"]),
        ]
        self._server = HttpServer(
            "verifier",
            routes,
            listening=open_port(
                host, port, token=token, settings=("verifier.host", "verifier.port")
            ),
            token=token,
            token_setting="security.token_file",
            refuse=_refuse,
            limits=limits,
        )
        self.port = self._server.port
        self._server.start()

    def log_dry_run(self, config: Config) -> None:
        """Log what a trainer reports about the prompts, if `model.name` is on this machine."""
        with suppress(ConfigError):
            reader = dry_run.PromptReader.of(config)
            for split in dry_run.SPLITS:
                dry_run.log(dry_run.check_prompts(config, self._splits[split], split, reader)[1])

    def close(self) -> None:
        """Stop the server and the reward workers."""
        self._server.close()
        for environments in self._splits.values():
            environments.close()

    @property
    def environments(self) -> dict[str, int]:
        """Number of train problems of each environment."""
        return dict(self._splits["train"].sizes)

    # Responses.

    async def health(self, request: Request) -> Response:
        pools = [environments.pool for environments in self._splits.values()]
        return _json({
            "environments": self.environments,
            "waiting": sum(pool.num_waiting for pool in pools),
            "workers": sum(pool.num_workers for pool in pools),
        })  # fmt: skip

    def problems(self, request: Request) -> Response:
        env = request.query_params.get("env", "")
        split = request.query_params.get("split", "train")
        if split not in self._splits:
            raise HTTPException(404, f"split {split!r:.40} is not train or eval")
        environments = self._splits[split]
        if env not in environments.sizes:
            names = ", ".join(environments.sizes)
            raise HTTPException(404, f"no environment {env!r:.40}; there are {names}")
        functions = environments.functions[env]
        response = ProblemsResponse(
            problems=[
                replace(problem, answer=problem.id, info={}, chat_template_kwargs={})
                for problem in environments.problems
                if problem.task == env
            ],
            digest=self._digests[env, split],
            has_turns=functions.has_turns,
            tools=[dict(schema) for schema in functions.schemas],
        )
        return Response(response.model_dump_json(), media_type="application/json")

    async def score(self, request: Request) -> Response:
        """The scores of completions."""
        form = await _read(request, ScoreRequest)
        num_calls = len(form.completions)
        ids = form.completion_ids or [[]] * num_calls
        episodes = form.completion_messages or [[]] * num_calls
        if not num_calls == len(ids) == len(episodes):
            raise HTTPException(400, "the lists of completions, ids and messages differ in length")
        environments, problem = self._find(form.env, form.problem, form.digest)
        functions = environments.functions[form.env]
        turns = episodes if any(episodes) else ()
        scores = await self._result(
            functions,
            lambda: functions.score(problem, form.completions, ids, turns),
            num_calls=num_calls,
        )
        return _json({"scores": [score._asdict() for score in scores]})

    async def reply(self, request: Request) -> Response:
        """The messages that follow a completion, the last of the messages in the request."""
        form = await _read(request, ReplyRequest)
        environments, problem = self._find(form.env, form.problem, form.digest)
        functions = environments.functions[form.env]
        if not functions.has_turns:
            raise HTTPException(404, f"{form.env!r:.40} has only one turn")
        messages = [*problem.messages, *form.messages]
        reply = await self._result(functions, lambda: functions.reply(problem, messages))
        response = ReplyResponse(messages=reply).model_dump_json()
        return Response(response, media_type="application/json")

    def _find(self, env: str, problem_id: str, digest: str | None) -> tuple[Environments, Problem]:
        """The problem of a request, and the environments of its split. Raises HTTPException.

        With `digest`, the problems of the client must be those of this verifier.
        """
        splits = [split for split in self._splits if (env, split) in self._digests]
        chosen = [split for split in splits if digest in (None, self._digests[env, split])]
        if splits and not chosen:
            raise HTTPException(
                409,
                f"other problems, answers or rewards in {env!r:.40} than another verifier, or "
                "than before a restart; use the same config and data files for all verifiers",
            )
        chosen = [split for split in chosen if (split, env, problem_id) in self._problems]
        if not chosen:
            raise HTTPException(404, f"no problem {problem_id!r:.40} in {env!r:.40}")
        return self._splits[chosen[0]], self._problems[chosen[0], env, problem_id]

    async def _result(
        self,
        functions: Functions,
        start: Callable[[], Future[Result]],
        *,
        num_calls: int = 1,
    ) -> Result:
        """The result of the future of `start`, a call of `functions`. Raises HTTPException."""
        # In a thread, since functions with a bounded duration are called at once.
        async with self._starting:
            if not functions.has_room:
                raise HTTPException(503, "busy")
            future = await run_in_threadpool(start)
        waiting = asyncio.wrap_future(future)
        # The client, whose own timeout is longer than these 20 s, retries after status 503.
        await asyncio.wait([waiting], timeout=self._reward_timeout * num_calls + 20.0)
        if not waiting.done():
            future.cancel()
            raise HTTPException(503, "busy")
        if waiting.cancelled():
            raise HTTPException(503, "stopped")
        try:
            return waiting.result()
        except PeraltaError as error:
            raise HTTPException(422, str(error)) from None

    def _digest(self, env: str, split: str) -> str:
        """Identifies the problems of an environment, with their answers and functions."""
        environments = self._splits[split]
        problems = [problem for problem in environments.problems if problem.task == env]
        identity = repr((problems, environments.functions[env].identity))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _json(content: object, *, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


def _refuse(request: Request, error: HTTPException) -> Response:
    return _json({"error": error.detail}, status=error.status_code)


async def _read(request: Request, form: type[Form]) -> Form:
    """The request body in a form. Raises HTTPException."""
    content = await read_body(request, max_bytes=MAX_REQUEST_BYTES)
    try:
        return await run_in_threadpool(form.model_validate_json, content, strict=True)
    except ValueError:
        fields = ", ".join(form.model_fields)
        reason = f"the body is not a JSON object with the fields {fields}"
        raise HTTPException(400, reason) from None
