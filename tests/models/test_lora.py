"""LoRA: only adapters are trained and published; generators merge them. Needs the extra `lora`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_data import completed
from exactness import LARGEST_LOGIT, Float64, is_as_exact_as_torch
from families import FAMILIES, random_model
from generators import apply_until
from model_layouts import text_model
from peak_memory import PeakMemory
from real_programs import ran
from safetensors.torch import load_file
from sample_data import group_of, token_logprobs
from transformers import AutoModelForCausalLM

from peralta_zmq import build, models
from peralta_zmq.build import components, make_engine
from peralta_zmq.config import Config, load_config
from peralta_zmq.engines.choice import live_engine
from peralta_zmq.errors import ConfigError
from peralta_zmq.generator.weight_sync import apply_newest
from peralta_zmq.learning.advantages import advantages_of, group_mean
from peralta_zmq.learning.packing import Packing, make_micro_batches, pack_groups
from peralta_zmq.learning.reference_models import reference_logprobs
from peralta_zmq.models import lora
from peralta_zmq.models.frozen_base import load_frozen_base
from peralta_zmq.models.frozen_layers import unpacked_weights
from peralta_zmq.observe.metrics import read_rows
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import Request, RolloutGroup, Sampling, rollout_of
from peralta_zmq.trainer import trained_model
from peralta_zmq.weights.store import Version, WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber
from tools.link_proxy import free_ports

EXACT = ("--model.dtype=float32", "--train.dtype=float32", "--weights.dtype=float32")
TARGETS = "q_proj,v_proj,down_proj"


@pytest.fixture
def needs_peft() -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")


pytestmark = pytest.mark.usefixtures("needs_peft")


def config_of(*arguments: str) -> Config:
    return load_config("bin/trainer", ["--train.batch-size=8", "--lora.rank=4", *EXACT, *arguments])


def trained(*arguments: str, seed: int = 0) -> tuple[Config, Any]:
    """The embedded model with adapters, loaded like in a trainer."""
    config = config_of(*arguments, f"--run.seed={seed}", "--train.learning-rate=0.01")
    return config, build.load_policy(config, models.EMBEDDED)


def tokenizer() -> models.Tokenizer:
    return models.load_tokenizer(models.EMBEDDED)


def some_groups(step: int, rewards: tuple[float, ...] = (1, 0, 0, 1)) -> list[RolloutGroup]:
    return [group_of(rewards, seed=10 * step + number) for number in range(2)]


def published(config: Config, model: Any, store: WeightStore, step: int) -> Version:
    companions, fields = trained_model.version_files(config, models.EMBEDDED, model, tokenizer())
    weights = lora.published_weights(model)
    return store.publish(step, weights, companions=companions, about=fields)


def start_generator(
    store: WeightStore, subscriber: WeightSubscriber, *arguments: str
) -> tuple[Config, Any, Version, Any]:
    """A trainer's config and model, and a generator's version and engine with its adapters."""
    config, model = trained(*arguments)
    published(config, model, store, 0)
    staged = subscriber.poll(timeout=20)
    assert staged is not None
    engine, _ = make_engine(config, staged)
    subscriber.accept()
    return config, model, staged.version, engine


def sampled(engine: Any) -> RolloutGroup:
    """A group sampled by the engine."""
    prompt = np.array([5, 9, 33], np.int32)
    sampling = Sampling(seed=1, min_tokens=9, max_completion_length=12)
    completions = list(completed(engine, [Request(each, prompt, sampling) for each in range(4)]))
    rollouts = tuple(rollout_of(each, float(each.index % 2)) for each in completions)
    return dataclasses.replace(group_of([1, 0]), rollouts=rollouts)


def merged_model(model: Any, dtype: torch.dtype) -> Any:
    """The embedded model in transformers, with the adapters merged as they are published."""
    plain = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=dtype)
    base, adapter = (
        {name: each.to(dtype) for name, each in weights.items()}
        for weights in (unpacked_weights(model), lora.published_weights(model))
    )
    with Float64():
        models.apply_weights(plain, lora.merged_weights(base, adapter))
    return plain


@torch.no_grad()
def are_exact(ours: torch.Tensor, compute: Callable[[Any], torch.Tensor], model: Any) -> bool:
    """Whether `ours` and `compute(model)` are as exact as with the merged weights."""
    plain = compute(merged_model(model, torch.float32))
    with Float64():
        exact = compute(merged_model(model, torch.float64))
    return all(
        is_as_exact_as_torch(each, plain, exact, largest_value=LARGEST_LOGIT)
        for each in (compute(model), ours)
    )


def are_exact_logits(ours: torch.Tensor, model: Any, ids: torch.Tensor) -> bool:
    return are_exact(ours, lambda model: model(ids).logits, model)


def has_exact_logprobs(group: RolloutGroup, model: Any) -> bool:
    """Whether the logprobs of a group, and those of the trainer's model, are exact."""
    mask = np.concatenate([rollout.loss_mask for rollout in group.rollouts])
    ours = np.concatenate([rollout.logprobs for rollout in group.rollouts])[mask]

    def logprobs(model: Any) -> torch.Tensor:
        ids = (torch.from_numpy(each.token_ids.astype(np.int64)) for each in group.rollouts)
        return torch.cat([token_logprobs(model, each[None])[0] for each in ids])[mask]

    return are_exact(torch.from_numpy(ours), logprobs, model)


