"""ServingEngine: samples the requests of a generator, and chats at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_data import GREEDY, requests, sampled, sharp_model, tokens

from peralta_zmq import models
from peralta_zmq.engines.native import NativeEngine
from peralta_zmq.errors import EngineError
from peralta_zmq.generator.serving.engine import (
    MAX_WAITING,
    ChatCompletion,
    InterruptedChatError,
    QueueFullError,
    ServingEngine,
)
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.rollout import Request, Sampling

PROMPT = np.array([5, 9, 33, 8], np.int32)


@pytest.fixture
def native() -> NativeEngine:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    return NativeEngine(sharp_model(), tokenizer, slots=16, max_model_len=64, step=3)


@pytest.fixture
def engine(native: NativeEngine) -> ServingEngine:
    return ServingEngine(native, slots=16, start_seconds=0)


def chat(**options: Any) -> ChatCompletion:
    return ChatCompletion(PROMPT, Sampling(**{"temperature": 0.0, **options}))


def training(siblings: int = 8) -> list[Request]:
    return requests(siblings=siblings)


def test_training_completions_are_the_same_with_chats(engine: ServingEngine) -> None:
    sampling = Sampling(max_completion_length=12, top_k=9)
    alone = tokens(sampled(engine, sampling, training()))
    chats = [chat(temperature=0.7, max_completion_length=6 + number) for number in range(6)]
    engine.submit(chats)
    assert tokens(sampled(engine, sampling, training())) == alone
    assert all(len(each.result.result(0).token_ids) <= 6 + n for n, each in enumerate(chats))
    assert {token.step for each in chats for token in each.tokens} == {3}


def test_chat_is_what_the_engine_samples_greedily(engine: ServingEngine) -> None:
    (alone,) = sampled(engine, GREEDY, [Request(0, PROMPT)])
    served = chat(max_completion_length=12)
    engine.submit([served])
    sampled(engine, Sampling(max_completion_length=12), training())
    assert served.result.result(0).text == alone.text
    assert [token.token_id for token in served.tokens] == alone.token_ids.tolist()


def test_chats_in_flight_are_at_most_an_eighth_of_the_slots(engine: ServingEngine) -> None:
    chats, in_flight = [chat(max_completion_length=9) for _ in range(8)], list[int]()
    engine.submit(chats)

    def count() -> None:
        started = [each for each in chats if each.tokens and not each.result.done()]
        in_flight.append(len(started))

    sampled(engine, Sampling(max_completion_length=12), training(), between_steps=count)
    assert max(in_flight) == 2  # of 16 slots
    assert all(each.result.done() for each in chats)


def test_chats_start_apart(native: NativeEngine) -> None:
    spaced = ServingEngine(native, slots=16, start_seconds=3600)
    chats = [chat(max_completion_length=3) for _ in range(2)]
    spaced.submit(chats)
    sampled(spaced, Sampling(max_completion_length=12), training())
    assert [each.result.done() for each in chats] == [True, False]


def test_full_queue_refuses_all_completions_of_a_request(engine: ServingEngine) -> None:
    chats = [chat() for _ in range(MAX_WAITING)]
    engine.submit(chats)
    with pytest.raises(QueueFullError):
        engine.submit([chat()])
    engine.cancel_chats(chats[:2])
    with pytest.raises(QueueFullError):
        engine.submit([chat(), chat(), chat()])
    engine.submit([chat(), chat()])


def test_cancelled_chat_leaves_its_slot_after_the_next_token(engine: ServingEngine) -> None:
    served, num_steps = chat(max_completion_length=50, min_tokens=50), list[int]()
    engine.submit([served])

    def cancel() -> None:
        num_steps.append(1)
        if len(num_steps) == 4:
            engine.cancel_chats([served])

    sampled(engine, Sampling(max_completion_length=12), training(1), between_steps=cancel)
    assert len(served.tokens) == 6  # two of them in the first step


def test_chats_in_flight_are_resumed_after_a_cancelled_call(engine: ServingEngine) -> None:
    options: dict[str, Any] = {"temperature": 0.7, "seed": 6, "max_completion_length": 20}
    chats = [chat(**options), chat(**options)]
    engine.submit(chats[:1])
    sampled(engine, Sampling(), training(1))
    engine.submit(chats[1:])

    def cancel() -> None:
        if len(chats[1].tokens) % 4 == 0:
            engine.cancel()

    while not chats[1].result.done():
        sampled(engine, Sampling(), training(1), between_steps=cancel)
    whole, parts = (each.result.result(0) for each in chats)
    assert tokens([whole]) == tokens([parts])
    assert [each.token_id for each in chats[1].tokens] == parts.token_ids.tolist()


def test_chat_in_flight_is_interrupted_if_the_call_ends_after_close(engine: ServingEngine) -> None:
    served = chat(max_completion_length=50, min_tokens=50)
    engine.submit([served])

    def close() -> None:
        engine.close()
        engine.cancel()

    sampled(engine, Sampling(), training(1), between_steps=close)
    with pytest.raises(InterruptedChatError):
        served.result.result(0)


@pytest.mark.parametrize("reason", ["weights", "abandoned"])
def test_chat_in_flight_is_interrupted_with_the_call(reason: str, engine: ServingEngine) -> None:
    served, waiting = chat(max_completion_length=50, min_tokens=50), chat()
    engine.submit([served])
    good = models.weights_of(sharp_model())
    bad = {**good, "model.norm.weight": good["model.norm.weight"] * float("nan")}

    def interrupt() -> None:
        if reason == "weights":
            engine.apply(WeightUpdate(4, bad))
        else:
            raise KeyError

    with pytest.raises((EngineError, KeyError)):
        sampled(engine, Sampling(), training(1), between_steps=interrupt)
    with pytest.raises(InterruptedChatError, match="dropped its completions"):
        served.result.result(0)
    engine.submit([waiting])
    engine.close()
    with pytest.raises(InterruptedChatError, match="the run has ended"):
        waiting.result.result(0)
    with pytest.raises(InterruptedChatError, match="the run has ended"):
        engine.submit([chat()])


def test_engine_without_training_requests_serves_chats(engine: ServingEngine) -> None:
    served = chat(max_completion_length=12)
    engine.submit([served])

    def idle() -> Iterator[None]:
        while not served.result.done():
            yield None

    assert list(engine.generate(idle(), Sampling())) == []
    assert len(served.tokens) <= 12
