"""Sizes of models, parts of memory plans, settings that make a plan fit, and checks of machines."""

from __future__ import annotations

import json
import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import load
from engine_data import save_model
from sample_data import TINY, packed, siblings
from transformers import AutoConfig, AutoModelForCausalLM

from peralta_zmq import build, models
from peralta_zmq.build.memory_plan import (
    Machine,
    Role,
    layer_bytes,
    plan_generator,
    plan_trainer,
)
from peralta_zmq.build.memory_remedies import changed
from peralta_zmq.build.model_shape import ModelShape, read_shape
from peralta_zmq.config import Config, write_resolved
from peralta_zmq.engines.loading import loading_errors
from peralta_zmq.engines.native.cache import KVCache, cache_shape
from peralta_zmq.engines.native.prefix_cache import PROMPT_ROWS
from peralta_zmq.errors import ConfigError, OutOfMemoryError
from peralta_zmq.learning.packing import Packing, make_micro_batches
from peralta_zmq.models.loading import model_loading_errors
from peralta_zmq.models.scoring import Scorer
from tools.base_model import new_model

# Qwen3-0.6B
QWEN = {**TINY, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151936, "max_position_embeddings": 40960}  # fmt: skip
NUM_PARAMETERS = 596_049_920  # of Qwen3-0.6B
MACHINE = Machine("cpu", 16 * 2**30)
LORA_FP32 = ("--lora.rank=8", "--lora.base-dtype=float32")


def shape_of(folder: Path, settings: dict[str, Any]) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(settings))
    return read_shape(folder)


@pytest.fixture
def qwen(tmp_path: Path) -> ModelShape:
    return shape_of(tmp_path, QWEN)


# Sizes of models.


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "phi3", "smollm3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_number_of_parameters_equals_that_of_the_model(
    family: str, is_tied: bool, tmp_path: Path
) -> None:
    settings = {**TINY, "model_type": family, "tie_word_embeddings": is_tied}
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(tmp_path, settings)
    assert shape.is_known and shape.num_parameters == model.num_parameters()


def test_size_of_a_named_model(qwen: ModelShape) -> None:
    assert qwen.num_parameters == NUM_PARAMETERS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"config\.json cannot be read \(.*\); copy the model again"),
        ("[]", r"config\.json cannot be read \(.*\); copy the model again"),
        ('{"model_type": "gpt2", "n_embd": 768}', "has no hidden_size, so the memory of .*'gpt2'"),
        ('{"model_type": "x", "hidden_size": -4}', "has no hidden_size, so the memory of .*'x'"),
    ],
)
def test_config_without_sizes_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_shape(tmp_path)


