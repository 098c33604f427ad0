"""What every engine keeps, against transformers and the trainer's own scoring.

An engine without its library is skipped; `make test-mlx` and `make test-vllm` run the tests with
these libraries.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_data import (
    END,
    FAMILIES,
    GREEDY,
    NOT_ELSEWHERE,
    OPTIONS,
    PROMPTS,
    Opener,
    assert_exact_logprobs,
    completed,
    plain_greedy,
    requests,
    sampled,
    sharp_model,
    switched_greedy,
    tokens,
    trainer_logprobs,
    with_sampling,
)
from safetensors.torch import save_file
from sample_data import TINY, resident_bytes

from peralta_zmq import models
from peralta_zmq.errors import ConfigError, EngineError, StoreError
from peralta_zmq.models import lora
from peralta_zmq.models.frozen_base import load_base_weights
from peralta_zmq.registry import Engine, WeightUpdate
from peralta_zmq.rollout import Completion, Request, Sampling

# Settings that the model of an engine needs, because it reads no others.
SETTINGS = {
    "mlx": {"gemma": {"tie_word_embeddings": True}, "qwen2": {"head_dim": 8}},
    "vllm": {"qwen2": {"hidden_size": 64}, "gemma2": {"tie_word_embeddings": True}},
}
REFUSED = {"vllm": set(OPTIONS) - {"plain", "temperature"}}  # engine -> options without logprobs


def is_refused(opener: Opener, options: str, sampling: Sampling) -> bool:
    """Whether the engine refuses the options of `sampling`; asserts that it names the others."""
    if options not in REFUSED.get(opener.name, ()):
        return False
    with pytest.raises(ConfigError, match=r"no exact logprobs .*engine\.name to native, hf or mlx"):
        sampled(opener(sharp_model()), sampling)
    return True


def update(step: int, model: Any) -> WeightUpdate:
    return WeightUpdate(step, models.weights_of(model))


# Tokens and logprobs.


def settings_of(family: str, opener: Opener) -> dict[str, Any]:
    """Settings of a small model of a family."""
    if family == "tied":
        return {"tie_word_embeddings": True}
    return {**FAMILIES[family], **SETTINGS.get(opener.name, {}).get(family, {})}


@pytest.mark.parametrize("family", [*FAMILIES, "tied"])
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(
    family: str, opener: Opener
) -> None:
    if (opener.name, family) == ("mlx", "gemma2"):
        pytest.skip("mlx-lm's gemma2 cannot batch; mlx/test_mlx.py tests the refusal")
    if opener.name in ("mlx", "vllm") and family in NOT_ELSEWHERE:
        pytest.skip("models/test_other_libraries.py tests its published layout")
    settings = settings_of(family, opener)
    completions = sampled(opener(sharp_model(**settings)), GREEDY)
    model = sharp_model(**settings)
    if (opener.name, family) == ("mlx", "gemma"):  # transformers approximates GELU, mlx-lm does not
        for layer in model.model.layers:
            layer.mlp.act_fn = torch.nn.GELU()
    assert tokens(completions) == [plain_greedy(model, prompt, 12) for prompt in PROMPTS]
    assert_exact_logprobs(completions, trainer_logprobs(model, completions))


def test_completions_without_a_limit_end_with_the_context_of_the_model(opener: Opener) -> None:
    model = sharp_model(max_position_embeddings=20)
    sampling = replace(GREEDY, max_completion_length=64, fills_context=True)
    completions = sampled(opener(model), sampling)
    lengths = [len(each.prompt_ids) + len(each.token_ids) for each in completions]
    assert max(lengths) == 20


@pytest.mark.parametrize("options", list(OPTIONS))
def test_sampled_logprobs_equal_the_trainers_at_equal_weights(options: str, opener: Opener) -> None:
    sampling = Sampling(max_completion_length=12, **OPTIONS[options])
    if is_refused(opener, options, sampling):
        return
    completions = sampled(opener(sharp_model()), sampling, requests(siblings=2))
    expected = trainer_logprobs(sharp_model(), completions, sampling.temperature)
    assert_exact_logprobs(completions, expected)


def test_samples_are_determined_by_the_seed_and_siblings_differ(opener: Opener) -> None:
    engine, batch = opener(sharp_model()), requests(siblings=2)
    first, again, other = (
        tokens(sampled(engine, Sampling(seed=seed, max_completion_length=9), batch))
        for seed in (4, 4, 5)
    )
    assert first == again != other
    assert first[0] != first[1]


# Requests and the ends of completions.


def test_each_request_gets_one_completion_of_its_prompt(opener: Opener) -> None:
    engine, batch = opener(sharp_model()), requests(siblings=3)
    completions = sampled(engine, Sampling(max_completion_length=9), batch)
    assert [each.index for each in completions] == list(range(30))
    for request, each in zip(batch, completions, strict=True):
        assert each.prompt_ids.tolist() == request.prompt_ids.tolist()
        arrays = each.token_ids, each.logprobs, each.policy_steps
        assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32]
        assert len({len(array) for array in arrays}) == 1 and len(each.token_ids) <= 9
        ended = each.token_ids[-1] == END
        assert each.finish_reason == ("stop" if ended else "length")
        assert ended or len(each.token_ids) == 9
        assert END not in each.token_ids[:-1].tolist()


def test_request_has_its_own_sampling_parameters(opener: Opener, tokenizer: Any) -> None:
    engine, training = opener(sharp_model(), slots=6), Sampling(max_completion_length=9, seed=4)
    alone = tokens(sampled(engine, training))
    free = plain_greedy(sharp_model(), PROMPTS[0], 30)
    stop = tokenizer.decode(free[3:4]).strip() or " "
    own = {
        -1: Sampling(temperature=0.0, max_completion_length=30),
        -2: Sampling(temperature=0.0, max_completion_length=30, stop=(stop,)),
        -3: Sampling(temperature=2.0, top_p=0.9, max_completion_length=20, seed=11),
        -4: Sampling(repetition_penalty=1.5, max_completion_length=12, min_tokens=12, seed=11),
    }
    if opener.name in REFUSED:
        own[-3] = replace(own[-3], top_p=1.0)
        own[-4] = Sampling(max_completion_length=12, seed=11)
    prompt = np.array(PROMPTS[0], np.int32)

    def source(first: int) -> Iterator[Request]:
        for index, sampling in own.items():
            yield Request(first + index, prompt, sampling, is_standalone=True)
        yield from with_sampling(training, requests())

    mixed, again = (
        {each.index: each for each in completed(engine, source(first))} for first in (0, -9)
    )
    assert mixed[-1].token_ids.tolist() == free
    assert mixed[-2].text == mixed[-1].text[: mixed[-1].text.find(stop)]
    assert 9 < len(mixed[-3].token_ids) <= 20 and len(mixed[-4].token_ids) == 12
    for index, sampling in own.items():
        expected = trainer_logprobs(sharp_model(), [mixed[index]], sampling.temperature or 1.0)
        assert_exact_logprobs([mixed[index]], expected)
        assert mixed[index].token_ids.tolist() == again[index - 9].token_ids.tolist()
    assert [mixed[index].token_ids.tolist() for index in range(len(alone))] == alone


def test_sampled_tokens_are_appended_to_the_list_of_the_request(opener: Opener) -> None:
    sampling = replace(GREEDY, max_completion_length=9)  # without an end token
    prompt = np.array(PROMPTS[0], np.int32)
    batch = [Request(index, prompt, sampling, sampled=[]) for index in range(4)]
    engine, ended = opener(sharp_model(), step=5), list[Completion]()
    engine.submit(batch)
    while not batch[3].sampled or len(batch[3].sampled) < 3:
        engine.advance()
    partial = engine.drop([2, 3])
    while len(ended) < 2:
        ended += engine.advance()
    completions = sorted([*ended, *partial], key=lambda each: each.index)
    lengths = [len(each.token_ids) for each in completions]
    assert lengths[:2] == [9, 9] and 3 <= lengths[2] == lengths[3] < 9
    for request, each in zip(batch, completions, strict=True):
        arrays = each.token_ids, each.logprobs, each.policy_steps
        assert request.sampled == list(zip(*(array.tolist() for array in arrays), strict=True))


def test_requests_take_slots_until_their_completions_end_or_are_dropped(opener: Opener) -> None:
    engine, batch = opener(sharp_model()), with_sampling(GREEDY, requests()[:4])
    assert engine.num_free() == 4
    engine.submit(batch[:3])
    assert engine.num_free() == 1
    assert engine.drop([0, 77]) == []  # without a token, and never submitted
    assert engine.num_free() == 2
    while engine.num_free() < 4:
        assert {each.index for each in engine.advance()} <= {1, 2}
    assert engine.advance() == []


def test_min_tokens_delays_the_end_tokens(opener: Opener) -> None:
    later = Sampling(temperature=0.0, max_completion_length=12, min_tokens=6)
    if is_refused(opener, "min_tokens", later):
        return
    model = sharp_model()
    frequent = plain_greedy(model, PROMPTS[0], 2)[1]
    without_embedding = model.config.vocab_size + 3
    model.generation_config.eos_token_id = [END, frequent, without_embedding]
    engine = opener(model)
    (early,) = sampled(engine, GREEDY, requests(PROMPTS[:1]))
    (late,) = sampled(engine, later, requests(PROMPTS[:1]))
    assert len(early.token_ids) <= 2 and len(late.token_ids) > 6
    assert not {END, frequent} & set(late.token_ids[:6].tolist())


def test_text_is_exact_up_to_the_end_token(opener: Opener) -> None:
    model = sharp_model()
    free = plain_greedy(model, PROMPTS[0], 12)
    special = free[3]
    end = next(token for token in free if free.index(token) > 4)
    model.generation_config.eos_token_id = end
    folder = opener.folder(model)
    settings = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    stop = next(text for text, token in settings["model"]["vocab"].items() if token == special)
    settings["added_tokens"].append({**settings["added_tokens"][0], "id": special, "content": stop})
    (folder / "tokenizer.json").write_text(json.dumps(settings), "utf-8")
    tokenizer = models.load_tokenizer(folder)
    engine = opener.open(folder)

    def sampled_with(**options: Any) -> Completion:
        return sampled(engine, replace(GREEDY, **options), requests(PROMPTS[:1]))[0]

    written = free[: free.index(end)]
    exact, clean = sampled_with(), sampled_with(skip_special_tokens=True)
    assert exact.token_ids.tolist() == clean.token_ids.tolist() == [*written, end]
    assert stop in exact.text and exact.text == tokenizer.decode(written)
    assert clean.text == tokenizer.decode(written, skip_special_tokens=True) != exact.text
    for stopped in (
        sampled_with(stop=(stop,)),
        sampled_with(stop=(stop,), skip_special_tokens=True),
    ):
        assert stopped.token_ids.tolist() == free[: free.index(special) + 1]
        assert stopped.text == tokenizer.decode(free[: free.index(special)])
        assert stopped.finish_reason == "stop"


# Dropped completions.


def cut(engine: Engine, sampling: Sampling = GREEDY, num_steps: int = 5) -> list[Completion]:
    """What `drop` returns of four requests after some decode steps."""
    batch = with_sampling(sampling, requests()[:4])
    engine.submit(batch)
    for _ in range(num_steps):
        engine.advance()
    partial = engine.drop([request.index for request in batch])
    assert engine.num_free() == 4
    return sorted(partial, key=lambda each: each.index)


def resumed(
    engine: Engine, partial: Iterable[Completion], sampling: Sampling = GREEDY
) -> list[Completion]:
    partial_of = {each.index: each for each in partial}
    batch = [replace(each, resumes=partial_of.get(each.index)) for each in requests()]
    return sampled(engine, sampling, batch)


def test_drop_returns_completions_in_flight_with_their_tokens(opener: Opener) -> None:
    engine = opener(sharp_model(), step=3)
    whole = sampled(engine, GREEDY)  # none of them has an end token
    partial = cut(engine)
    assert [each.index for each in partial] == [0, 1, 2, 3]
    for each, complete in zip(partial, whole, strict=False):
        length = len(each.token_ids)
        assert 4 < length < 8 and each.token_ids.tolist() == complete.token_ids[:length].tolist()
        assert each.policy_steps.tolist() == [3] * length
    assert_exact_logprobs(partial, trainer_logprobs(sharp_model(), partial))


@pytest.mark.parametrize("options", ["plain", "repetition_penalty", "min_tokens", "stop"])
def test_resumed_completion_equals_the_uninterrupted_one(
    options: str, opener: Opener, tokenizer: Any
) -> None:
    """Also if a limit or a penalty depends on tokens before the interruption."""
    free = plain_greedy(sharp_model(), PROMPTS[0], 12)
    settings = {**OPTIONS, "stop": {"stop": (tokenizer.decode(free[1:9]),)}}[options]
    sampling = replace(GREEDY, **settings)
    if is_refused(opener, options, sampling):
        return
    model = sharp_model()
    if options == "min_tokens":
        model.generation_config.eos_token_id = [END, *range(40, 64)]
    engine = opener(model)
    whole = sampled(engine, sampling)
    partial = cut(engine, sampling, num_steps=2)
    assert partial[0].index == 0
    again = resumed(engine, partial, sampling)
    assert tokens(again) == tokens(whole)
    assert [each.text for each in again] == [each.text for each in whole]
    assert [each.finish_reason for each in again] == [each.finish_reason for each in whole]
    assert_exact_logprobs(again, trainer_logprobs(sharp_model(), again))


def test_resumed_completion_has_exact_logprobs_of_both_versions(opener: Opener) -> None:
    """Its keys and values are computed again with the newer weights."""
    engine, sampling = opener(sharp_model(), step=6), Sampling(max_completion_length=12, seed=4)
    partial = cut(engine, sampling)
    engine.apply(update(7, sharp_model(seed=8)))
    again = resumed(engine, partial, sampling)
    for before, each in zip(partial[:4], again, strict=False):
        length = len(before.token_ids)
        assert each.token_ids[:length].tolist() == before.token_ids.tolist()
        assert each.policy_steps.tolist() == [6] * length + [7] * (len(each.token_ids) - length)
    assert {7} == {*again[-1].policy_steps.tolist()}
    is_old = np.concatenate([each.policy_steps for each in again]) == 6
    of_versions = (trainer_logprobs(sharp_model(seed=seed), again) for seed in (0, 8))
    assert_exact_logprobs(again, np.where(is_old, *of_versions))


def test_resumed_samples_use_the_random_numbers_of_their_positions(opener: Opener) -> None:
    if opener.name == "vllm":
        pytest.skip("its random numbers begin again")
    engine, sampling = opener(sharp_model()), Sampling(max_completion_length=12, seed=4)
    again = resumed(engine, cut(engine, sampling), sampling)
    assert tokens(again) == tokens(sampled(engine, sampling))


def test_vocabulary_may_be_larger_than_the_tokenizer(opener: Opener, tokenizer: Any) -> None:
    model = sharp_model(vocab_size=4 * len(tokenizer))
    penalty = 1.0 if opener.name in REFUSED else 1.1
    sampling = Sampling(temperature=2.0, max_completion_length=12, repetition_penalty=penalty)
    completions = sampled(opener(model), sampling)
    assert max(each.token_ids.max() for each in completions) >= len(tokenizer)
    assert_exact_logprobs(completions, trainer_logprobs(model, completions, 2.0))


# New weights.


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma3", "tied"])
def test_swap_in_flight_applies_from_the_next_token_on(family: str, opener: Opener) -> None:
    settings, calls = settings_of(family, opener), list[int]()
    engine = opener(sharp_model(**settings), slots=2, step=6)

    def swap() -> None:
        calls.append(1)
        if len(calls) == 4:
            engine.apply(update(7, sharp_model(seed=8, **settings)))

    completions, scores = sampled(engine, GREEDY, between_steps=swap), list[np.ndarray]()
    for each in completions:
        seeds = [8 if step == 7 else 0 for step in each.policy_steps.tolist()]
        expected, logprobs = switched_greedy(each, seeds, **settings)
        assert each.token_ids.tolist() == expected
        assert seeds == sorted(seeds)
        scores.append(logprobs)
    assert_exact_logprobs(completions, np.concatenate(scores, 1))
    assert set(completions[-1].policy_steps.tolist()) == {7}
    before = 5 if opener.name in ("hf", "mlx") else 4  # two tokens come in their first step
    for each in completions[:2]:
        steps = [6] * before + [7] * (len(each.token_ids) - before)
        assert each.policy_steps.tolist() == steps


def adapter_of(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A random adapter of two layers, as a trainer publishes it."""
    random, adapter = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        out, width = models.weights_of(model)[f"{layer}.weight"].shape
        adapter[lora.PREFIX + layer + lora.A] = torch.randn(3, width, generator=random)
        adapter[lora.PREFIX + layer + lora.B] = torch.randn(out, 3, generator=random)
    return adapter


