"""The engine on transformers' `generate`; test_engine.py has tests of both engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sample_data import TINY, tiny_model, token_logprobs

from peralta_zmq import models
from peralta_zmq.engines.hf import HfEngine
from peralta_zmq.rollout import Completion, Message, Request, Sampling

PROMPTS = [[5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46]]
END = 2
GREEDY = Sampling(temperature=0.0, max_completion_length=6)
SAMPLED = Sampling(max_completion_length=12)
TRUNCATED = Sampling(temperature=0.7, top_k=20, top_p=0.9, max_completion_length=12)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.load_tokenizer(models.EMBEDDED)


@pytest.fixture
def model() -> Any:
    return sharp_model()


@pytest.fixture
def engine(model: Any, tokenizer: Any) -> HfEngine:
    model.generation_config.eos_token_id = END
    return HfEngine(model, tokenizer, step=3)


def sharp_model(seed: int = 0) -> Any:
    """A random model whose context, temperature and truncation make a difference."""
    model = tiny_model(seed=seed, tie_word_embeddings=False)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.mul_(30 if name == "lm_head.weight" else 5 if tensor.ndim == 2 else 1)
    return model


def requests(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return [Request(index, np.array(ids, np.int32)) for index, ids in enumerate(prompts)]


def sampled(
    engine: HfEngine, sampling: Sampling, prompts: Sequence[Sequence[int]] = PROMPTS, seed: int = 0
) -> list[Completion]:
    return list(engine.generate(requests(prompts), replace(sampling, seed=seed)))


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def scored(model: Any, completion: Completion, temperature: float) -> list[float]:
    """The trainer's logprobs of the generated tokens."""
    ids = np.concatenate([completion.prompt_ids, completion.token_ids])
    row = torch.from_numpy(ids).long()[None]
    with torch.no_grad():
        logprobs = token_logprobs(model, row, temperature=temperature)
    return logprobs[0, len(completion.prompt_ids) :].tolist()


def test_greedy_matches_plain_generate(engine: HfEngine, model: Any) -> None:
    for completion in sampled(engine, GREEDY):
        alone = torch.from_numpy(completion.prompt_ids).long()[None]
        plain = model.generate(
            alone, attention_mask=torch.ones_like(alone), do_sample=False, max_new_tokens=6,
            eos_token_id=END, pad_token_id=0,
        )[0, alone.shape[1] :]  # fmt: skip
        assert completion.token_ids.tolist() == plain.tolist()


def test_logprobs_are_over_the_full_vocabulary_before_truncation(
    engine: HfEngine, model: Any
) -> None:
    # With a single candidate, the softmax after truncation would give log 1 = 0.
    for completion in sampled(engine, Sampling(top_k=1, max_completion_length=6)):
        expected = scored(model, completion, 1.0)
        assert completion.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
        assert completion.logprobs.min() < -0.01


def test_top_k_samples_only_the_most_probable_tokens(engine: HfEngine, model: Any) -> None:
    for completion in sampled(engine, Sampling(top_k=5, max_completion_length=1), [[5, 9]] * 64):
        most_probable = model(input_ids=torch.tensor([[5, 9]])).logits[0, -1].topk(5).indices
        assert completion.token_ids[0] in most_probable.tolist()


def test_completions_are_in_order_with_arrays_of_the_generated_tokens(engine: HfEngine) -> None:
    completions = sampled(engine, SAMPLED)
    assert [completion.index for completion in completions] == [0, 1, 2]
    assert [completion.prompt_ids.tolist() for completion in completions] == PROMPTS
    for completion in completions:
        arrays = completion.token_ids, completion.logprobs, completion.policy_steps
        assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32]
        assert len({len(array) for array in arrays}) == 1 and len(arrays[0]) <= 12


def ending_with(model: Any, tokenizer: Any, end: int | list[int]) -> HfEngine:
    model.generation_config.eos_token_id = end
    return HfEngine(model, tokenizer)


def test_end_token_stops_and_is_kept(model: Any, tokenizer: Any, engine: HfEngine) -> None:
    (free,) = sampled(engine, GREEDY, PROMPTS[:1])
    third = int(free.token_ids[2])
    first = free.token_ids.tolist().index(third)
    (ended,) = sampled(ending_with(model, tokenizer, [63, third]), GREEDY, PROMPTS[:1])
    assert ended.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert ended.finish_reason == "stop"