# Parts of a plan.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("completion", [40, 160])  # trees of 192 and 672 tokens
@pytest.mark.parametrize("options", [(), ("--lora.rank=8",), LORA_FP32])
def test_layer_saves_the_planned_bytes(
    dtype: str, completion: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    """The tensors that autograd saves, as the difference between three layers and two."""
    config = load("--model.device=cpu", f"--model.name={tmp_path}", *options)
    settings = {**TINY, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 32, "intermediate_size": 160,
                "max_position_embeddings": 1024}  # fmt: skip
    machine = Machine("cpu", 1, training_dtype=dtype)
    shape = shape_of(tmp_path, settings)
    group = siblings([0.0, 1.0, 0.0, 1.0], num_prompt=32, lengths=[completion] * 4)
    packing, saved = Packing(max_tokens=1000), list[int]()
    (batch,) = make_micro_batches(packed([group], max_tokens=1000)[0], packing)
    for num_layers in (2, 3):
        model = new_model({**settings, "num_hidden_layers": num_layers}, seed=0)
        save_model(model.to(torch.bfloat16), tmp_path)
        policy = build.load_policy(config, tmp_path)
        saved.append(_saved_bytes(policy, batch, models.DTYPES[dtype]))
    num_tokens = len(batch.token_ids)
    planned = num_tokens * layer_bytes(config, shape, machine, tree=num_tokens)
    assert planned == pytest.approx(saved[1] - saved[0], rel=0.03)


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
    before = plan_trainer(load(*large), qwen, MACHINE)
    assert plan_trainer(load(*large, *arguments), qwen, MACHINE).peak < before.peak


def test_planned_cache_is_that_of_the_native_engine(tmp_path: Path) -> None:
    config, shape = load("--engine.slots=5", "--engine.max-model-len=96"), shape_of(tmp_path, TINY)
    cache = KVCache(
        **cache_shape(AutoConfig.for_model(**TINY)),
        num_rows=5 + PROMPT_ROWS,
        capacity=96,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    plan = plan_generator(config, shape, MACHINE)
    assert plan.parts["KV cache of 5 slots"] == cache._memory.nbytes


def test_vllm_reserves_its_fraction_of_a_card(qwen: ModelShape) -> None:
    card = Machine("cuda", 24 * 2**30, engine="vllm")
    plan = plan_generator(load(), qwen, card)
    assert plan.fits and plan.peak == pytest.approx(0.9 * card.memory)
    assert plan_generator(load("--engine.gpu-memory-utilization=0.5"), qwen, card).peak < plan.peak
    assert not plan_generator(load(), qwen, replace(card, memory=2**30)).fits


# Settings that make a plan fit.


def test_remedies_are_tried_with_the_least_harm_first(qwen: ModelShape) -> None:
    config = load(
        "--sampling.max-completion-length=256", "--engine.max-model-len=1024", "--engine.slots=8"
    )

    def chosen(memory_gib: float) -> list[str]:
        planner = build.MemoryPlanner(qwen, Machine("cpu", memory_gib * 2**30))
        return planner.advise(config, "trainer").options.split(" --")

    assert chosen(40) == ["--train.max-tokens-per-microbatch 8192"]
    assert chosen(1) == [""]
    needed = [len(chosen(memory)) for memory in (40, 9, 8)]
    assert needed == sorted(needed)


@pytest.mark.parametrize("options", [(), ("--lora.rank=4",)])
def test_proposed_option_is_accepted_and_gives_the_planned_peak(
    options: tuple[str, ...], qwen: ModelShape
) -> None:
    settings = ("--engine.max-model-len=1024", *options)
    config, planner = load(*settings), build.MemoryPlanner(qwen, Machine("cpu", 2**30))
    for role in ("trainer", "generator"):
        attempts = planner.advise(config, role).attempts
        assert len({each.options for each in attempts}) >= 2
        for each in attempts:
            proposed = load(*settings, *each.options.split())
            assert proposed == changed(config, each.changes)
            assert planner.plan(proposed, role).peak == each.alone.peak


def test_vllm_on_a_used_card_is_proposed_a_smaller_fraction(qwen: ModelShape) -> None:
    config, card = load(), Machine("cuda", 24 * 2**30, engine="vllm")
    advice = build.MemoryPlanner(qwen, card).advise(config, "generator", limit=20 * 2**30)
    assert advice.options == "--engine.gpu-memory-utilization 0.8"


@pytest.mark.parametrize(
    ("role", "settings", "option"),
    [
        # bfloat16 rounds away most updates of the state with the default adam_beta2.
        ("trainer", (), "--train.optim adamw_bf16"),
        ("trainer", ("--sampling.max-completion-length=400",), "--engine.max-model-len 256"),
        ("generator", ("--sampling.max-completion-length=512",), "--engine.max-model-len 512"),
    ],
)
def test_useless_or_contradictory_option_is_not_proposed(
    role: Role, settings: tuple[str, ...], option: str, qwen: ModelShape
) -> None:
    config = load("--engine.max-model-len=1024", "--train.adam-beta2=0.999", *settings)
    machine = Machine("cpu", 2**30)
    planner = build.MemoryPlanner(qwen, machine)
    attempts = planner.advise(config, role).attempts
    assert option not in [each.options for each in attempts]
    peaks = [planner.plan(config, role).peak, *(each.combined.peak for each in attempts)]
    assert peaks == sorted(set(peaks), reverse=True)


# Checks of the machine.


def start(config: Config, folder: Path, settings: dict[str, Any], role: Any = "trainer") -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    build.check_start(config, role, folder)


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_start_warns_if_weights_alone_are_larger_than_the_memory(
    role: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(load("--model.device=cpu"), tmp_path, {**QWEN, "num_hidden_layers": 100_000}, role)
    (text,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert f"the {role} needs about " in text and " GiB of cpu are free; " in text
    assert "choose a smaller model.name or a machine with more memory" in text


def test_start_warns_once_if_the_plan_exceeds_the_fraction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load("--model.device=cpu", "--train.memory-fraction=0.000001")
    start(config, tmp_path, TINY)
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "the trainer needs about " in record.getMessage()
    assert "bin/doctor plan" in record.getMessage()
    caplog.clear()
    start(load("--model.device=cpu"), tmp_path, TINY)
    start(load("--model.device=cpu"), tmp_path, {"model_type": "gpt2"})  # cannot be planned
    assert caplog.records == []


def test_failed_allocation_names_the_setting_to_change(tmp_path: Path) -> None:
    config = load("--model.device=cpu", f"--run.dir={tmp_path}", "--run.name=small")

    def failure() -> str:
        with pytest.raises(OutOfMemoryError) as caught, build.memory_errors(config, "trainer"):
            torch.empty(1 << 60, dtype=torch.uint8)
        return str(caught.value)

    text = failure()
    assert "the trainer is out of memory (" in text and "can't allocate memory" in text
    assert "planned were " in text and "it needs " in text and "\n" not in text
    assert "--run.name" not in text  # a run that has not begun may change every setting
    write_resolved(config, config.run_folder)
    assert failure() == f"{text}; run small keeps its settings: choose another --run.name"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            OutOfMemoryError,
        ),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), OutOfMemoryError),
        (RuntimeError("[malloc] Unable to allocate 4096 bytes."), OutOfMemoryError),
        (
            RuntimeError("[metal::malloc] Attempting to allocate 9000000000 bytes which is ..."),
            OutOfMemoryError,
        ),
        (
            RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (...)"),
            OutOfMemoryError,
        ),
        (MemoryError(), OutOfMemoryError),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
        (ValueError("out of memory"), ValueError),
    ],
)
def test_errors_of_allocations_are_recognized(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind), build.memory_errors(load("--model.device=cpu"), "generator"):
        raise error


@pytest.mark.parametrize(
    "context",
    [model_loading_errors("model folder x cannot be loaded"), loading_errors(Path("x"))],
    ids=["trainer", "engine"],
)
def test_failed_allocation_while_loading_is_no_damaged_folder(
    context: AbstractContextManager[None],
) -> None:
    with (
        pytest.raises(OutOfMemoryError, match="the generator is out of memory"),
        build.memory_errors(load("--model.device=cpu"), "generator"),
        context,
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_fraction_limits_the_free_bytes_of_this_process() -> None:
    cpu = torch.device("cpu")
    assert models.free_bytes(cpu, fraction=1e-9) == 0 < models.free_bytes(cpu, fraction=1.0)
    assert models.free_bytes(cpu, fraction=1.0) <= models.total_bytes(cpu)