@pytest.mark.parametrize("base_dtype", ["float32", "nf4"])
def test_adapter_is_added_to_the_weights_of_the_base(base_dtype: str, opener: Opener) -> None:
    folder = opener.folder(model := sharp_model())
    engine, before = opener.open(folder), list[list[int]]()
    base = load_base_weights(folder, base_dtype, device=torch.device("cpu"))
    options: dict[str, Any] = {"base_dtype": base_dtype, "base_digest": base.digest}
    for seed in (1, 2, 1):  # the second leaves no trace in the third
        adapter = adapter_of(model, seed)
        engine.apply(WeightUpdate(seed, adapter, is_adapter=True, **options))
        merged = sharp_model()
        models.apply_weights(merged, lora.merged_weights(base.tensors, adapter))
        completions = sampled(engine, GREEDY)
        assert tokens(completions) == [plain_greedy(merged, each, 12) for each in PROMPTS] != before
        before = tokens(completions)
        for each in completions:
            assert set(each.policy_steps.tolist()) == {seed}
        assert_exact_logprobs(completions, trainer_logprobs(merged, completions))


def foreign_update(damage: str) -> WeightUpdate:
    """An update of another model; its wrong tensor is the last, after copies of the others."""
    if damage.startswith("adapter"):
        adapter = adapter_of(sharp_model(), 1)
        last = list(adapter)[-1]
        if damage == "adapter without tensor":
            del adapter[last]
        else:
            adapter[last] = torch.ones(3, 4)
        return WeightUpdate(9, adapter, is_adapter=True)
    weights = dict(models.weights_of(sharp_model(seed=8)))
    last = "model.norm.weight"
    if damage == "other name":
        weights["model.other.weight"] = weights.pop(last)
    elif damage == "other shape":
        weights[last] = torch.ones(3)
    else:
        weights[last] = torch.ones(TINY["hidden_size"], dtype=torch.int32)
    return WeightUpdate(9, weights)