def test_finish_reason_at_the_token_limit(model: Any, tokenizer: Any) -> None:
    one = Sampling(temperature=0.0, max_completion_length=1)
    (cut,) = sampled(ending_with(model, tokenizer, 63), one, PROMPTS[:1])
    (ended,) = sampled(ending_with(model, tokenizer, int(cut.token_ids[0])), one, PROMPTS[:1])
    assert (len(cut.token_ids), cut.finish_reason) == (1, "length")
    assert (len(ended.token_ids), ended.finish_reason) == (1, "stop")


def test_end_of_one_sibling_does_not_end_the_others(model: Any, tokenizer: Any) -> None:
    engine = ending_with(model, tokenizer, 63)
    free = sampled(engine, GREEDY)
    early = int(free[0].token_ids[0])
    ended = sampled(ending_with(model, tokenizer, early), GREEDY)
    assert len(ended[0].token_ids) == 1
    for before, after in zip(free, ended, strict=True):
        ids = before.token_ids.tolist()
        length = ids.index(early) + 1 if early in ids else len(ids)
        assert after.token_ids.tolist() == ids[:length]


@pytest.mark.parametrize("index", range(3))
def test_completion_does_not_depend_on_longer_prompts(engine: HfEngine, index: int) -> None:
    together = sampled(engine, GREEDY)[index]
    (alone,) = sampled(engine, GREEDY, [PROMPTS[index]])
    assert together.token_ids.tolist() == alone.token_ids.tolist()
    assert together.logprobs.tolist() == pytest.approx(alone.logprobs.tolist(), abs=1e-4)


def test_samples_are_determined_by_the_seed_and_siblings_differ(engine: HfEngine) -> None:
    first, again, other = (
        tokens(sampled(engine, TRUNCATED, [PROMPTS[0]] * 2, seed=seed)) for seed in (4, 4, 5)
    )
    assert first == again != other
    assert first[0] != first[1]


def test_apply_takes_effect_at_the_next_generate(engine: HfEngine) -> None:
    before = sampled(engine, GREEDY)
    other = sharp_model(seed=8)
    engine.apply(models.weights_of(other), step=9)
    after = sampled(engine, GREEDY)
    assert tokens(after) != tokens(before)
    assert set(before[0].policy_steps.tolist()) == {3}
    for completion in after:
        assert set(completion.policy_steps.tolist()) == {9}
        expected = scored(other, completion, 1.0)
        assert completion.logprobs.tolist() == pytest.approx(expected, abs=1e-4)


def test_rejected_weights_change_neither_samples_nor_step(engine: HfEngine) -> None:
    before = tokens(sampled(engine, GREEDY))
    weights = dict(models.weights_of(sharp_model(seed=8)))
    weights["model.norm.weight"] = torch.ones(TINY["hidden_size"] + 1)
    with pytest.raises(ValueError, match=r"model\.norm"):
        engine.apply(weights, step=9)
    assert (tokens(sampled(engine, GREEDY)), engine.step) == (before, 3)


def test_generation_config_of_the_model_is_ignored(model: Any, tokenizer: Any) -> None:
    plain = sampled(HfEngine(model, tokenizer), SAMPLED)
    model.generation_config.update(top_k=1, temperature=0.1, repetition_penalty=5.0)
    assert tokens(sampled(HfEngine(model, tokenizer), SAMPLED)) == tokens(plain)


def test_text_has_no_special_tokens(tokenizer: Any) -> None:
    base = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)
    prompt = models.chat_prompt(tokenizer, [Message("user", "What is 1 plus 2?")])
    sampling = Sampling(temperature=0.0, max_completion_length=32)
    (completion,) = sampled(HfEngine(base, tokenizer), sampling, [prompt])
    assert completion.finish_reason == "stop" and completion.token_ids[-1] == tokenizer.eos_token_id
    assert (
        completion.text == tokenizer.decode(completion.token_ids[:-1])
        and "<|" not in completion.text
    )


def test_apply_between_two_completions_keeps_their_step() -> None:
    model, tokenizer = tiny_model(), models.load_tokenizer(models.EMBEDDED)
    engine = HfEngine(model, tokenizer, step=3)
    prompt = np.array([5, 6], np.int32)
    sampled = engine.generate(
        [Request(0, prompt), Request(1, prompt)], Sampling(max_completion_length=2)
    )
    next(sampled)
    engine.step = 9
    assert set(next(sampled).policy_steps.tolist()) == {3}
