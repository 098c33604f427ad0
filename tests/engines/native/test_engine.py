"""The native engine against transformers and against the trainer's own scoring."""

from __future__ import annotations

import copy
import gc
import logging
import shutil
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import (
    END,
    FAMILIES,
    GREEDY,
    PROMPTS,
    plain_greedy,
    requests,
    sampled,
    scored,
    sharp_model,
    tokens,
)  # fmt: skip
from sample_data import TINY, resident_bytes, tiny_model

from peralta_zmq import models
from peralta_zmq.engines.hf import HfEngine
from peralta_zmq.engines.native import NativeEngine
from peralta_zmq.engines.native.cache import KVCache
from peralta_zmq.engines.native.kernels import gemm
from peralta_zmq.engines.native.linears import PackedLinear
from peralta_zmq.errors import ConfigError, EngineError
from peralta_zmq.rollout import Completion, Request, Sampling, TemperatureSchedule

HAS_COMPILER = sys.platform == "linux" and shutil.which("cc") is not None
SLOW = pytest.mark.slow  # other pairs of the same values
OPTIONS = {
    "plain": {}, "temperature": {"temperature": 0.7}, "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.5}, "min_tokens": {"min_tokens": 6},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02,
            "repetition_penalty": 1.2, "min_tokens": 3},
}  # fmt: skip


def engine_of(model: Any, tokenizer: Any, **options: Any) -> NativeEngine:
    return NativeEngine(model, tokenizer, **{"slots": 4, "max_model_len": 64, **options})


@pytest.fixture
def engine(tokenizer: Any) -> NativeEngine:
    return engine_of(sharp_model(), tokenizer, step=3)


