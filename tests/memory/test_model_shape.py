"""Sizes of models from their config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import COMMON, FAMILIES
from sample_data import TINY

from peralta_zmq.errors import ConfigError
from peralta_zmq.memory import ModelShape, read_shape


def write(folder: Path, config: object) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


def test_sizes_of_a_named_model(qwen: ModelShape) -> None:
    layers = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    vectors = 28 * (2 * 1024 + 2 * 128) + 1024
    assert qwen.num_parameters == layers + vectors + 151936 * 1024 == 596_049_920
    assert (qwen.layer_parameters, qwen.vectors) == (layers, vectors)
    assert (qwen.query_size, qwen.key_size, qwen.token_cache) == (2048, 1024, 2 * 28 * 1024)
    per_layer = 2 * (1024 + 2048) + 2 * (1024 + 1024) + 3 * (1024 + 3072)
    assert qwen.adapted == 28 * per_layer and qwen.is_tied


def test_untied_head_is_counted(tmp_path: Path) -> None:
    tied = write(tmp_path, TINY)
    untied = write(tmp_path, {**TINY, "tie_word_embeddings": False})
    assert untied.num_parameters == tied.num_parameters + tied.embedding
    assert untied.layer_parameters == tied.layer_parameters and not untied.is_tied


def test_experts_are_counted(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    shape = write(
        tmp_path, {**TINY, "model_type": "qwen3_moe", "decoder_sparse_step": 1, **experts}
    )
    attention = 2 * 16 * (16 + 8)
    assert shape.layer_parameters == 2 * (attention + 16 * 4 + 4 * 3 * 16 * 8)
    assert shape.inner_size == 16


def test_shape_of_a_multimodal_model_is_that_of_its_text_part(tmp_path: Path) -> None:
    # Gemma 3 4B as published; its config.json leaves out the defaults of transformers.
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    shape = write(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (shape.num_heads, shape.query_size, shape.key_size) == (8, 2048, 1024)
    assert shape.vocab_size == 262_208 and shape.is_tied
    assert shape.num_parameters == pytest.approx(3.88e9, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_planned(family: str, tmp_path: Path) -> None:
    """Of Gemma 4, layers have heads of different sizes; Nemotron-H lists its layers."""
    shape = write(tmp_path, {**COMMON, **FAMILIES[family]})
    assert shape.num_layers == 4 and 0 < shape.layer_parameters < shape.num_parameters


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"cannot be loaded: .*object"),
        ('{"model_type": "nova", "hidden_size": 4}', "cannot be loaded: .*nova"),
        (
            '{"model_type": "qwen3", "num_hidden_layers": 10000000}',
            "num_hidden_layers 10000000, ",
        ),
        ('{"model_type": "gpt2", "n_layer": 1e9}', "n_layer 1000000000.0, above 10000"),
        ('{"model_type": "gemma3", "text_config": {"num_hidden_layers": 10001}}', "above 10000"),
        ('{"model_type": "mamba"}', "no number for num_attention_heads, so the memory of .*'mam"),
    ],
)
def test_config_without_sizes_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_shape(tmp_path)
