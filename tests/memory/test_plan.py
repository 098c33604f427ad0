"""Parts of a plan, compared with the tensors that they count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import load
from engine_data import save_model
from sample_data import TINY, packed, siblings
from transformers import AutoConfig

from peralta_zmq import build, models
from peralta_zmq.engines.native.kv_cache import KVCache, cache_shape
from peralta_zmq.engines.native.prefix_cache import PROMPT_ROWS
from peralta_zmq.learning.packing import Packing, make_micro_batches
from peralta_zmq.memory import (
    GIB,
    Machine,
    ModelShape,
    moves_snapshots,
    plan_generator,
    plan_trainer,
    read_shape,
)
from peralta_zmq.memory.plan import layer_bytes
from peralta_zmq.models.head import KEPT_BYTES
from peralta_zmq.models.scorer import Scorer
from tools.base_model import new_model

NUM_PARAMETERS = 596_049_920  # of Qwen3-0.6B
MACHINE = Machine("cpu", 16 * 2**30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("completion", [40, 160])  # trees of 192 and 672 tokens
@pytest.mark.parametrize("options", [(), ("--lora.rank=8",)])
def test_layer_saves_the_planned_bytes(
    dtype: str, completion: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    """The tensors that autograd saves, as the difference between three layers and two.

    Within the tolerance of a whole plan: the formula leaves out masks and copies of keys.
    """
    config = load("--model.device=cpu", f"--model.name={tmp_path}", *options)
    settings = {**TINY, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 32, "intermediate_size": 160,
                "max_position_embeddings": 1024}  # fmt: skip
    machine = Machine("cpu", 1, training_dtype=dtype)
    group = siblings([0.0, 1.0, 0.0, 1.0], num_prompt=32, lengths=[completion] * 4)
    (batch,) = make_micro_batches(packed([group], max_tokens=1000)[0], Packing(max_tokens=1000))
    saved = list[int]()
    for num_layers in (2, 3):
        model = new_model({**settings, "num_hidden_layers": num_layers}, seed=0)
        save_model(model.to(torch.bfloat16), tmp_path)
        policy = build.load_policy(config, tmp_path)
        saved.append(_saved_bytes(policy, batch, models.DTYPES[dtype]))
    num_tokens = len(batch.token_ids)
    keys = num_tokens if completion == 40 else 32 + completion
    planned = num_tokens * layer_bytes(read_shape(tmp_path), machine, keys)
    assert planned == pytest.approx(saved[1] - saved[0], rel=0.15)


def _saved_bytes(model: Any, batch: Any, dtype: torch.dtype) -> int:
    """Bytes of the distinct tensors that a forward pass saves, without the parameters."""
    scorer = Scorer(model, dtype=dtype)
    storages: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor  # keeps it, so that no address repeats
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scorer(batch.token_ids, batch.trees, batch.scored)
    weights = *model.parameters(), *model.buffers()
    own = {each.untyped_storage()._cdata for each in weights}
    return sum(t.untyped_storage().nbytes() for key, t in storages.items() if key not in own)


def test_parts_follow_the_settings(qwen: ModelShape) -> None:
    plan = plan_trainer(load(), qwen, MACHINE)
    assert plan.parts["weights"] == 4 * NUM_PARAMETERS
    assert plan.parts["optimizer state (adamw)"] == 8 * NUM_PARAMETERS
    small = plan_trainer(load("--train.optim=adamw_8bit"), qwen, MACHINE)
    assert small.parts["optimizer state (adamw_8bit)"] == 2.03125 * NUM_PARAMETERS
    adapters = plan_trainer(load("--lora.rank=8"), qwen, MACHINE)
    assert adapters.parts["optimizer state (adamw)"] < 0.02 * 8 * NUM_PARAMETERS
    with_reference = plan_trainer(load(), qwen, MACHINE, num_references=1)
    assert with_reference.parts["reference model"] == 4 * NUM_PARAMETERS


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16", "int8", "nf4"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_planned_weights_are_those_of_the_policy(
    base_dtype: str, is_tied: bool, tmp_path: Path
) -> None:
    settings = {**TINY, "tie_word_embeddings": is_tied}
    save_model(new_model(settings, seed=0).to(torch.bfloat16), tmp_path)
    config = load("--model.device=cpu", "--lora.rank=4", f"--lora.base-dtype={base_dtype}")
    policy: Any = build.load_policy(config, tmp_path)
    weights = [
        *policy.parameters(),
        *(each for name, each in policy.named_buffers() if "inv_freq" not in name),
    ]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in weights}
    plan = plan_trainer(config, read_shape(tmp_path), MACHINE)
    assert plan.parts["weights"] == sum(each.nbytes() for each in storages.values())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--train.gradient-checkpointing",),
        ("--train.max-tokens-per-microbatch=1024",),
        ("--train.optim=adamw_bf16",),
        ("--train.optim=adamw_8bit",),
        ("--lora.rank=16",),
        ("--lora.rank=16", "--lora.base-dtype=nf4"),
        ("--engine.max-model-len=256", "--sampling.max-completion-length=64"),
    ],
)
def test_setting_lowers_the_peak_of_the_trainer(
    arguments: tuple[str, ...], qwen: ModelShape
) -> None:
    large = (
        "--sampling.max-completion-length=256", "--engine.max-model-len=1024", "--engine.slots=8",
    )  # fmt: skip
    machine = replace(MACHINE, memory=64 * GIB)  # in all cases with published weights in memory
    before = plan_trainer(load(*large), qwen, machine)
    assert plan_trainer(load(*large, *arguments), qwen, machine).peak < before.peak


def test_gradient_of_the_embedding_is_added_to_that_of_a_tied_head(qwen: ModelShape) -> None:
    settings = (
        "--train.max-tokens-per-microbatch=64", "--sampling.max-completion-length=32",
        "--engine.max-model-len=64", "--engine.slots=1",
    )  # fmt: skip
    card, wide = Machine("cuda", 24 * GIB), replace(qwen, hidden_size=2560)
    plan = plan_trainer(load(*settings), wide, card)
    assert plan.phase == "backward pass of the embedding"
    assert plan.parts["added gradient of the embedding"] == 4 * wide.embedding
    assert plan_trainer(load(*settings), wide, MACHINE).phase != plan.phase
    assert plan_trainer(load(*settings, "--lora.rank=8"), wide, card).phase != plan.phase


def test_generator_converts_new_weights_of_another_dtype(qwen: ModelShape) -> None:
    settings = ("--engine.slots=1", "--engine.max-model-len=64", "--model.dtype=float32")
    plan = plan_generator(load(*settings), qwen, MACHINE)
    assert plan.parts["logits and prompts"] == 4 * qwen.embedding
    same = plan_generator(load(*settings, "--weights.dtype=float32"), qwen, MACHINE)
    assert same.peak < plan.peak


def test_entropy_keeps_logits_also_of_a_frozen_head(qwen: ModelShape) -> None:
    settings = ("--lora.rank=8", "--engine.slots=1", "--engine.max-model-len=64")
    without = plan_trainer(load(*settings), qwen, MACHINE).parts["output head"]
    parts = plan_trainer(load(*settings, "--loss.entropy-coef=0.01"), qwen, MACHINE).parts
    assert parts["output head"] == without + KEPT_BYTES


def test_planned_cache_is_that_of_the_native_engine(tmp_path: Path) -> None:
    config = load("--engine.slots=5", "--engine.max-model-len=96")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    cache = KVCache(
        **cache_shape(AutoConfig.for_model(**TINY)),
        num_rows=5 + PROMPT_ROWS,
        capacity=96,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    plan = plan_generator(config, read_shape(tmp_path), MACHINE)
    assert plan.parts["KV cache of 5 slots"] == cache._memory.nbytes


def test_vllm_reserves_its_fraction_of_a_card(qwen: ModelShape) -> None:
    card = Machine("cuda", 24 * 2**30, engine="vllm")
    plan = plan_generator(load(), qwen, card)
    assert plan.fits and plan.peak == pytest.approx(0.9 * card.memory)
    assert plan_generator(load("--engine.gpu-memory-utilization=0.5"), qwen, card).peak < plan.peak
    assert not plan_generator(load(), qwen, replace(card, memory=2**30)).fits


def test_copies_of_the_weights_are_moved_where_memory_is_short(qwen: ModelShape) -> None:
    """18 bytes per parameter, and two copies of 2 bytes: 12.2 GiB for Qwen3-0.6B."""
    plenty, short = Machine("cpu", 25 * GIB), Machine("cpu", 24 * GIB)
    assert not moves_snapshots(load(), qwen, plenty)
    assert plan_trainer(load(), qwen, plenty).parts["published weights"] == 2 * NUM_PARAMETERS
    assert moves_snapshots(load(), qwen, short)
    assert "published weights" not in plan_trainer(load(), qwen, short).parts
    assert moves_snapshots(load("--train.memory-fraction=0.9"), qwen, plenty)
    assert not moves_snapshots(load("--lora.rank=8"), qwen, short)
    assert not moves_snapshots(load(), qwen, Machine("cuda", 24 * GIB))
