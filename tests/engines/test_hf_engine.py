"""The engine on transformers' `generate`; native/test_engine.py has tests of both engines."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import (
    GREEDY,
    assert_exact_logprobs,
    plain_greedy,
    requests,
    sampled,
    sharp_model,
    tokens,
    trainer_logprobs,
    with_sampling,
)

from peralta_zmq import models
from peralta_zmq.engines.hf_engine import HfEngine, SteppedCall
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.rollout import Message, Request, Sampling

PROMPTS = [[5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46]]
SAMPLED = Sampling(max_completion_length=12)


@pytest.fixture
def model() -> Any:
    return sharp_model()


def ending_with(model: Any, tokenizer: Any, *end: int) -> HfEngine:
    model.generation_config.eos_token_id = list(end)
    return HfEngine(model, tokenizer)


def test_greedy_matches_plain_generate_for_prompts_of_any_length(
    model: Any, tokenizer: Any
) -> None:
    expected = [plain_greedy(sharp_model(), prompt, 12) for prompt in PROMPTS]
    completions = sampled(HfEngine(model, tokenizer), GREEDY, requests(PROMPTS))
    assert tokens(completions) == expected


def test_top_k_samples_only_the_most_probable_tokens(model: Any, tokenizer: Any) -> None:
    most_probable = model(input_ids=torch.tensor([[5, 9]])).logits[0, -1].topk(5).indices
    one = Sampling(top_k=5, max_completion_length=1)
    for completion in sampled(HfEngine(model, tokenizer), one, requests([[5, 9]] * 64)):
        assert completion.token_ids[0] in most_probable.tolist()


def test_finish_reason_at_the_token_limit(model: Any, tokenizer: Any) -> None:
    one = Sampling(temperature=0.0, max_completion_length=1)
    (cut,) = sampled(ending_with(model, tokenizer, 63), one, requests(PROMPTS[:1]))
    end = int(cut.token_ids[0])
    (ended,) = sampled(ending_with(model, tokenizer, end), one, requests(PROMPTS[:1]))
    assert (len(cut.token_ids), cut.finish_reason) == (1, "length")
    assert (len(ended.token_ids), ended.finish_reason) == (1, "stop")


def test_apply_takes_effect_in_the_next_batch(model: Any, tokenizer: Any) -> None:
    engine, other = HfEngine(model, tokenizer, step=3), sharp_model(seed=8)
    before = sampled(engine, GREEDY)
    engine.apply(WeightUpdate(9, models.weights_of(other)))
    after = sampled(engine, GREEDY)
    assert tokens(after) != tokens(before)
    assert set(before[0].policy_steps.tolist()) == {3}
    for completion in after:
        assert set(completion.policy_steps.tolist()) == {9}
    assert_exact_logprobs(after, trainer_logprobs(other, after))


def test_generation_config_of_the_model_is_ignored(model: Any, tokenizer: Any) -> None:
    plain = sampled(ending_with(model, tokenizer, 63), SAMPLED)
    model.generation_config.update(top_k=1, temperature=0.1, repetition_penalty=5.0)
    assert tokens(sampled(ending_with(model, tokenizer, 63), SAMPLED)) == tokens(plain)


def test_text_has_no_special_tokens(tokenizer: Any) -> None:
    base = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)
    prompt = models.chat_prompt(tokenizer, [Message("user", "What is 1 plus 2?")])
    sampling = Sampling(temperature=0.0, max_completion_length=32)
    (completion,) = sampled(HfEngine(base, tokenizer), sampling, requests([prompt]))
    assert completion.finish_reason == "stop" and completion.token_ids[-1] == tokenizer.eos_token_id
    assert completion.text == tokenizer.decode(completion.token_ids[:-1])
    assert "<|" not in completion.text


def test_apply_between_two_tokens_changes_the_second(model: Any, tokenizer: Any) -> None:
    engine, prompt = HfEngine(model, tokenizer, step=3), np.array([5, 6], np.int32)
    three = Sampling(max_completion_length=3)
    engine.submit([Request(index, prompt, three) for index in range(3)])
    assert engine.advance() == [] and engine.num_free() == 29
    engine.apply(WeightUpdate(9, models.weights_of(sharp_model(seed=8))))
    assert engine.drop([1]) == [] and engine.num_free() == 30
    while not (completions := engine.advance()):
        assert engine.num_free() == 30
    assert [each.index for each in completions] == [0, 2]
    assert [each.policy_steps.tolist() for each in completions] == [[3, 9, 9]] * 2
    assert engine.num_free() == 32


def test_batch_of_which_nothing_is_wanted_ends_at_once(model: Any, tokenizer: Any) -> None:
    engine = HfEngine(model, tokenizer)
    for _ in range(2):
        engine.submit(with_sampling(GREEDY, requests(PROMPTS)))
        assert engine.advance() == []
        num_threads = threading.active_count()
        assert engine.drop(range(len(PROMPTS))) == [] and engine.advance() == []
        assert threading.active_count() == num_threads - 1


def test_padding_token_without_embedding_is_not_used(model: Any, tokenizer: Any) -> None:
    padded = copy.deepcopy(tokenizer)
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert padded.pad_token_id >= model.config.vocab_size
    expected = sampled(HfEngine(model, tokenizer), GREEDY, requests(PROMPTS))
    assert tokens(sampled(HfEngine(model, padded), GREEDY, requests(PROMPTS))) == tokens(expected)


def test_standalone_request_with_index_0_is_sampled_alone(model: Any, tokenizer: Any) -> None:
    engine, prompt = HfEngine(model, tokenizer), np.array([5, 6], np.int32)
    engine.submit([Request(0, prompt, is_standalone=True), Request(1, prompt)])
    ended: list[list[int]] = []
    while sum(map(len, ended)) < 2:
        ended += [[each.index for each in completions]] if (completions := engine.advance()) else []
    assert ended == [[0], [1]]


def test_cancelled_call_frees_what_it_had() -> None:
    """At once, not when the garbage collector comes: it may be most of a GPU's memory."""
    held = list[weakref.ref[Any]]()

    def call(pause: Callable[[], None]) -> list[Any]:
        values = np.zeros(1)
        held.append(weakref.ref(values))
        pause()
        return []

    stepped = SteppedCall(call)
    gc.disable()
    try:
        assert stepped.advance() is None
        stepped.cancel()
        assert held[0]() is None
    finally:
        gc.enable()
