"""What only the MLX engine has: quantized weights, settings for mlx-lm, refusals."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import (
    DEVICE,
    GREEDY,
    OPTIONS,
    PROMPTS,
    assert_greedy_matches,
    requests,
    sampled,
    save_model,
    sharp_model,
    trainer_logprobs,
)

from peralta_zmq import models, registry
from peralta_zmq.engines.native.token_sampler import sample_rows
from peralta_zmq.engines.row_engine import SamplingInputs
from peralta_zmq.errors import ConfigError
from peralta_zmq.registry import Engine, EngineSettings, WeightUpdate
from peralta_zmq.rollout import Sampling

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed; run make test-mlx"
)
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


def opened(folder: Path, **settings: Any) -> Engine:
    values = {"device": DEVICE, "dtype": "float32", "slots": 4, "max_model_len": 64, **settings}
    return registry.resolve("engine", "mlx").open(folder, EngineSettings(**values))


# Settings of config.json that mlx-lm reads under other names.


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
        {"model_type": "qwen3", "rope_parameters": LLAMA3_ROPE},
        {"model_type": "qwen2", "head_dim": 8,
         "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "gemma3_text", "sliding_window": 6, "tie_word_embeddings": True,
         "query_pre_attn_scalar": 8, "num_hidden_layers": 6,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 30.0}}},
    ],
    ids=lambda settings: settings["model_type"],
)  # fmt: skip
def test_settings_of_a_config_have_their_effect(settings: dict[str, Any], tmp_path: Path) -> None:
    save_model(sharp_model(**settings), tmp_path)
    assert_greedy_matches(opened(tmp_path), sharp_model(**settings))


# Quantized weights.


def wide_model(seed: int) -> Any:
    """A model whose layers are wide enough for groups of quantized weights."""
    return sharp_model(seed=seed, hidden_size=64, intermediate_size=128, head_dim=32)


def mismatch(engine: Engine, model: Any) -> float:
    """Mean absolute difference of logprobs to the trainer's."""
    completions = sampled(engine, Sampling(max_completion_length=12))
    ours = np.concatenate([each.logprobs for each in completions])
    return float(np.abs(ours - trainer_logprobs(model, completions)[0]).mean())


def test_quantized_weights_follow_each_version(tmp_path: Path) -> None:
    save_model(wide_model(0), tmp_path / "0")
    save_model(wide_model(8), tmp_path / "8")
    exact, eight, four = (opened(tmp_path / "0", quantize=bits) for bits in (None, 8, 4))
    assert_greedy_matches(exact, wide_model(0))
    errors = [mismatch(engine, wide_model(0)) for engine in (exact, eight, four)]
    assert 100 * errors[0] < errors[1] < errors[2]
    for engine, bits in ((eight, 8), (four, 4)):
        engine.apply(WeightUpdate(1, models.weights_of(wide_model(8))))
        fresh = opened(tmp_path / "8", quantize=bits)
        for ours, expected in zip(sampled(engine, GREEDY), sampled(fresh, GREEDY), strict=True):
            assert ours.token_ids.tolist() == expected.token_ids.tolist()
            assert ours.logprobs.tolist() == expected.logprobs.tolist()


def test_bfloat16_weights_have_float32_logprobs(tmp_path: Path) -> None:
    """Logprobs in bfloat16 would be multiples of 2^-7 or larger, except near 0."""
    save_model(sharp_model(), tmp_path)
    completions = sampled(opened(tmp_path, dtype="bfloat16"), Sampling(max_completion_length=12))
    logprobs = torch.from_numpy(np.concatenate([each.logprobs for each in completions]))
    assert (logprobs != logprobs.bfloat16().float()).float().mean() > 0.9


# Refusals.