def assert_greedy_matches(engine: Any, model: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Compare greedy tokens and logprobs of the engine with those of transformers."""
    completions = sampled(engine, GREEDY, requests(prompts))
    assert tokens(completions) == [plain_greedy(model, prompt, 12) for prompt in prompts]
    for each in completions:
        assert each.logprobs.tolist() == pytest.approx(scored(model, each, 1.0), abs=2e-5)


def test_engine_uses_compiled_kernels_if_there_is_a_compiler(engine: NativeEngine) -> None:
    decoder = engine._decoder
    assert decoder is not None
    assert (decoder.library is not None) == HAS_COMPILER


@pytest.mark.parametrize(
    ("kv_heads", "head_dim"),  # with head_dim 8, torch's operators are used
    [(1, 8), (2, 16), pytest.param(1, 16, marks=SLOW), pytest.param(2, 8, marks=SLOW)],
)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_greedy_tokens_and_logprobs_match_transformers(
    family: str, kv_heads: int, head_dim: int, tokenizer: Any
) -> None:
    settings = {**FAMILIES[family], "num_key_value_heads": kv_heads, "head_dim": head_dim}
    engine = engine_of(sharp_model(**settings), tokenizer)
    assert_greedy_matches(engine, sharp_model(**settings), PROMPTS)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_common_prefix_changes_no_token_and_no_logprob(family: str, tokenizer: Any) -> None:
    """The prefix is longer than a sliding window; the last prompt is shorter than the prefix."""
    prefix, settings = list(range(10, 30)), FAMILIES[family]
    prompts = [[*prefix, last, 5] for last in range(40, 46)] + [prefix[:18]]
    engine = engine_of(sharp_model(**settings), tokenizer, slots=3)
    assert_greedy_matches(engine, sharp_model(**settings), prompts)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_decoder_logits_match_transformers_within_1e_5(family: str, tokenizer: Any) -> None:
    model = tiny_model(**FAMILIES[family])
    ids = torch.tensor([PROMPTS[2], PROMPTS[2][::-1]])
    expected = model(input_ids=ids).logits
    decoder = engine_of(model, tokenizer)._decoder
    assert decoder is not None
    with torch.inference_mode():
        positions = np.tile(np.arange(8), (2, 1))
        decoder.hidden_states(ids[:, :5].numpy(), positions[:, :5], first_row=1)
        for position in range(5, 8):
            newest = slice(position, position + 1)
            last = decoder.hidden_states(ids[:, newest].numpy(), positions[:, newest], first_row=1)
            error = (decoder.logits(last[:, 0]) - expected[:, position]).abs().max()
            assert error <= 1e-5


@pytest.mark.skipif(gemm.panel_kernel() is None, reason="gemm.c is not used on this machine")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_layers_in_one_call_compute_the_bits_of_a_call_per_operation(
    family: str, tokenizer: Any
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_key_value_heads": 2}
    settings = {**FAMILIES[family], **sizes}
    ids = np.random.default_rng(0).integers(3, 60, (3, 20))
    positions = np.tile(np.arange(20), (3, 1))

    def hidden_states(*, in_one_call: bool) -> Iterator[torch.Tensor]:
        """Of prompts, and of one token after another, with newer weights before the last ones."""
        engine = engine_of(tiny_model(**settings).bfloat16(), tokenizer)
        decoder = engine._decoder
        assert decoder is not None and decoder._compiled_layers is not None
        if not in_one_call:
            decoder._compiled_layers = None
        for first, last in [(0, 7), *((position, position + 1) for position in range(7, 20))]:
            if first == 15:
                newer = models.weights_of(tiny_model(seed=5, **settings).bfloat16())
                engine.apply(newer, step=1)
            new = slice(first, last)
            yield decoder.hidden_states(ids[:, new], positions[:, new], first_row=1)

    with torch.inference_mode():
        ours, expected = (list(hidden_states(in_one_call=flag)) for flag in (True, False))
    assert all(map(torch.equal, ours, expected))


def packed_classes(model: Any) -> set[type]:
    """The classes of the packed weights of a model."""
    return {type(each.fused.packed) for each in model.modules() if isinstance(each, PackedLinear)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_bf16_logprobs_are_as_exact_as_those_of_transformers(
    family: str, tied: bool, tokenizer: Any
) -> None:
    settings = {"tie_word_embeddings": tied, **FAMILIES[family]}
    model = sharp_model(**settings).bfloat16()
    engine = engine_of(model, tokenizer)
    if gemm.panel_kernel() is not None:
        assert gemm.PanelWeight in packed_classes(model)
    for seed in (0, 8):
        plain = sharp_model(seed=seed, **settings).bfloat16()
        exact = copy.deepcopy(plain).float()
        if seed:
            engine.apply(models.weights_of(plain), step=1)
        ours, reference = list[float](), list[float]()
        for each in sampled(engine, Sampling(max_completion_length=12)):
            known = np.array(scored(exact, each, 1.0))
            ours += (each.logprobs - known).tolist()
            reference += (scored(plain, each, 1.0) - known).tolist()
        assert np.square(ours).mean() <= 2 * np.square(reference).mean()


def test_engine_without_packing_matches_transformers(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    def missing(*_: Any) -> None:
        raise AttributeError

    monkeypatch.setattr(gemm, "OnednnWeight", missing)
    gemm.can_pack.cache_clear()
    model = sharp_model()
    try:
        engine = engine_of(model, tokenizer)
    finally:
        gemm.can_pack.cache_clear()
    assert packed_classes(model) == set()
    assert tokens(sampled(engine, GREEDY)) == [plain_greedy(sharp_model(), p, 12) for p in PROMPTS]


@pytest.mark.parametrize("engine_kind", [NativeEngine, HfEngine])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_sampled_logprobs_match_the_trainers_at_equal_weights(
    name: str, engine_kind: Any, tokenizer: Any
) -> None:
    sampling = Sampling(max_completion_length=12, **OPTIONS[name])
    engine = engine_kind(sharp_model(), tokenizer, slots=4, max_model_len=64)
    for each in sampled(engine, sampling, requests(siblings=2)):
        expected = scored(sharp_model(), each, sampling.temperature)
        assert np.exp(each.logprobs - np.array(expected)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.8}, {"min_tokens": 5}], ids=str)
def test_penalties_match_transformers(options: dict[str, Any], tokenizer: Any) -> None:
    sampling = Sampling(temperature=0.0, max_completion_length=12, **options)
    ours = tokens(sampled(engine_of(ending_soon(), tokenizer), sampling))
    reference = tokens(sampled(HfEngine(ending_soon(), tokenizer, max_model_len=64), sampling))
    without = tokens(sampled(engine_of(ending_soon(), tokenizer), GREEDY))
    assert ours == reference != without


def ending_soon() -> Any:
    """A model whose most frequent token ends a completion.

    It never samples the pad token, which transformers penalizes as a part of padded prompts.
    """
    model = sharp_model(head_dim=8)
    frequent = plain_greedy(model, PROMPTS[0], 2)[1]
    model.generation_config.eos_token_id = [END, frequent]
    return model


# Slots.


@pytest.mark.parametrize("engine_kind", [NativeEngine, HfEngine])
def test_each_request_gets_one_completion_of_its_prompt(engine_kind: Any, tokenizer: Any) -> None:
    engine, batch = engine_kind(sharp_model(), tokenizer, slots=4), requests(siblings=3)
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


def test_ended_row_is_refilled_at_the_next_step(tokenizer: Any) -> None:
    engine, steps = engine_of(ending_soon(), tokenizer, slots=2), []
    completions = sampled(engine, GREEDY, between_steps=lambda: steps.append(1))
    lengths = [len(each.token_ids) for each in completions]
    assert min(lengths) < max(lengths)
    free_at = [0, 0]
    for length in lengths:  # each completion uses the row that is free first
        first = free_at.index(min(free_at))
        free_at[first] += length if length == 1 else length - 1  # start gives two tokens at once
    assert len(steps) <= max(free_at) + 1


def test_completion_does_not_depend_on_the_number_of_slots(tokenizer: Any) -> None:
    sampling = Sampling(max_completion_length=9, top_k=9, seed=5)
    one = tokens(sampled(engine_of(sharp_model(), tokenizer, slots=1), sampling))
    four = tokens(sampled(engine_of(sharp_model(), tokenizer, slots=7), sampling))
    assert one == four


@pytest.mark.parametrize("engine_kind", [NativeEngine, HfEngine])
def test_samples_are_determined_by_the_seed_and_siblings_differ(
    engine_kind: Any, tokenizer: Any
) -> None:
    engine = engine_kind(sharp_model(), tokenizer, slots=4, max_model_len=64)
    batch = requests(siblings=2)
    first, again, other = (
        tokens(sampled(engine, Sampling(seed=seed, max_completion_length=9), batch))
        for seed in (4, 4, 5)
    )
    assert first == again != other
    assert first[0] != first[1]


@pytest.mark.parametrize("stop", [(), ("never generated",)])
def test_none_among_requests_does_not_end_the_source(
    engine: NativeEngine, stop: tuple[str, ...]
) -> None:
    calls: list[int] = []
    sampling = replace(GREEDY, stop=stop)

    def source() -> Iterator[Request | None]:
        yield None
        yield requests()[0]
        while len(calls) < 20:
            yield None
        yield requests()[1]

    completions = sampled(engine, sampling, source(), between_steps=lambda: calls.append(1))
    assert tokens(completions) == tokens(sampled(engine, sampling, requests()[:2]))


def test_requests_are_read_only_when_rows_are_free(engine: NativeEngine) -> None:
    read: list[int] = []

    def source() -> Iterator[Request]:
        for request in requests():
            read.append(request.index)
            yield request

    completions = engine.generate(source(), Sampling(min_tokens=9, max_completion_length=9))
    next(completions)
    assert read == [0, 1, 2, 3]


def test_cancel_drops_completions_in_flight(engine: NativeEngine) -> None:
    steps: list[int] = []

    def third_step() -> None:
        steps.append(1)
        if len(steps) == 3:
            engine.cancel()

    long = Sampling(min_tokens=9, max_completion_length=9)
    assert sampled(engine, long, between_steps=third_step) == []
    assert len(sampled(engine, long)) == len(PROMPTS)


def test_stop_string_ends_a_completion_and_is_removed(tokenizer: Any) -> None:
    free = sampled(engine_of(sharp_model(), tokenizer), GREEDY)[0]
    stop = tokenizer.decode(free.token_ids[3:4].tolist()).strip() or " "
    sampling = Sampling(temperature=0.0, max_completion_length=12, stop=(stop,))
    for kind in (NativeEngine, HfEngine):
        engine = kind(sharp_model(), tokenizer, slots=4, max_model_len=64)
        stopped = sampled(engine, sampling)[0]
        assert len(stopped.token_ids) <= 4
        assert (stopped.finish_reason, stop in stopped.text) == ("stop", False)
        assert free.token_ids.tolist()[: len(stopped.token_ids)] == stopped.token_ids.tolist()


# Prefix cache.


def tokens_computed(engine: NativeEngine, batch: list[Request]) -> int:
    """Tokens that went through the model before the first decode step."""
    computed: list[int] = []
    embed = engine._model.model.embed_tokens
    hook = embed.register_forward_pre_hook(lambda module, ids: computed.append(ids[0].numel()))
    one = Sampling(temperature=0.0, max_completion_length=1)
    list(engine.generate(batch, one))
    hook.remove()
    return sum(computed)


def test_prompts_and_their_common_prefix_are_computed_once(tokenizer: Any) -> None:
    engine = engine_of(sharp_model(), tokenizer, slots=3)
    assert tokens_computed(engine, requests([[5, 9, 33, 8]], siblings=8)) == 4
    engine = engine_of(sharp_model(), tokenizer, slots=4)
    prompts = [[*range(10, 30), last, last + 1] for last in range(40, 52)]
    assert tokens_computed(engine, requests(prompts)) == 20 + 12 * 2


# New weights.


class Lazy(Mapping[str, torch.Tensor]):
    """Weights created on access; counts how many exist at once."""

    def __init__(self, model: Any) -> None:
        self._weights = models.weights_of(model)
        self._created: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        created = self._weights[name].detach().clone()
        self._created.append(weakref.ref(created))
        self.most = max(self.most, sum(each() is not None for each in self._created))
        return created

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@pytest.mark.parametrize(
    ("tied", "live"),
    [(False, True), (True, False),
     pytest.param(False, False, marks=SLOW), pytest.param(True, True, marks=SLOW)],
)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_apply_gives_new_tokens_without_a_second_model(
    family: str, live: bool, tied: bool, tokenizer: Any
) -> None:
    old = {"tie_word_embeddings": tied, **FAMILIES[family]}
    new = {**old, "seed": 8}
    engine = engine_of(sharp_model(**old), tokenizer, live=live)
    before, weights = tokens(sampled(engine, GREEDY)), Lazy(sharp_model(**new))
    engine.apply(weights, step=4)
    after = tokens(sampled(engine, GREEDY))
    assert after == [plain_greedy(sharp_model(**new), prompt, 12) for prompt in PROMPTS] != before
    assert weights.most <= 6  # of one fused matmul: three weights and three biases


def switched_greedy(
    prompt: Sequence[int], seeds: Sequence[int], family: str = "qwen3"
) -> tuple[list[int], Any]:
    """Greedy tokens and logprobs of transformers, with the weights of seed `seeds[t]` for token t.

    Keys and values of earlier tokens are kept. Ends with the end token.
    """
    settings = FAMILIES[family]
    model, cache, inputs = sharp_model(**settings), None, torch.tensor([prompt])
    out: list[int] = []
    scores: list[float] = []
    while len(out) < len(seeds) and (not out or out[-1] != END):
        models.apply_weights(
            model, models.weights_of(sharp_model(seed=seeds[len(out)], **settings))
        )
        with torch.no_grad():
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, logprobs = output.past_key_values, output.logits[0, -1].log_softmax(-1)
        out.append(int(logprobs.argmax()))
        scores.append(float(logprobs.max()))
        inputs = torch.tensor([[out[-1]]])
    return out, scores


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_running_rows_continue_with_new_weights_and_old_keys(family: str, tokenizer: Any) -> None:
    old, new = sharp_model(**FAMILIES[family]), sharp_model(seed=8, **FAMILIES[family])
    engine, steps = engine_of(old, tokenizer, slots=2, step=6), []

    def swap() -> None:
        steps.append(1)
        if len(steps) == 4:  # tokens 1 and 2 come in the first step
            engine.apply(models.weights_of(new), step=7)

    completions = sampled(engine, GREEDY, between_steps=swap)
    assert len(completions) == len(PROMPTS)
    for prompt, each in zip(PROMPTS[:2], completions, strict=False):
        expected, scores = switched_greedy(prompt, [0] * 5 + [8] * 7, family)
        assert each.token_ids.tolist() == expected
        assert each.logprobs.tolist() == pytest.approx(scores, abs=2e-5)
        assert each.policy_steps.tolist() == [6] * 5 + [7] * (len(expected) - 5)
    for prompt, each in zip(PROMPTS[2:], completions[2:], strict=True):  # started later
        if set(each.policy_steps.tolist()) == {7}:
            assert each.token_ids.tolist() == plain_greedy(new, prompt, 12)
    assert set(completions[-1].policy_steps.tolist()) == {7}


@pytest.mark.parametrize("room", [35, 200])
def test_rows_keep_the_prefix_of_the_weights_they_started_with(room: int, tokenizer: Any) -> None:
    """With 35 positions, two prefixes of 20 do not fit: some prompts are computed as a whole."""
    seeds, steps = (0, 8, 9), list[int]()
    engine = engine_of(sharp_model(), tokenizer, slots=3, max_model_len=room)

    def swap() -> None:
        steps.append(1)
        if len(steps) % 4 == 0:
            newest = engine.step + 1
            engine.apply(models.weights_of(sharp_model(seed=seeds[newest % 3])), step=newest)

    batch = requests([[*range(10, 30), last] for last in range(40, 56)])
    completions = sampled(engine, GREEDY, batch, between_steps=swap)
    assert len({step for each in completions for step in each.policy_steps.tolist()}) > 5
    assert any(len(set(each.policy_steps.tolist())) > 2 for each in completions)
    for request, each in zip(batch, completions, strict=True):
        chosen = [seeds[step % 3] for step in each.policy_steps.tolist()]
        expected, scores = switched_greedy(request.prompt_ids.tolist(), chosen)
        assert each.token_ids.tolist() == expected
        assert each.logprobs.tolist() == pytest.approx(scores, abs=2e-5)


COOLING = TemperatureSchedule("cosine", start=1.3, end=0.4, max_steps=9)


def temperatures_of(completion: Completion) -> torch.Tensor:
    """The temperatures as the trainer computes them, [1, T] including the prompt."""
    steps = [0] * len(completion.prompt_ids) + completion.policy_steps.tolist()
    return torch.tensor([[COOLING(step) for step in steps]])


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["top_p"], OPTIONS["min_tokens"]])
@pytest.mark.parametrize("engine_kind", [NativeEngine, HfEngine])
def test_scheduled_temperature_follows_the_step_of_the_weights(
    engine_kind: Any, options: dict[str, Any], tokenizer: Any
) -> None:
    """Equal weights with another step: every ratio must be 1."""
    engine, calls = engine_kind(sharp_model(), tokenizer, slots=4, max_model_len=64, step=1), []

    def next_step() -> None:
        calls.append(1)
        if len(calls) in (1, 4, 6):
            engine.apply(models.weights_of(sharp_model()), step=engine.step + 2)

    sampling = Sampling(**options, schedule=COOLING, max_completion_length=12)
    completions = sampled(engine, sampling, requests(siblings=2), between_steps=next_step)
    steps = {step for each in completions for step in each.policy_steps.tolist()}
    assert len(steps) > 2
    if engine_kind is NativeEngine:
        assert any(len(set(each.policy_steps.tolist())) > 1 for each in completions)
    for each in completions:
        expected = scored(sharp_model(), each, temperatures_of(each))
        assert np.exp(each.logprobs - np.array(expected)) == pytest.approx(1.0, abs=1e-4)


def test_low_scheduled_temperature_samples_greedily(tokenizer: Any) -> None:
    """The temperature of the step applies to the sampling, not to the logprob only."""
    cold = Sampling(
        max_completion_length=12,
        schedule=TemperatureSchedule("linear", start=1e-3, end=5.0, max_steps=9),
    )
    first = engine_of(sharp_model(), tokenizer, step=0)
    assert tokens(sampled(first, cold)) == tokens(sampled(first, GREEDY))
    last = engine_of(sharp_model(), tokenizer, step=8)
    assert tokens(sampled(last, cold)) != tokens(sampled(last, GREEDY))


def foreign_weights(name: str) -> dict[str, torch.Tensor]:
    weights = dict(models.weights_of(sharp_model(seed=8)))
    last = "model.norm.weight"  # last, so that a check during copying would be too late
    if name == "other name":
        weights["model.other.weight"] = weights.pop(last)
    elif name == "other shape":
        weights[last] = torch.ones(3)
    else:
        weights[last] = torch.ones(TINY["hidden_size"], dtype=torch.int32)
    return weights


@pytest.mark.parametrize("engine_kind", [NativeEngine, HfEngine])
@pytest.mark.parametrize("name", ["other name", "other shape", "integers"])
def test_apply_rejects_weights_of_another_model_unchanged(
    name: str, engine_kind: Any, tokenizer: Any
) -> None:
    engine = engine_kind(sharp_model(), tokenizer, slots=4, max_model_len=64, step=3)
    before = tokens(sampled(engine, GREEDY))
    with pytest.raises(ValueError, match=r"model\.(norm|other)"):
        engine.apply(foreign_weights(name), step=9)
    assert (tokens(sampled(engine, GREEDY)), engine.step) == (before, 3)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.v_proj.weight"])
def test_non_finite_logits_raise_and_leave_the_cache_clean(engine: NativeEngine, name: str) -> None:
    before = tokens(sampled(engine, GREEDY))
    good = models.weights_of(sharp_model())
    engine.apply({**good, name: torch.full_like(good[name], 3e38)}, step=9)
    with pytest.raises(EngineError, match="weights of step 9 give logits that are not finite"):
        sampled(engine, GREEDY)
    engine.apply(good, step=3)
    assert tokens(sampled(engine, GREEDY)) == before


def test_growing_rows_keep_their_content(tokenizer: Any) -> None:
    long = Sampling(temperature=0.0, max_completion_length=80)
    engine = engine_of(sharp_model(), tokenizer, max_model_len=100)  # rows of 32, 64, 96, 100
    expected = [plain_greedy(sharp_model(), each, 80) for each in PROMPTS]
    assert tokens(sampled(engine, long)) == expected
    assert max(map(len, expected)) == 80


# Models in training.


def test_live_engine_holds_no_cache_between_calls(tokenizer: Any) -> None:
    before = alive(KVCache)
    engine = engine_of(sharp_model(), tokenizer, live=True)
    in_flight = engine.generate(requests([PROMPTS[0]], siblings=2), Sampling(temperature=0.0))
    next(in_flight)
    assert alive(KVCache) == before + 1
    in_flight.close()
    assert alive(KVCache) == before


def test_live_engine_does_not_modify_the_model(tokenizer: Any) -> None:
    model = sharp_model()
    engine = engine_of(model, tokenizer, live=True)
    before = tokens(sampled(engine, GREEDY))
    kinds = [type(each) for each in model.modules()]
    assert model.config._attn_implementation == "eager" and PackedLinear not in kinds
    models.apply_weights(model, models.weights_of(sharp_model(seed=8)))  # a training step
    after = tokens(sampled(engine, GREEDY))
    assert after == [plain_greedy(sharp_model(seed=8), each, 12) for each in PROMPTS] != before


# Rejected requests.


def test_prompt_longer_than_the_context_raises_with_both_lengths(engine: NativeEngine) -> None:
    with pytest.raises(ConfigError, match=r"60 tokens .* 12 do not fit into 64 .* to 72"):
        sampled(engine, GREEDY, requests([[5] * 60]))
    assert len(sampled(engine, GREEDY, requests([[5] * 52]))) == 1


def test_slots_that_do_not_fit_in_memory_raise(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine.slots 900000000 .* GiB .* use engine.slots \d"):
        engine_of(sharp_model(), tokenizer, slots=900_000_000)


def test_unsupported_architecture_falls_back_to_transformers(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "peralta_zmq")
    model = tiny_model(model_type="mistral")
    assert isinstance(NativeEngine.open_live(model, tokenizer), HfEngine)
    assert [each.getMessage() for each in caplog.records] == [
        "engine native does not support mistral; using transformers' generate"
    ]


@pytest.mark.slow
def test_memory_is_constant_over_10_000_completions(tokenizer: Any) -> None:
    engine = engine_of(sharp_model(), tokenizer, slots=32)
    sampling = Sampling(max_completion_length=6)

    def source() -> Iterator[Request]:
        # A few more than are measured: at the end, fewer rows run, for which oneDNN caches memory.
        for index in range(10_040):
            yield Request(index, np.array(PROMPTS[index // 8 % len(PROMPTS)], np.int32))

    resident, kept = list[int](), list[int]()
    for number, _ in enumerate(engine.generate(source(), sampling), start=1):
        if number in (5_000, 10_000):
            resident.append(resident_bytes())
            kept.append(alive(Completion) + alive(Request))
    assert kept[1] - kept[0] < 100  # of 10,000 objects; the number in flight varies
    assert resident[1] - resident[0] < 8 << 20


def alive(kind: type) -> int:
    """Number of live objects of a class."""
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())