def test_only_adapters_are_trained_and_checkpointed() -> None:
    config, model = trained("--lora.target-modules", TARGETS)
    before = {name: each.clone() for name, each in unpacked_weights(model).items()}
    learner = build.make_learner(config, model)
    learner.learn(some_groups(1))
    state = learner.state()
    kinds = {path.split("/")[0] for path in state}
    assert kinds == {"model", "adamw", "rng", "skipped"}
    assert all(".lora_" in path for path in state if path.startswith(("model/", "adamw/")))
    layers = model.config.num_hidden_layers
    assert len([path for path in state if path.startswith("model/")]) == layers * 3 * 2
    assert all(".lora_" in n for n, each in model.named_parameters() if each.grad is not None)
    after = unpacked_weights(model)
    assert all(torch.equal(after[name], each) for name, each in before.items())
    assert any(bool(each.any()) for name, each in lora.published_weights(model).items()
               if name.endswith(lora.B))  # fmt: skip


def test_reference_and_teacher_are_the_packed_base_without_adapters() -> None:
    """They hold copies of the adapters alone."""
    losses = ("--loss.name=dapo", "--loss.beta=0.1", "--loss.teacher-tau=1")
    config, model = trained("--lora.base-dtype=nf4", *losses)
    base = load_frozen_base(models.EMBEDDED, "nf4", device=torch.device("cpu"))
    policy_scorer, base_scorer = (components.make_scorer(config, each) for each in (model, base))
    adapters = lora.trained_parameters(model).values()
    with PeakMemory() as memory:
        copies = components.make_reference_models(config, model, policy_scorer)
    assert memory.peak == 2 * sum(each.nbytes for each in adapters)
    with torch.no_grad():
        for each in adapters:
            each.add_(0.05)
    groups, packing = some_groups(1), Packing(max_tokens=1000)
    samples, _ = pack_groups(groups, advantages_of(groups, group_mean), packing)
    batches = make_micro_batches(samples, packing)
    (moved,) = reference_logprobs(policy_scorer, batches)
    (expected,) = reference_logprobs(base_scorer, batches)
    assert float((moved - expected).abs().max()) > 0.01
    for copy in copies:
        assert copy is not None and torch.equal(copy(batches)[0], expected)
    assert torch.equal(reference_logprobs(policy_scorer, batches)[0], moved)


@pytest.mark.parametrize(
    ("engine", "base_dtype"),
    [("native", "bfloat16"), ("native", "nf4"), ("hf", "float32"), ("hf", "int8")],
)
def test_generator_merges_versions_and_matches_trainer(
    engine: str, base_dtype: str, store: WeightStore, subscriber: WeightSubscriber
) -> None:
    arguments = ("--lora.alpha=7", "--engine.name", engine, "--lora.base-dtype", base_dtype)
    config, model, version, sampler = start_generator(store, subscriber, *arguments)
    learner = build.make_learner(config, model)
    for step in (1, 2, 3):
        group = sampled(sampler)
        assert has_exact_logprobs(group, model)
        learner.learn([group])
        published(config, model, store, step)
        assert not has_exact_logprobs(group, model)  # the step moved the policy
        version = apply_until(sampler, subscriber, version, step)


