"""Frozen base models: values, gradients of adapters, memory, errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_as_exact, exact_result, is_as_exact_as_torch
from peak_memory import PeakMemory
from safetensors.torch import load_file, save_file
from sample_data import VOCAB_SIZE, tiny_model
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.engines.engine_models import merger_of_files
from peralta_zmq.errors import ConfigError
from peralta_zmq.models import lora
from peralta_zmq.models.base_formats import BLOCK, BYTES_PER_WEIGHT, CHUNK_BLOCKS
from peralta_zmq.models.frozen_base import load_base_weights, load_frozen_base
from peralta_zmq.models.frozen_layers import (
    FrozenLinear,
    packed_digest,
    unpacked_weights,
)
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.rollout import PrefixTree, TreeSpan

CPU = torch.device("cpu")
FORMATS = ("bfloat16", "int8", "nf4")
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}
ROW = (PrefixTree((TreeSpan(-1, 6), TreeSpan(5, 9), TreeSpan(5, 9))),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "base")


def saved(folder: Path, **settings: Any) -> Path:
    """A folder with a random model in float32, which bfloat16 rounds."""
    tiny_model(**{**WIDE, **settings}).save_pretrained(folder)
    return folder


def with_adapters(model: Any) -> Any:
    """The model with adapters that change its outputs."""
    lora.add_adapters(model, rank=4, alpha=8, seed=1)
    random = torch.Generator().manual_seed(2)
    for parameter in lora.trained_parameters(model).values():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.05
    return model


def unpacked_model(folder: Path, base_dtype: str) -> Any:
    """A plain model in float32 with the values of the base in this format."""
    model = models.load_model(folder, device=CPU, dtype=torch.float32)
    models.apply_weights(model, load_base_weights(folder, base_dtype, device=CPU).tensors)
    return model


def gradients(model: Any, *, checkpointing: bool = False, **options: Any) -> dict[str, Tensor]:
    """Gradients of the adapters."""
    scorer = Scorer(model, gradient_checkpointing=checkpointing, **options)
    tokens = torch.randint(3, VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(-1, 1, 18)
    (scorer(tokens, ROW, torch.arange(6, 24)) * weights).sum().backward()
    return {
        name: each.grad
        for name, each in lora.trained_parameters(model).items()
        if each.grad is not None
    }


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in gradients.values()])


@pytest.mark.parametrize("base_dtype", FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_frozen_base_computes_with_the_unpacked_values(
    base_dtype: str, tied: bool, tmp_path: Path
) -> None:
    folder = saved(tmp_path, tie_word_embeddings=tied, attention_bias=True)
    base = load_frozen_base(folder, base_dtype, device=CPU)
    plain, ids = unpacked_model(folder, base_dtype), torch.arange(3, 40)[None]
    assert base.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in base.parameters())
    assert_as_exact(base(ids).logits, lambda model: model(ids).logits, plain)
    weights, expected = unpacked_weights(with_adapters(base)), models.weights_of(plain)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name].float(), each) for name, each in expected.items())
    original = models.load_model(folder, device=CPU, dtype=torch.float32)
    assert not torch.allclose(original(ids).logits, plain(ids).logits, atol=1e-5)


@pytest.mark.parametrize("base_dtype", FORMATS)
def test_adapter_gradients_are_as_exact_as_of_the_unpacked_model(
    base_dtype: str, folder: Path
) -> None:
    def plain() -> Any:
        return with_adapters(unpacked_model(folder, base_dtype))

    def frozen() -> Any:
        return with_adapters(load_frozen_base(folder, base_dtype, device=CPU))

    expected, ours = gradients(plain()), gradients(frozen())
    assert ours.keys() == expected.keys()
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    exact = exact_result(lambda model: flat(gradients(model)), plain())
    again = gradients(frozen(), checkpointing=True)
    assert is_as_exact_as_torch(flat(ours), flat(expected), exact)
    assert is_as_exact_as_torch(flat(again), flat(expected), exact)
    narrow, torchs = (gradients(each, dtype=torch.bfloat16) for each in (frozen(), plain()))
    assert is_as_exact_as_torch(flat(narrow), flat(torchs), exact)


def test_no_unpacked_weight_is_kept_for_the_backward_pass(folder: Path) -> None:
    model = with_adapters(load_frozen_base(folder, "nf4", device=CPU))
    kept = list[tuple[int, ...]]()

    def record(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        gradients(model)
    layers = [each for each in model.modules() if isinstance(each, FrozenLinear)]
    shapes = {(each.out_features, each.in_features) for each in layers[:-1]}  # the last is the head
    shapes |= {shape[::-1] for shape in shapes}
    assert kept and shapes.isdisjoint(kept)


def test_loading_needs_memory_for_one_matrix_above_the_packed_size(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 2048}
    original = tiny_model(**{**WIDE, **shape})
    original.save_pretrained(tmp_path, max_shard_size="1KB")  # a file is mapped as a whole
    whole = sum(each.numel() for each in original.parameters())
    largest = 4 * 256 * 2048  # bytes of a matrix in the file
    with PeakMemory() as memory:
        model = load_frozen_base(tmp_path, "nf4", device=CPU)
    packed = sum(each.nbytes for each in (*model.buffers(), *model.parameters()))
    assert packed < whole * (BYTES_PER_WEIGHT["nf4"] + 0.05)
    # One matrix as in the file and in bfloat16, and a chunk of blocks.
    assert memory.peak - packed < 1.5 * largest + 12 * 4 * BLOCK * CHUNK_BLOCKS


def test_model_that_cannot_be_packed_is_refused(tmp_path: Path, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights["model.layers.0.mlp.wide_proj.weight"] = weights.pop(name)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    words = (
        r"base_dtype nf4 packs .*: model\.layers\.0\.mlp\.up_proj\.weight is only in the model; use"
    )
    with pytest.raises(ConfigError, match=words):
        load_frozen_base(folder, "nf4", device=CPU)
    weights[name] = weights["model.layers.0.mlp.wide_proj.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"wide_proj\.weight is only in the files; use"):
        load_frozen_base(folder, "nf4", device=CPU)
    del weights["model.layers.0.mlp.wide_proj.weight"]
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight is missing"):
        load_frozen_base(folder, "nf4", device=CPU)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"it has no model\*\.safetensors"):
        load_frozen_base(folder, "nf4", device=CPU)


def test_files_with_computed_frequencies_are_packed(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    names = load_base_weights(folder, "nf4", device=CPU).tensors.keys()
    assert names == unpacked_weights(load_frozen_base(folder, "nf4", device=CPU)).keys()


@pytest.mark.parametrize("base_dtype", FORMATS)
def test_parameters_that_transformers_keeps_in_float32_are_rounded(
    base_dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 2**-12
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model: Any = models.load_model(folder, device=CPU, dtype=torch.float32)
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", ["norm"])
    kept: Any = models.load_model(folder, device=CPU, dtype=torch.bfloat16)
    assert kept.model.norm.weight.dtype == torch.float32
    merger = merger_of_files(folder, torch.float32, trust_remote_code=False)
    with_adapters(base := load_frozen_base(folder, base_dtype, device=CPU))
    found = merger.weights_of(
        WeightUpdate(
            1,
            lora.published_weights(base),
            is_adapter=True,
            base_dtype=base_dtype,
            base_digest=packed_digest(base),
        )
    )
    sampled = load_base_weights(folder, base_dtype, device=CPU).tensors["model.norm.weight"]
    trained = unpacked_weights(base)["model.norm.weight"]
    assert torch.equal(trained, sampled.float())
    assert torch.equal(trained, found["model.norm.weight"].float())
    assert not torch.equal(trained, weights["model.norm.weight"])


@pytest.mark.parametrize("base_dtype", FORMATS)
def test_scaled_embedding_of_gemma_is_stored_in_bfloat16(base_dtype: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, model_type="gemma3_text", hidden_size=64)  # scaled by 8
    base: Any = load_frozen_base(folder, base_dtype, device=CPU)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    assert embedding.weight is head.weight and head.weight.dtype == torch.bfloat16
    plain, ids = unpacked_model(folder, base_dtype), torch.arange(3, 40)[None]
    assert_as_exact(base(ids).logits, lambda model: model(ids).logits, plain)
    names = unpacked_weights(base).keys()
    assert names == models.weights_of(plain).keys()


def test_teacher_stays_in_bfloat16_if_its_files_are(tmp_path: Path) -> None:
    policy = models.load_model(models.EMBEDDED, device=CPU, dtype=torch.float32)
    shutil.copytree(models.EMBEDDED, tmp_path, dirs_exist_ok=True)
    policy.save_pretrained(tmp_path)
    ids = torch.arange(3, 40)[None]
    for folder, dtype in (("embedded", torch.bfloat16), (str(tmp_path), torch.float32)):
        teacher: Any = models.load_teacher(folder, policy=policy, policy_name="embedded")
        assert teacher.model.layers[0].mlp.up_proj.weight.dtype == dtype
        assert not any(parameter.requires_grad for parameter in teacher.parameters())
        assert_as_exact(teacher(ids).logits, lambda model: model(ids).logits, policy)
