"""Names of tensors in published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, random_model
from model_layouts import MULTIMODAL, multimodal_model, text_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from peralta_zmq import models
from peralta_zmq.build.components import round_buffers
from peralta_zmq.errors import ConfigError

CPU = torch.device("cpu")
IDS = torch.arange(3, 40)[None]
RENAMED = ["qwen3_moe", "mixtral", "gpt_neox", "nemotron_h"]


def loaded(folder: Path) -> Any:
    return models.load_model(folder, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("model_type", RENAMED)
def test_weights_have_the_names_and_values_of_the_hub(tmp_path: Path, model_type: str) -> None:
    model = text_model(model_type)
    model.save_pretrained(tmp_path)
    files, weights = models.folder_weights(tmp_path), models.weights_of(loaded(tmp_path))
    assert weights.keys() == files.keys() == models.weights_of(model).keys()
    assert weights.keys() != model.state_dict().keys()
    assert all(torch.equal(weights[name], files[name]) for name in files)


@pytest.mark.parametrize("model_type", RENAMED)
def test_weights_under_names_of_the_hub_are_applied_in_place(model_type: str) -> None:
    model, other = text_model(model_type), text_model(model_type, seed=1)
    assert not torch.equal(model(IDS).logits, other(IDS).logits)
    models.apply_weights(model, models.weights_of(other))
    assert torch.equal(model(IDS).logits, other(IDS).logits)


def publish(source: Path, target: Path, model: Any) -> None:
    target.mkdir()
    weights = {name: each.contiguous() for name, each in models.weights_of(model).items()}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(models.published_config(source)))


@pytest.mark.parametrize("model_type", list(MULTIMODAL))
def test_text_part_of_a_multimodal_model_is_a_model(tmp_path: Path, model_type: str) -> None:
    whole = multimodal_model(model_type, tmp_path / "base")
    expected = whole(IDS).logits
    text = loaded(tmp_path / "base")
    assert torch.equal(text(IDS).logits, expected)
    assert len(models.weights_of(text)) < len(models.weights_of(whole))
    publish(tmp_path / "base", tmp_path / "step", text)
    elsewhere, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "step", output_loading_info=True
    )
    assert not any(report.values()) and type(elsewhere) is type(text)
    assert torch.equal(elsewhere(IDS).logits, expected)
    assert elsewhere.generation_config.eos_token_id in (2, [2])


@pytest.mark.parametrize("model_type", list(MULTIMODAL))
def test_base_and_version_of_a_multimodal_model_have_equal_names(
    tmp_path: Path, model_type: str
) -> None:
    multimodal_model(model_type, tmp_path / "base")
    text = loaded(tmp_path / "base")
    publish(tmp_path / "base", tmp_path / "step", text)
    weights = models.weights_of(text)
    for folder in (tmp_path / "base", tmp_path / "step"):
        files = models.folder_weights(folder)
        assert files.keys() == weights.keys() == models.weights_of(loaded(folder)).keys()
        assert all(torch.equal(files[name], weights[name]) for name in files)
    step, base = tmp_path / "step", tmp_path / "base"
    assert models.published_config(step) == models.published_config(base)


def test_published_config_of_a_quantized_model_is_of_full_weights(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.published_config(tmp_path) == {"model_type": "llama"}


def test_published_config_has_the_sizes_and_rotary_embedding_of_the_text_part(
    tmp_path: Path,
) -> None:
    # Gemma 3 4B as published, in the form of transformers 4, which mlx-lm reads.
    rope = {"factor": 8.0, "rope_type": "linear"}
    sizes = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    text = {"model_type": "gemma3_text", "rope_scaling": rope, **sizes}
    config = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = models.text_config(tmp_path)
    published = models.published_config(tmp_path)
    assert published["rope_scaling"] == rope and published["num_attention_heads"] == 8
    (tmp_path / "config.json").write_text(json.dumps(published))
    found = AutoConfig.from_pretrained(tmp_path)
    assert found.rope_parameters == expected.rope_parameters
    assert found.to_dict() == {**expected.to_dict(), "_name_or_path": found.name_or_path}


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_quantized_weights_of_a_multimodal_model_are_converted(tmp_path: Path) -> None:
    multimodal_model("gemma3", tmp_path)
    change_config(tmp_path, {"quantization_config": {"quant_method": "fp8"}})
    assert models.text_config(tmp_path).quantization_config["dequantize"]


def test_tied_embeddings_of_the_whole_model_are_those_of_the_text_part(tmp_path: Path) -> None:
    multimodal_model("qwen3_5", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert text.pop("tie_word_embeddings")
    change_config(tmp_path, {"text_config": text})
    assert loaded(tmp_path).config.tie_word_embeddings


def test_layers_that_predict_further_tokens_are_not_unexpected(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**FAMILIES["DeepSeek-V3"], "num_nextn_predict_layers": 1}
    model = random_model(sizes)
    model.save_pretrained(tmp_path)
    weights = models.folder_weights(tmp_path)
    number = model.config.num_hidden_layers
    extra = {f"model.layers.{number}.eh_proj.weight": torch.ones(2)}
    save_file({**weights, **extra}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded(tmp_path)
    extra = {f"model.layers.{number + 1}.eh_proj.weight": torch.ones(2)}
    save_file({**weights, **extra}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"its config has no tensor .*layers\.{number + 1}"):
        loaded(tmp_path)


def test_published_buffers_are_rounded_as_generators_get_them() -> None:
    """The biases of DeepSeek-V3's routers are not parameters."""
    model = random_model(FAMILIES["DeepSeek-V3"])
    biases = [each for name, each in model.named_buffers() if name.endswith("correction_bias")]
    for bias in biases:
        bias.copy_(8 + 1e-3 * torch.arange(bias.numel()).view_as(bias))
    round_buffers(model, torch.bfloat16)
    assert biases and all(torch.equal(each, each.bfloat16().float()) for each in biases)
