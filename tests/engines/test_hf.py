"""The engine on transformers' `generate`; native/test_engine.py has tests of both engines."""

from __future__ import annotations

import copy
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
)

from peralta_zmq import models
from peralta_zmq.engines.hf import HfEngine, _batch_key
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


def test_apply_takes_effect_at_the_next_generate(model: Any, tokenizer: Any) -> None:
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


def test_apply_between_two_completions_keeps_their_step(model: Any, tokenizer: Any) -> None:
    engine, prompt = HfEngine(model, tokenizer, step=3), np.array([5, 6], np.int32)
    batch = [Request(0, prompt), Request(1, prompt)]
    completions = engine.generate(batch, Sampling(max_completion_length=2))
    next(completions)
    engine.apply(WeightUpdate(9, models.weights_of(sharp_model(seed=8))))
    assert set(next(completions).policy_steps.tolist()) == {3}


def test_padding_token_without_embedding_is_not_used(model: Any, tokenizer: Any) -> None:
    padded = copy.deepcopy(tokenizer)
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert padded.pad_token_id >= model.config.vocab_size
    expected = sampled(HfEngine(model, tokenizer), GREEDY, requests(PROMPTS))
    assert tokens(sampled(HfEngine(model, padded), GREEDY, requests(PROMPTS))) == tokens(expected)


def test_standalone_request_with_index_0_is_sampled_alone() -> None:
    requests = [
        Request(0, np.array([5, 6], np.int32), is_standalone=each) for each in (True, False)
    ]
    assert _batch_key(requests[0]) != _batch_key(requests[1])