@pytest.mark.parametrize(("engine", "base_dtype"), [("native", "nf4"), ("hf", "bfloat16")])
def test_engine_over_live_model_uses_its_adapters(engine: str, base_dtype: str) -> None:
    config, model = trained("--lora.base-dtype", base_dtype)
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    settings = EngineSettings(slots=4)
    before = sampled(live_engine(engine).open_live(model, tokenizer, settings))
    build.make_learner(config, model).learn(some_groups(1))
    group = sampled(live_engine(engine).open_live(model, tokenizer, settings))
    assert has_exact_logprobs(group, model)
    assert not np.array_equal(group.rollouts[0].logprobs, before.rollouts[0].logprobs)


def test_merged_version_leaves_no_trace_in_the_next(
    store: WeightStore, subscriber: WeightSubscriber
) -> None:
    config, model, version, sampler = start_generator(store, subscriber)
    first = {name: each.clone() for name, each in lora.published_weights(model).items()}
    before = sampled(sampler)
    build.make_learner(config, model).learn(some_groups(1))
    published(config, model, store, 1)
    version = apply_until(sampler, subscriber, version, 1)
    assert not np.array_equal(sampled(sampler).rollouts[0].logprobs, before.rollouts[0].logprobs)
    sampler.apply(WeightUpdate(2, first, is_adapter=True, base_dtype=config.lora.base_dtype))
    again = sampled(sampler)
    for one, other in zip(before.rollouts, again.rollouts, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.logprobs, other.logprobs)


def test_versions_hold_adapters_and_base_identity(store: WeightStore) -> None:
    config, model = trained()
    version = published(config, model, store, 0)
    assert set(version.manifest.files) == {"model.safetensors", "adapter_config.json"}
    assert version.kind == "keyframe"
    assert version.field("adapts_name") == "embedded"
    assert version.field("adapts") == lora.weights_digest(models.EMBEDDED)
    numbers = sum(each.numel() for each in lora.published_weights(model).values())
    whole = sum(each.numel() for each in unpacked_weights(model).values())
    assert 4 * numbers < version.size < 4 * numbers + 20_000
    assert version.size < 4 * whole / 10


def test_generator_start_rejects_adapter_of_another_base(
    store: WeightStore, subscriber: WeightSubscriber, tmp_path: Path
) -> None:
    config, model = trained()
    published(config, model, store, 0)
    other = tmp_path / "other"
    elsewhere = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.bfloat16)
    cast(Any, elsewhere).model.norm.weight.data[0] += 1
    elsewhere.save_pretrained(other)
    staged = subscriber.poll(timeout=20)
    assert staged is not None
    words = r"version 0 is an adapter for embedded \([0-9a-f]{16}\), but model\.name \S*other is an"
    with pytest.raises(ConfigError, match=words):
        make_engine(config_of("--model.name", str(other)), staged)


def test_running_generator_rejects_adapter_of_another_base(
    store: WeightStore, subscriber: WeightSubscriber
) -> None:
    _, model, version, sampler = start_generator(store, subscriber)
    before = sampled(sampler)
    weights = lora.published_weights(model)
    store.publish(1, weights, companions={}, about={"adapts": "0" * 16, "adapts_name": "x"})
    assert subscriber.poll(timeout=20) is not None
    assert apply_newest(sampler, subscriber, version) is version
    assert sampler.step == 0
    assert np.array_equal(sampled(sampler).rollouts[0].logprobs, before.rollouts[0].logprobs)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"adapts_dtype": "bfloat16", "adapts_packed": None},
            "its base model is stored as bfloat16, and the one in use as nf4; restart the",
        ),
        (
            {"adapts_packed": "0" * 16},
            "its base model packed as nf4 has the digest 0000000000000000, but here ",
        ),
    ],
)
def test_adapter_of_a_base_with_other_values_is_rejected(
    fields: dict[str, str | None],
    reason: str,
    store: WeightStore,
    subscriber: WeightSubscriber,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, model, version, sampler = start_generator(store, subscriber, "--lora.base-dtype=nf4")
    before = sampled(sampler)
    _, about = trained_model.version_files(config, models.EMBEDDED, model, tokenizer())
    changed = {name: value for name, value in {**about, **fields}.items() if value is not None}
    store.publish(1, lora.published_weights(model), companions={}, about=changed)
    assert subscriber.poll(timeout=20) is not None
    assert apply_newest(sampler, subscriber, version) is version
    assert reason in caplog.text
    assert np.array_equal(sampled(sampler).rollouts[0].logprobs, before.rollouts[0].logprobs)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adapts_packed": "0" * 16}, "version 0 cannot be used: its base model packed as nf4 has"),
        ({"adapts_dtype": "int2"}, "stored as int2, but this program has only float32, bfloat16,"),
    ],
)
def test_generator_start_rejects_a_base_with_other_values(
    fields: dict[str, str], words: str, store: WeightStore, subscriber: WeightSubscriber
) -> None:
    config, model = trained("--lora.base-dtype=nf4")
    _, about = trained_model.version_files(config, models.EMBEDDED, model, tokenizer())
    weights = lora.published_weights(model)
    store.publish(0, weights, companions={}, about={**about, **fields})
    staged = subscriber.poll(timeout=20)
    assert staged is not None
    with pytest.raises(ConfigError, match=words):
        make_engine(config, staged)


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_adapter_of_wrong_shape_changes_nothing(
    damage: str, store: WeightStore, subscriber: WeightSubscriber
) -> None:
    config, model, _, sampler = start_generator(store, subscriber)
    before = sampled(sampler)
    weights = {name: each.clone() for name, each in lora.published_weights(model).items()}
    last = list(weights)[-1]
    if damage == "missing":
        del weights[last]
    else:
        weights[last] = torch.ones(3, 4)
    with pytest.raises(ValueError, match="does not"):
        sampler.apply(WeightUpdate(1, weights, is_adapter=True, base_dtype=config.lora.base_dtype))
    assert sampler.step == 0
    assert np.array_equal(sampled(sampler).rollouts[0].logprobs, before.rollouts[0].logprobs)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft's own
