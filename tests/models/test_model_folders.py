from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from custom_code import files_with_code
from safetensors.torch import load_file, save_file
from sample_data import TINY, tiny_model

from peralta_zmq import models
from peralta_zmq.errors import ConfigError, OutageError
from peralta_zmq.models import lora

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Any:
    return tiny_model()


# Weights


def changed(model: Any, **replaced: Any) -> dict[str, torch.Tensor]:
    """Other weights of the same shapes, with some of them replaced, or left out when None."""
    weights = {name: tensor + 1 for name, tensor in models.weights_of(model).items()}
    for name, tensor in replaced.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    return weights


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: Any, before: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_weights_copies_into_live_tensors(model: Any, dtype: torch.dtype) -> None:
    live = models.weights_of(model)
    wanted = {name: tensor.to(dtype) for name, tensor in changed(model).items()}
    models.apply_weights(model, wanted)
    assert all(torch.equal(live[name], wanted[name].float()) for name in live)
    assert torch.equal(model.lm_head.weight, live["model.embed_tokens.weight"])  # tied


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_has_names_of_save_pretrained(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    names = models.weights_of(model).keys()
    assert load_file(tmp_path / "model.safetensors").keys() == names
    assert ("lm_head.weight" in names) is not tied


def test_folder_weights_are_those_of_all_files(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights, expected = models.folder_weights(tmp_path), models.weights_of(model)
    assert weights.keys() == expected.keys() and len(weights) == len(expected)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


NORM = "model.norm.weight"  # the last tensor, so that those before it would have been copied
BROKEN: dict[str, dict[str, Any]] = {
    "missing": {NORM: None},
    "unknown name": {"model.extra.weight": torch.ones(16)},
    "renamed": {NORM: None, "model.norm.bias": torch.ones(16)},
    "wrong shape": {NORM: torch.ones(17)},
    "same size, other shape": {NORM: torch.ones(4, 4)},
    "broadcastable": {NORM: torch.ones(1)},
    "integers": {NORM: torch.ones(16, dtype=torch.int64)},
}


@pytest.mark.parametrize("how", list(BROKEN))
def test_invalid_weights_change_no_tensor(model: Any, how: str) -> None:
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"model\."):
        models.apply_weights(model, changed(model, **BROKEN[how]))
    assert unchanged(model, before)


# Folders.


@pytest.mark.parametrize("name", ["embedded", "embedded_turns"])
def test_embedded_model_is_small_and_loads(name: str) -> None:
    folder = models.model_folder(name)
    assert folder in (models.EMBEDDED, models.EMBEDDED_TURNS)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 5_000_000
    model = models.load_model(folder, device=CPU, dtype=torch.float32)
    assert model.config.model_type == "qwen3" and not model.training
    assert len(models.load_tokenizer(folder)) <= model.config.vocab_size


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c/d", "~nobody/models", "bad name!"])
def test_model_folder_rejects_invalid_names(name: str) -> None:
    with pytest.raises(ConfigError, match="is neither a folder nor"):
        models.model_folder(name)


def written(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**TINY, **settings}), "utf-8")
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        models.load_model(folder, device=CPU, dtype=torch.float32)
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text
    return text


WITHOUT_WEIGHTS = json.dumps(TINY)


@pytest.mark.parametrize(
    "text", ["not json", "{}", "[]", '{"model_type": "nonesuch"}', WITHOUT_WEIGHTS]
)
def test_load_model_rejects_invalid_config_or_no_weights(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, "utf-8")
    assert "cannot be loaded" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, -10])
def test_load_model_rejects_truncated_weights(tmp_path: Path, model: Any, keep: int) -> None:
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "cannot be loaded" in refused(tmp_path)