def with_config(folder: Path, changes: Mapping[str, Any]) -> Path:
    save_model(sharp_model(), folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"model_type": "bigbird"}, {}, r"'bigbird' in mlx-lm; set engine\.name to native or hf"),
        ({"model_type": "gemma2"}, {}, r"gemma2 cannot batch .*; set engine\.name to native or hf"),
        ({"auto_map": {"AutoConfig": "code.Mine"}}, {"trust_remote_code": True},
         r"does not run custom Python code .*; set engine\.name to native or hf"),
        ({"auto_map": {"AutoConfig": "code.Mine"}, "model_type": "mine"}, {},
         r"model\.trust_remote_code"),
        ({"sliding_window": 8, "use_sliding_window": True,
          "layer_types": ["sliding_attention"] * 2}, {},
         r"qwen3 without its sliding window; set engine\.max_model_len to at most 8, or set"),
        ({}, {"slots": 900_000_000}, r"engine\.slots 900000000 .* GiB .* use engine\.slots \d"),
    ],
)  # fmt: skip
def test_model_that_mlx_cannot_serve_is_refused(
    changes: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(with_config(tmp_path, changes), **settings)


def test_weights_larger_than_the_free_memory_are_refused() -> None:
    from peralta_zmq.engines.mlx.mlx_engine import check_weights_memory

    check_weights_memory(1 << 30, torch.bfloat16, 2 << 30)
    with pytest.raises(ConfigError, match=r"needs 2\.0 GiB .* bfloat16, 1\.0 GiB are free"):
        check_weights_memory(1 << 30, torch.bfloat16, 1 << 30)


def test_fraction_of_the_memory_is_the_limit_of_mlx(tmp_path: Path) -> None:
    import mlx.core as mx  # pyright: ignore[reportMissingImports]

    save_model(sharp_model(), tmp_path)
    before = mx.get_memory_limit()
    opened(tmp_path, gpu_memory_utilization=0.75)
    expected = int(0.75 * models.total_bytes(torch.device(DEVICE)))
    assert mx.set_memory_limit(before) == expected != before


def test_cuda_device_is_refused() -> None:
    from peralta_zmq.engines.mlx.mlx_engine import mlx_device

    with pytest.raises(ConfigError, match=r"on device cuda:1; set model\.device to cpu, or set"):
        mlx_device(torch.device("cuda:1"))


def test_equal_prompts_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peralta_zmq.engines.mlx.mlx_engine import MlxModel

    computed: list[int] = []
    prefill = MlxModel.prefill

    def counted(self: Any, prompts: list[Any]) -> Any:
        computed.append(len(prompts))
        return prefill(self, prompts)

    save_model(sharp_model(), tmp_path)
    engine = opened(tmp_path, slots=12)
    monkeypatch.setattr(MlxModel, "prefill", counted)
    sampled(engine, GREEDY, requests(PROMPTS[:3], siblings=4))
    assert computed == [3]


@pytest.mark.parametrize("options", list(OPTIONS))
def test_sampled_tokens_and_logprobs_are_those_of_the_native_engine(options: str) -> None:
    import mlx.core as mx  # pyright: ignore[reportMissingImports]

    from peralta_zmq.engines.mlx.mlx_engine import sample

    random = np.random.default_rng(0)
    logits = random.normal(0, 3, (200, 64)).astype(np.float32)
    inputs = SamplingInputs(
        Sampling(**OPTIONS[options]),
        random.random(200, dtype=np.float32),
        seen=random.random((200, 64)) < 0.2 if "repetition_penalty" in OPTIONS[options] else None,
        banned=random.random((200, 64)) < 0.2 if "min_tokens" in OPTIONS[options] else None,
    )
    tokens, logprobs = (np.array(each) for each in sample(mx.array(logits), inputs))
    expected, expected_logprobs = sample_rows(torch.from_numpy(logits), inputs)
    # The sums of probabilities round differently.
    assert (tokens == expected).mean() > 0.98
    same = tokens == expected
    assert logprobs[same] == pytest.approx(expected_logprobs[same], abs=1e-4)