def test_final_weights_load_in_transformers_and_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    config, model = trained("--lora.alpha=5", "--lora.target-modules", TARGETS)
    build.make_learner(config, model).learn(some_groups(1))
    ids = torch.arange(3, 20)[None]
    expected = model(ids).logits.detach()
    for _ in range(2):  # the same run may end twice
        merged = trained_model.export_adapter(config, tmp_path, models.EMBEDDED, model, tokenizer())
    cpu = torch.device("cpu")
    whole = models.load_model(merged, device=cpu, dtype=torch.float32)
    assert not lora.has_adapters(whole)
    assert are_exact_logits(whole(ids).logits, model, ids)
    assert models.load_tokenizer(merged).chat_template
    base: Any = models.load_model(models.EMBEDDED, device=cpu, dtype=torch.float32)
    assert not torch.allclose(base(ids).logits, expected, atol=1e-2)
    peft_model: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert are_exact_logits(peft_model(ids).logits, model, ids)


@pytest.mark.parametrize("base_dtype", ["bfloat16", "nf4"])
def test_merged_weights_stay_exact_when_loaded_without_a_dtype(
    tmp_path: Path, base_dtype: str
) -> None:
    shutil.copytree(models.EMBEDDED, base := tmp_path / "base")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "dtype": "bfloat16"}))
    config, model = trained(f"--lora.base-dtype={base_dtype}")
    build.make_learner(config, model).learn(some_groups(1))
    merged = trained_model.export_adapter(
        config, tmp_path, base, model, models.load_tokenizer(base)
    )
    ids = torch.arange(3, 20)[None]
    assert are_exact_logits(AutoModelForCausalLM.from_pretrained(merged)(ids).logits, model, ids)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "nemotron_h", "gpt_neox"])
def test_adapters_of_all_linear_layers_fit_the_published_weights(
    tmp_path: Path, model_type: str
) -> None:
    model = text_model(model_type)
    model.save_pretrained(tmp_path)
    base = models.folder_weights(tmp_path)
    lora.add_adapters(model, rank=2, alpha=4)
    adapter = lora.published_weights(model)
    merged = lora.merged_weights(base, adapter)  # raises an error for names of other tensors
    assert adapter and merged.keys() == base.keys()
    assert not any(".experts." in name or "lm_head" in name for name in adapter)


def test_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"GPT2LMHeadModel has no linear layer .*remove lora\.rank"
    ):
        lora.add_adapters(text_model("gpt2"), rank=2, alpha=4)


def test_missing_target_modules_error_lists_choices() -> None:
    for strange in ("nose", "embed_tokens", "lm_head", "v_proj,mlp"):
        last = strange.rpartition(",")[2]
        words = rf"target_modules has '{last}', which is no linear layer .*from down_proj, gate_pr"
        with pytest.raises(ConfigError, match=words):
            trained("--lora.target-modules", strange)


