"""The native engine against transformers and against the trainer's own scoring."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import weakref
from collections.abc import Iterator, Mapping
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
    assert_exact_logprobs,
    assert_greedy_matches,
    completed,
    engine_on,
    plain_greedy,
    requests,
    sampled,
    sharp_model,
    switched_greedy,
    tokens,
    trainer_logprobs,
    with_sampling,
)  # fmt: skip
from sample_data import tiny_model

from peralta_zmq import models
from peralta_zmq.compiler import INSTRUCTION_SET
from peralta_zmq.engines.native.decoder import Decoder, NewTokens
from peralta_zmq.engines.native.kernels import gemm
from peralta_zmq.engines.native.kernels.decode_layer import can_compile
from peralta_zmq.engines.native.native_engine import native_engine, open_live
from peralta_zmq.engines.native.packed_linears import PackedLinear
from peralta_zmq.engines.row_engine import RowEngine
from peralta_zmq.errors import ConfigError
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import Request, Sampling

HAS_COMPILER = sys.platform == "linux" and shutil.which("cc") is not None
USES_KERNELS = HAS_COMPILER and os.environ.get(INSTRUCTION_SET) != "none"
SLOW = pytest.mark.slow  # other pairs of the same values


def engine_of(
    model: Any, tokenizer: Any, *, step: int = 0, live: bool = False, **settings: Any
) -> RowEngine:
    sizes = EngineSettings(**{"slots": 4, "max_model_len": 64, **settings})
    return native_engine(model, tokenizer, sizes, step=step, live=live)


@pytest.fixture
def engine(tokenizer: Any) -> RowEngine:
    return engine_of(sharp_model(), tokenizer, step=3)


def test_decoder_uses_compiled_kernels_if_there_is_a_compiler() -> None:
    decoder = Decoder(sharp_model(), num_rows=4, capacity=64)
    assert (decoder.library is not None) == USES_KERNELS


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_layers_in_one_call_compute_the_bits_of_a_call_per_operation(
    family: str, dtype: torch.dtype
) -> None:
    if gemm.panel_kernel(dtype) is None:
        pytest.skip("panels are not used on this machine")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_key_value_heads": 2}
    settings = {**FAMILIES[family], **sizes}
    ids = np.random.default_rng(0).integers(3, 60, (3, 20))
    positions = np.tile(np.arange(20), (3, 1))

    def hidden_states(*, in_one_call: bool) -> Iterator[torch.Tensor]:
        """Of prompts, and of one token after another, with newer weights before the last ones."""
        model = tiny_model(**settings).to(dtype)
        decoder = Decoder(model, num_rows=4, capacity=64, in_one_call=in_one_call)
        assert can_compile(model.model)
        for first, last in [(0, 7), *((position, position + 1) for position in range(7, 20))]:
            if first == 15:
                newer = models.weights_of(tiny_model(seed=5, **settings).bfloat16())
                decoder.weights.apply(newer)
            new = slice(first, last)
            yield from decoder.hidden_states(
                [NewTokens(ids[:, new], positions[:, new], first_row=1)]
            )

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
    if gemm.panel_kernel(torch.bfloat16) is not None:
        assert gemm.PanelWeight in packed_classes(model)
    for seed in (0, 8):
        plain = sharp_model(seed=seed, **settings).bfloat16()
        if seed:
            engine.apply(WeightUpdate(1, models.weights_of(plain)))
        completions = sampled(engine, Sampling(max_completion_length=12))
        ours = np.concatenate([each.logprobs for each in completions])
        torchs, exact = trainer_logprobs(plain, completions)
        assert np.square(ours - exact).mean() <= 2 * np.square(torchs - exact).mean()


@pytest.mark.parametrize(
    ("options", "options_of_generate"),
    [({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
     ({"min_tokens": 5}, {"min_new_tokens": 5})],
    ids=["repetition_penalty", "min_tokens"],
)  # fmt: skip
def test_penalties_match_transformers(
    options: dict[str, Any], options_of_generate: dict[str, Any], tokenizer: Any
) -> None:
    sampling = Sampling(temperature=0.0, max_completion_length=12, **options)
    ours = tokens(sampled(engine_of(ending_soon(), tokenizer), sampling))
    model = ending_soon()
    options_of_generate["eos_token_id"] = model.generation_config.eos_token_id
    expected = [plain_greedy(model, each, 12, **options_of_generate) for each in PROMPTS]
    without = tokens(sampled(engine_of(ending_soon(), tokenizer), GREEDY))
    assert ours == expected != without


def ending_soon(head_dim: int = 8) -> Any:
    """A model whose most frequent token ends a completion."""
    model = sharp_model(head_dim=head_dim)
    frequent = plain_greedy(model, PROMPTS[0], 2)[1]
    model.generation_config.eos_token_id = [END, frequent]
    return model


# Slots.


def test_ended_row_is_refilled_at_the_next_step(tokenizer: Any) -> None:
    engine, steps = engine_of(ending_soon(), tokenizer, slots=2), []
    completions = sampled(engine, GREEDY, between_steps=lambda: steps.append(1))
    lengths = [len(each.token_ids) for each in completions]
    assert min(lengths) < max(lengths)
    free_at = [0, 0]
    for length in lengths:  # each completion uses the row that is free first
        first = free_at.index(min(free_at))
        free_at[first] += length
    assert len(steps) <= max(free_at) + 1


@pytest.mark.parametrize("options", [{}, {"max_scores": 0}])  # 0: prompts are not short
def test_completion_does_not_depend_on_the_number_of_slots(
    options: dict[str, int], tokenizer: Any
) -> None:
    sampling = Sampling(max_completion_length=9, top_k=9, seed=5)
    one = tokens(sampled(engine_on(sharp_model(), tokenizer, slots=1, **options), sampling))
    seven = tokens(sampled(engine_on(sharp_model(), tokenizer, slots=7, **options), sampling))
    assert one == seven


# Prefix cache.


def tokens_computed(
    tokenizer: Any, batch: list[Request], *, slots: int = 4, length: int = 1
) -> int:
    """Tokens that went through the model before the first decode step."""
    computed: list[int] = []
    model = sharp_model()
    engine = engine_of(model, tokenizer, slots=slots)
    embed = model.model.embed_tokens
    embed.register_forward_pre_hook(lambda module, ids: computed.append(ids[0].numel()))
    sampled(engine, Sampling(temperature=0.0, max_completion_length=length), batch)
    return sum(computed)


def test_prompts_and_their_common_prefix_are_computed_once(tokenizer: Any) -> None:
    assert tokens_computed(tokenizer, requests([[5, 9, 33, 8]], siblings=8), slots=3) == 4
    prompts = [[*range(10, 30), last, last + 1] for last in range(40, 52)]
    assert tokens_computed(tokenizer, requests(prompts)) == 20 + 12 * 2


def test_resumed_completions_share_the_common_prefix(tokenizer: Any) -> None:
    engine = engine_of(sharp_model(), tokenizer, slots=4)
    batch = requests([[*range(10, 30), last] for last in range(40, 44)])
    engine.submit(with_sampling(GREEDY, batch))
    engine.advance()
    cut = engine.drop([request.index for request in batch])
    batch = [replace(each, resumes=cut[each.index]) for each in batch]
    num_cut = len(cut[0].token_ids)
    assert tokens_computed(tokenizer, batch, length=num_cut + 1) == 20 + 4 * (1 + num_cut)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_resumed_completion_begins_with_the_states_after_its_tokens(
    family: str, tokenizer: Any
) -> None:
    engine = engine_of(sharp_model(**FAMILIES[family]), tokenizer)
    (whole,) = sampled(engine, GREEDY, requests(PROMPTS[2:3]))
    (request,) = with_sampling(GREEDY, requests(PROMPTS[2:3]))
    engine.submit([request])
    for _ in range(4):
        assert engine.advance() == []
    (partial,) = engine.drop([request.index])
    (resumed,) = completed(engine, [replace(request, resumes=partial)])
    assert tokens([resumed]) == tokens([whole])
    assert 0 < len(partial.token_ids) < len(whole.token_ids)


@pytest.mark.skipif(not USES_KERNELS, reason="torch computes prompts in passes of their own")
def test_prompts_are_computed_in_the_pass_of_the_running_rows(tokenizer: Any) -> None:
    model, passes, steps = ending_soon(head_dim=16), [], []
    engine = engine_of(model, tokenizer, slots=2)
    model.model.embed_tokens.register_forward_hook(lambda *_: passes.append(1))
    sampled(engine, GREEDY, between_steps=lambda: steps.append(1))
    assert len(passes) == len(steps)


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
    engine.apply(WeightUpdate(4, weights))
    after = tokens(sampled(engine, GREEDY))
    assert after == [plain_greedy(sharp_model(**new), prompt, 12) for prompt in PROMPTS] != before
    assert weights.most <= 6  # of one fused matmul: three weights and three biases


@pytest.mark.parametrize("room", [35, 200])
def test_rows_keep_the_prefix_of_the_weights_they_started_with(room: int, tokenizer: Any) -> None:
    """With 35 positions, two prefixes of 20 do not fit: some prompts are computed as a whole."""
    seeds, steps = (0, 8, 9), list[int]()
    engine = engine_of(sharp_model(), tokenizer, slots=3, max_model_len=room)

    def swap() -> None:
        steps.append(1)
        if len(steps) % 4 == 0:
            newest = engine.step + 1
            weights = models.weights_of(sharp_model(seed=seeds[newest % 3]))
            engine.apply(WeightUpdate(newest, weights))

    batch = requests([[*range(10, 30), last] for last in range(40, 56)])
    completions = sampled(engine, GREEDY, batch, between_steps=swap)
    assert len({step for each in completions for step in each.policy_steps.tolist()}) > 5
    assert any(len(set(each.policy_steps.tolist())) > 2 for each in completions)
    scores = list[np.ndarray]()
    for each in completions:
        chosen = [seeds[step % 3] for step in each.policy_steps.tolist()]
        expected, logprobs = switched_greedy(each, chosen)
        assert each.token_ids.tolist() == expected
        scores.append(logprobs)
    assert_exact_logprobs(completions, np.concatenate(scores, 1))


# Models in training.


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


def test_keys_and_values_beyond_the_memory_are_refused_kept_turns_included(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"for keys and values, 0\.0 GiB are free; use a smaller"):
        engine_of(sharp_model(), tokenizer, gpu_memory_utilization=1e-9)
    slots: list[int] = []  # recommended numbers
    for keeps_turns in (False, True):
        with pytest.raises(ConfigError, match=r"engine.slots 900000000 .* GiB") as caught:
            engine_of(sharp_model(), tokenizer, slots=900_000_000, keeps_turns=keeps_turns)
        slots += map(int, re.findall(r"use engine\.slots (\d+)", str(caught.value)))
    assert slots[0] == pytest.approx(1.25 * slots[1], rel=0.1)  # free memory changes meanwhile


def test_unsupported_architecture_falls_back_to_transformers(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "peralta_zmq")
    model = tiny_model(model_type="granite")
    engine = open_live(model, tokenizer, EngineSettings())
    assert [each.getMessage() for each in caplog.records] == [
        "engine native does not support granite; using transformers' code"
    ]
    assert len(sampled(engine, GREEDY)) == len(PROMPTS)
