"""Sizes of models from their config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sample_data import TINY
from transformers import AutoConfig, AutoModelForCausalLM

from peralta_zmq.errors import ConfigError
from peralta_zmq.memory import ModelShape, read_shape


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "phi3", "smollm3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_number_of_parameters_equals_that_of_the_model(
    family: str, is_tied: bool, tmp_path: Path
) -> None:
    settings = {**TINY, "model_type": family, "tie_word_embeddings": is_tied}
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    shape = read_shape(tmp_path)
    assert shape.is_known and shape.num_parameters == model.num_parameters()


def test_shape_of_a_multimodal_model_is_that_of_its_text_part(tmp_path: Path) -> None:
    # Gemma 3 4B as published; its config.json leaves out the defaults of transformers.
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    assert (shape.num_heads, shape.num_key_heads, shape.head_dim) == (8, 4, 256)
    assert shape.vocab_size == 262_208 and shape.is_tied
    assert shape.num_parameters == pytest.approx(3.88e9, rel=0.01)


def test_size_of_a_named_model(qwen: ModelShape) -> None:
    assert qwen.num_parameters == 596_049_920


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"config\.json cannot be read \(.*\); copy the model again"),
        ('{"x":' * 9999, r"config\.json cannot be read \(.*\); copy the model again"),
        ("[]", r"config\.json cannot be read \(.*\); copy the model again"),
        ('{"model_type": "gpt2", "n_embd": 768}', "has no hidden_size, so the memory of .*'gpt2'"),
        ('{"model_type": "x", "hidden_size": -4}', "has no hidden_size, so the memory of .*'x'"),
    ],
)
def test_config_without_sizes_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_shape(tmp_path)