def layers(number: int) -> dict[str, Any]:
    return {"num_hidden_layers": number, "layer_types": ["full_attention"] * number}


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "fewer layers": (layers(1), "its config has no tensor 'model.layers.1.input_la"),
    "more layers": (layers(3), "tensor model.layers.2.input_layernorm.weight is mi"),
    "llama": ({"model_type": "llama"}, "no tensor 'model.layers.0.self_attn.k_norm.weight'"),
    "other sizes": ({"hidden_size": 32}, r"shape \[64, 16\], and its config \[64, 32\]"),
    "layer types": (
        {"layer_types": ["full_attention"]},
        r"`num_hidden_layers` \(2\) must be equal",
    ),
    "package": ({"attn_implementation": "flash_attention_2"}, "FlashAttention2"),
    "quantized": (
        {"quantization_config": {"quant_method": "gptq"}},
        "quantized format gptq, which",
    ),
    "not a language model": ({"model_type": "vit"}, "no causal language model for model_type 'vi"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_config_of_another_model_than_the_weights_is_refused(
    tmp_path: Path, model: Any, change: str
) -> None:
    settings, message = CHANGES[change]
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    assert re.search(message, refused(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "[]", "1", '{"dtype": []}', '{"head_dim": 0}', '{"num_attention_heads": 0}',
        '{"vocab_size": 0}', '{"pad_token_id": 1180591620717411303424}',
        '{"num_nextn_predict_layers": 1e999}',
        '{"architectures": "\\ud800"}', '{"x": "' + "x" * (4 << 20) + '"}',
        *('{"x":' * depth + "1" + "}" * depth for depth in (500, 5_000)),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_config_that_raises_anything_is_refused(tmp_path: Path, model: Any, text: str) -> None:
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    if text.startswith("{") and not text.startswith('{"x"'):
        text = json.dumps({**json.loads(path.read_text()), **json.loads(text)})
    path.write_text(text)
    with suppress(ConfigError):  # some of these values are no fault of a config
        models.published_config(tmp_path)
    assert "cannot be loaded" in refused(tmp_path)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("can't start new thread"), "limit of threads"),
        (FileNotFoundError("No such file or directory: model.safetensors"), "Too many open files"),
    ],
)
def test_limit_of_the_machine_is_not_called_a_broken_folder(
    open_file_limits: tuple[int, int], error: Exception, reason: str
) -> None:
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, open_file_limits[1]))
    with (
        pytest.raises(OutageError, match=f"cannot be loaded now: .*{reason}"),
        models.model_loading_errors("model folder /model cannot be loaded"),
    ):
        raise error


def test_damaged_config_is_not_reported_as_a_damaged_tokenizer(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models.EMBEDDED / name, tmp_path / name)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"has a damaged config\.json: "):
        models.load_tokenizer(tmp_path)


def test_weights_in_bin_files_are_refused_with_a_conversion(tmp_path: Path, model: Any) -> None:
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    code = refused(tmp_path).partition('python -c "')[2].removesuffix('"')
    exec(code, {})
    assert unchanged(models.load_model(tmp_path, device=CPU, dtype=torch.float32), snapshot(model))


@pytest.mark.parametrize("name", ["model.gguf", ""])
def test_gguf_weights_are_refused(tmp_path: Path, name: str) -> None:
    (written(tmp_path) / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"has quantized GGUF weights, .* give the Hugging Face"):
        models.model_folder(str(tmp_path / name))


