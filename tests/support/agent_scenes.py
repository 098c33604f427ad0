"""An engine, a chat server and agents in worker processes, without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from peralta_zmq import models
from peralta_zmq.engines import RequestGroup, Sampler
from peralta_zmq.engines.native.native_engine import open as open_engine
from peralta_zmq.environments.agents import LocalAgents
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.reward_pool import RewardPool
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import (
    Completion,
    Message,
    Problem,
    Request,
    Rollout,
    Sampling,
    Score,
    rollout_of,
)
from peralta_zmq.serving.chats import ChatQueue
from peralta_zmq.serving.server import ChatServer

SAMPLING = Sampling(max_completion_length=20)
PROBLEM = Problem("p", "mine", (Message("user", "add 2 to the product of 3 and 4."),), "14")


class ScriptedEngine:
    """Gives the n-th text as the n-th reply of a conversation."""

    step = 7
    max_model_len = 1024

    def __init__(self, tokenizer: models.Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._in_flight: list[Request] = []

    def num_free(self) -> int:
        return 8 - len(self._in_flight)

    def submit(self, requests: Sequence[Request]) -> None:
        self._in_flight += requests

    def advance(self) -> list[Completion]:
        ended, self._in_flight = self._in_flight, []
        return [self._completion(each) for each in ended]

    def apply(self, update: WeightUpdate) -> None:
        raise NotImplementedError

    def drop(self, ids: Collection[int]) -> list[Completion]:
        raise NotImplementedError

    def _completion(self, request: Request) -> Completion:
        turn = models.text_of(self._tokenizer, request.prompt_ids).count("<|im_start|>assistant")
        text = self._texts[turn - 1]
        ids = np.array(self._tokenizer.encode(f"{text}<|im_end|>"), np.int32)
        logprobs = np.full(len(ids), -1.0, np.float32)
        steps = np.full(len(ids), self.step, np.int32)
        return Completion(
            request.index, request.prompt_ids, ids, logprobs, steps, "stop", text,
            has_end_token=True,
        )  # fmt: skip


class Scene:
    """An engine, a server, and agents in worker processes."""

    def __init__(self, stack: ExitStack, texts: Sequence[str] = ()) -> None:
        """`texts`: the replies of a scripted engine, instead of the embedded model's."""
        self.tokenizer = models.load_tokenizer(models.EMBEDDED_TURNS if texts else models.EMBEDDED)
        settings = EngineSettings(dtype="float32", slots=8, max_model_len=256, keeps_turns=True)
        self.engine = (
            ScriptedEngine(self.tokenizer, texts)
            if texts
            else open_engine(models.EMBEDDED, settings, step=7)
        )
        self.chats = ChatQueue(slots=8, max_model_len=self.engine.max_model_len)
        self.sessions = self.chats.sessions
        self.server = ChatServer(
            self.chats, self.tokenizer, host="127.0.0.1", port=0, token=None, model="demo",
            template_kwargs={}, session_seconds=30.0,
        )  # fmt: skip
        stack.enter_context(closing(self.server))
        self.sampler = Sampler(self.engine, self.tokenizer, sessions=self.sessions)
        self._stack = stack

    def environments(
        self, agent: str, problem: Problem = PROBLEM, *, max_turns: int = 8, **options: Any
    ) -> Environments:
        settings: dict[str, Any] = {"timeout_seconds": 30.0, "num_awaiting": 2, **options}
        pool = RewardPool(num_workers=0, queue_limit=64, **settings)
        agents = {problem.task: LocalAgents(agent, pool, model="demo", max_turns=max_turns)}
        environments = Environments({problem.task: 1}, (problem,), {}, pool, agents)
        return self._stack.enter_context(closing(environments))

    def sample(
        self,
        agent: str,
        count: int = 2,
        *,
        between_steps: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> list[Rollout]:
        """The rollouts of a group of agents. Raises what their scores raise."""
        name = agent if " " in agent else f"agent_functions:{agent}"
        return self.scored(name, count, between_steps=between_steps, **options)[0]

    def scored(
        self,
        agent: str,
        count: int = 2,
        *,
        problem: Problem = PROBLEM,
        between_steps: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> tuple[list[Rollout], list[Score]]:
        """The rollouts of a group and their scores."""
        environments = self.environments(agent, problem, **options)
        group = self.sampler.start(problem, count, SAMPLING, replies=environments)
        self.complete(group, between_steps)
        scores = environments.score(problem, group.completions).result()
        rollouts = [
            rollout_of(*each)
            for each in zip(group.completions, *zip(*scores, strict=True), strict=True)
        ]
        return rollouts, scores

    def complete(
        self, group: RequestGroup, between_steps: Callable[[], None] = lambda: None
    ) -> None:
        while group not in self.sampler.advance():
            between_steps()

    def text(self, rollout: Rollout) -> str:
        return models.text_of(self.tokenizer, rollout.token_ids)
