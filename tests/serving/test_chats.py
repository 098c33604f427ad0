"""ChatQueue: a generator samples chats together with its groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_data import PROMPTS, sharp_model, tokens

from peralta_zmq import models
from peralta_zmq.engines import RequestGroup, Sampler
from peralta_zmq.engines.native.native_engine import native_engine
from peralta_zmq.engines.sessions import ChatCompletion, InterruptedChatError, QueueFullError
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Completion, Problem, Sampling
from peralta_zmq.serving.chats import MAX_WAITING, ChatQueue

PROMPT = np.array([5, 9, 33, 8], np.int32)


class Scene:
    """A sampler over an engine of 16 slots, groups for training, and chats."""

    def __init__(self, *, start_seconds: float = 0) -> None:
        tokenizer = models.load_tokenizer(models.EMBEDDED)
        self.engine = native_engine(
            sharp_model(), tokenizer, EngineSettings(slots=16, max_model_len=64), step=3
        )
        self.sampler = Sampler(self.engine, tokenizer)
        self.chats = ChatQueue(slots=16, max_model_len=64, start_seconds=start_seconds)

    def advance(self) -> list[RequestGroup]:
        """An iteration of the generator's loop."""
        self.chats.submit_due(self.sampler)
        ended = self.sampler.advance()
        self.chats.complete(ended)
        return ended

    def train(
        self, sampling: Sampling, *, between_steps: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        """The completions of a group for each of PROMPTS."""
        waiting = [Problem("", "mine", (), "", tuple(ids)) for ids in PROMPTS]
        groups, ended = list[RequestGroup](), list[RequestGroup]()
        while waiting or not all(group in ended for group in groups):
            while waiting and self.sampler.has_room:
                groups.append(self.sampler.start(waiting.pop(0), 8, sampling))
            ended += self.advance()
            between_steps()
        return [completion for group in groups for completion in group.completions]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def chat(**options: Any) -> ChatCompletion:
    return ChatCompletion(PROMPT, Sampling(**{"temperature": 0.0, **options}))


def test_training_completions_are_the_same_with_chats(scene: Scene) -> None:
    sampling = Sampling(max_completion_length=12, top_k=9)
    alone = Scene().train(sampling)
    chats = [chat(temperature=0.7, max_completion_length=6 + number) for number in range(6)]
    scene.chats.submit(chats)
    assert tokens(scene.train(sampling)) == tokens(alone)
    assert all(len(each.result.result(0).token_ids) <= 6 + n for n, each in enumerate(chats))
    assert {token.step for each in chats for token in each.tokens} == {3}


def test_chats_in_flight_are_at_most_an_eighth_of_the_slots(scene: Scene) -> None:
    chats, in_flight = [chat(max_completion_length=9) for _ in range(8)], list[int]()
    scene.chats.submit(chats)

    def count() -> None:
        started = [each for each in chats if each.tokens and not each.result.done()]
        in_flight.append(len(started))

    scene.train(Sampling(max_completion_length=12), between_steps=count)
    assert max(in_flight) == 2  # of 16 slots
    assert all(each.result.done() for each in chats)


def test_chats_start_apart() -> None:
    spaced, chats = Scene(start_seconds=3600), [chat(max_completion_length=3) for _ in range(2)]
    spaced.chats.submit(chats)
    spaced.train(Sampling(max_completion_length=12))
    assert [each.result.done() for each in chats] == [True, False]


def test_full_queue_refuses_all_completions_of_a_request(scene: Scene) -> None:
    queue, chats = scene.chats, [chat() for _ in range(MAX_WAITING)]
    queue.submit(chats)
    with pytest.raises(QueueFullError):
        queue.submit([chat()])
    queue.cancel(chats[:2])
    with pytest.raises(QueueFullError):
        queue.submit([chat(), chat(), chat()])
    queue.submit([chat(), chat()])


def test_cancelled_chat_leaves_its_slot_before_the_next_token(scene: Scene) -> None:
    served = chat(max_completion_length=50, min_tokens=50)
    scene.chats.submit([served])
    for _ in range(4):
        scene.advance()
    assert (len(served.tokens), scene.engine.num_free()) == (5, 15)  # two in the first step
    scene.chats.cancel([served])
    scene.advance()
    assert (len(served.tokens), scene.engine.num_free()) == (5, 16)


def test_chats_in_flight_are_interrupted_when_the_weights_are_useless(scene: Scene) -> None:
    dropped, running, waiting = (chat(max_completion_length=50, min_tokens=50) for _ in range(3))
    scene.chats.submit([dropped])
    scene.advance()
    scene.chats.interrupt(scene.sampler)
    assert scene.engine.num_free() == 16
    with pytest.raises(InterruptedChatError, match="dropped its completions"):
        dropped.result.result(0)
    scene.chats.submit([running])
    scene.advance()
    scene.chats.submit([waiting])
    scene.chats.close()
    for ended in (running, waiting):
        with pytest.raises(InterruptedChatError, match="the run has ended"):
            ended.result.result(0)
    with pytest.raises(InterruptedChatError, match="the run has ended"):
        scene.chats.submit([chat()])