def test_empty_folder_names_the_license_as_a_cause(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json; .*gated model, accept its license"):
        models.model_folder(str(tmp_path))


def test_tensors_of_other_parts_are_permitted(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path)
    extra = {
        "score.weight": torch.ones(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    weights = {**models.weights_of(model), **extra}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    models.load_model(tmp_path, device=CPU, dtype=torch.float32)


def test_name_of_an_unexpected_tensor_is_printed_escaped(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path)
    weights = {**models.weights_of(model), "model.\x1b]0;owned\x07": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code = """
import sys
from pathlib import Path
import torch
from peralta_zmq.config.programs import run_plain_program

def main(arguments):
    from peralta_zmq.models import load_model
    load_model(Path(arguments[0]), device=torch.device("cpu"), dtype=torch.float32)

run_plain_program(main, "bin/x")
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert r"model.\x1b]0;owned\x07" in result.stderr and "\x07" not in result.stderr


def test_class_of_transformers_is_used_instead_of_untrusted_code(
    tmp_path: Path, model: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model.save_pretrained(tmp_path)
    for name, content in files_with_code("qwen3").items():
        (tmp_path / name).write_bytes(content)
    loaded = models.load_model(tmp_path, device=CPU, dtype=torch.float32)
    assert type(loaded) is type(model) and "code of the model" not in capfd.readouterr().out


def test_untrusted_code_is_refused_without_a_prompt(
    tmp_path: Path,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model.save_pretrained(tmp_path)
    for name, content in files_with_code("mine").items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sys, "stdin", answer := io.StringIO("y\n"))
    text = refused(tmp_path)
    assert "has custom Python code (auto_map in config.json)" in text
    assert "set model.trust_remote_code on every machine to run it" in text
    assert answer.tell() == 0 and "code of the model folder runs" not in capfd.readouterr().out


def test_untrusted_tokenizer_code_is_refused(tmp_path: Path) -> None:
    shutil.copytree(models.EMBEDDED, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    auto_map = {"AutoTokenizer": ["mine.MineTokenizer", None]}
    path.write_text(json.dumps({**settings, "auto_map": auto_map}), "utf-8")
    with pytest.raises(ConfigError, match=r"custom Python code \(auto_map in tokenizer_config"):
        models.load_tokenizer(tmp_path)


def test_load_tokenizer_rejects_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        models.load_tokenizer(written(tmp_path))


def test_load_tokenizer_names_the_packages_for_sentencepiece(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "tokenizer.model").write_bytes(b"not a tokenizer")
    with pytest.raises(ConfigError, match="sentencepiece and protobuf"):
        models.load_tokenizer(folder)


def test_load_tokenizer_rejects_missing_chat_template(tmp_path: Path) -> None:
    for file in models.EMBEDDED.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    with pytest.raises(ConfigError, match="chat template"):
        models.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "is a LoRA adapter; .*merged/ of a run"),
        ("manifest.json", "has only the changes of a step; .*bin/replay export"),
    ],
)
def test_published_change_is_refused_as_a_model(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        models.model_folder(str(tmp_path))


def test_exported_adapter_stands_for_the_merged_model_beside_it(tmp_path: Path) -> None:
    for name, file in (("adapter", "adapter_config.json"), ("merged", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    assert models.model_folder(str(tmp_path / "adapter")) == tmp_path / "merged"


def test_missing_peft_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora\.rank needs peft .*pip install .*\[lora\]"):
        lora.add_adapters(tiny_model(), rank=2, alpha=4)


def test_saved_weights_are_divided_into_files_and_read_again(tmp_path: Path) -> None:
    weights = {f"w{number}": torch.full((10,), float(number)) for number in range(7)}  # 40 bytes
    models.save_weights(weights, tmp_path, shard_bytes=100)
    assert len(list(tmp_path.iterdir())) == 3
    read = models.folder_weights(tmp_path)
    assert {name: read[name].tolist() for name in read} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }


def test_fp8_weights_are_converted(tmp_path: Path) -> None:
    """Blocks of 128 by 128 weights with a scale, as in Qwen3-FP8 and DeepSeek-V3."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    original = tiny_model(**sizes, num_attention_heads=4, num_key_value_heads=4)
    original.save_pretrained(tmp_path)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in models.weights_of(original).items():
        tensors[name] = weight.bfloat16().contiguous()
        if name.endswith("proj.weight"):
            rows, columns = (size // 128 for size in weight.shape)
            blocks = weight.view(rows, 128, columns, 128)
            scales = blocks.abs().amax((1, 3)) / 448  # the largest number of float8_e4m3fn
            packed = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors |= {name: packed.view(weight.shape), f"{name}_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {**quantized, "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = models.load_model(tmp_path, device=CPU, dtype=torch.float32)
    weights = models.weights_of(loaded)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    for name, weight in models.weights_of(original).items():
        # A number with 3 bits of mantissa is off by at most 1/16.
        assert torch.allclose(weights[name], weight, rtol=0.07, atol=1e-3), name