def test_adapters_are_seeded_without_global_rng() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    one, same, other = (trained(seed=each)[1] for each in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    first, second, third = (lora.published_weights(each) for each in (one, same, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_with_nf4_base_learns(tmp_path: Path) -> None:
    place = f"--run.dir={tmp_path}", f"--wire.port={free_ports()}"
    settings = "--lora.rank=16", "--lora.base-dtype=nf4", "--train.learning-rate=1e-3"
    ran("lan", "local", "@", "configs/demo.toml", *place, *settings)
    run = tmp_path / "demo"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["reward_last5"] > 0.9
    rows = read_rows(run / "metrics.jsonl")
    # The largest one depends on the age of the groups: a fast step moves the policy far.
    assert statistics.median(float(str(row["mismatch_kl"])) for row in rows) < 0.01
    ran("replay", "export", str(run), "80", str(tmp_path / "again"))
    assert_exported_as_merged(tmp_path / "again", run)


def assert_exported_as_merged(exported: Path, run: Path) -> None:
    """An export has the published adapter, whose factors are rounded; merged/ has that in fp32."""
    name = "model.safetensors"
    found, merged = load_file(exported / name), load_file(run / "merged" / name)
    adapter = load_file(run / "adapter" / lora.WEIGHTS_FILE)
    assert found.keys() == merged.keys()
    for name, weight in merged.items():
        stem = lora.PREFIX + name.removesuffix(".weight")
        bound = torch.zeros_like(weight)
        if stem + lora.A in adapter:
            # Rounding changes each factor by at most 2**-9 of itself, their product by 2**-8.
            bound = 2**-7 * (adapter[stem + lora.B].abs() @ adapter[stem + lora.A].abs()) + 1e-7
        assert ((found[name] - weight).abs() <= bound).all(), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_lora_run_of_both_programs_learns(tmp_path: Path) -> None:
    place = f"--run.dir={tmp_path}", f"--wire.port={free_ports()}"
    settings = "--lora.rank=16", "--train.learning-rate=1e-3", "--train.max-steps=30"
    ran("lan", "local", "@", "configs/demo.toml", *place, *settings)
    run = tmp_path / "demo"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["reward_last5"] > summary["reward_first"] + 0.3
    assert summary["eval_after"] > summary["eval_before"] + 0.3
    rows = read_rows(run / "metrics.jsonl")
    whole = (models.EMBEDDED / "model.safetensors").stat().st_size
    assert all(int(str(row["weights/bytes"])) < whole / 7 for row in rows if "weights/bytes" in row)
    assert max(float(str(row["mismatch_kl"])) for row in rows) < 0.01
    ran("replay", "export", str(run), "30", str(tmp_path / "again"))
    assert_exported_as_merged(tmp_path / "again", run)
    name = "tokenizer.json"
    assert (tmp_path / "again" / name).read_bytes() == (run / "merged" / name).read_bytes()
    assert "as published" in ran("replay", str(run), "--from", "21")


def test_all_linear_leaves_out_layers_that_peft_refuses() -> None:
    model = random_model(FAMILIES["Falcon-H1"])
    lora.add_adapters(model, rank=2, alpha=2)
    layers = {name.split(".")[-4] for name in lora.trained_parameters(model)}
    assert {"in_proj", "o_proj", "q_proj"} <= layers and "out_proj" not in layers


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
def test_experts_that_peft_finds_by_name_get_no_adapters() -> None:
    """DeepSeek-V3 has dense layers with the names of the experts' matrices."""
    model = random_model(FAMILIES["DeepSeek-V3"])
    lora.add_adapters(model, rank=2, alpha=2)
    assert not any(".mlp." in name for name in lora.published_weights(model))
    model = random_model(FAMILIES["DeepSeek-V3"])
    with pytest.raises(ConfigError, match=r"adapter to model\.layers\.1\.mlp\.experts, which"):
        lora.add_adapters(model, rank=2, alpha=2, target_modules=["gate_proj", "up_proj"])


def test_not_finite_adapter_is_rejected(store: WeightStore, subscriber: WeightSubscriber) -> None:
    config, model, *_ = start_generator(store, subscriber)
    adapter = next(each for each in model.parameters() if each.requires_grad)
    adapter.data.div_(0)
    published(config, model, store, 1)
    assert subscriber.poll(timeout=0.5) is None
    adapter.data.fill_(0.01)
    published(config, model, store, 2)
    staged = subscriber.poll(timeout=20)
    assert staged is not None and staged.version.number == 2