@pytest.mark.parametrize(
    "damage",
    ["adapter without tensor", "adapter shape", "other name", "other shape", "integers"],
)
def test_weights_of_another_model_are_rejected_unchanged(damage: str, opener: Opener) -> None:
    engine = opener(sharp_model(), step=3)
    before = tokens(sampled(engine, GREEDY))
    with pytest.raises(ValueError, match=r"down_proj|model\.(norm|other)"):
        engine.apply(foreign_update(damage))
    assert (tokens(sampled(engine, GREEDY)), engine.step) == (before, 3)


def test_non_finite_logits_raise_and_good_weights_follow(opener: Opener) -> None:
    engine, good = opener(sharp_model(), step=3), models.weights_of(sharp_model())
    before, name = tokens(sampled(engine, GREEDY)), "model.layers.0.self_attn.v_proj.weight"
    engine.apply(WeightUpdate(9, {**good, name: torch.full_like(good[name], 3e38)}))
    with pytest.raises(EngineError, match="weights of step 9 give logits that are not finite"):
        sampled(engine, GREEDY)
    engine.apply(WeightUpdate(3, good))
    assert tokens(sampled(engine, GREEDY)) == before


# Folders.


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "truncated", "tensor"])
def test_folder_that_cannot_be_loaded_raises_store_error(damage: str, opener: Opener) -> None:
    folder = opener.folder(sharp_model())
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "tensor":
        tensors = models.weights_of(sharp_model())
        del tensors["model.norm.weight"]
        save_file(tensors, weights, {"format": "pt"})
    else:
        (folder / damage).unlink()
    with pytest.raises(StoreError, match=str(folder)) as caught:
        opener.open(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_is_constant_over_10_000_completions(opener: Opener) -> None:
    engine = opener(sharp_model(), slots=32)
    sampling = Sampling(max_completion_length=6)

    def source() -> Iterator[Request]:
        # A few more than are measured: at the end, fewer rows run, for which oneDNN caches memory.
        for index in range(10_040):
            yield Request(index, np.array(PROMPTS[index // 8 % len(PROMPTS)], np.int32), sampling)

    resident, kept = list[int](), list[int]()
    for number, _ in enumerate(completed(engine, source()), start=1):
        if number in (5_000, 10_000):
            processes = psutil.Process().children()  # vLLM
            resident.append(resident_bytes() + sum(resident_bytes(each.pid) for each in processes))
            kept.append(alive(Completion) + alive(Request))
    assert kept[1] - kept[0] < 100  # of 10,000 objects; the number in flight varies
    assert resident[1] - resident[0] < 8 << 20


def alive(kind: type) -> int:
    """Number of live objects of a class."""
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())
