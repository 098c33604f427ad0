"""A GPU (CUDA or MPS) computes what the CPU computes. Run with `make test-gpu`.

`PERALTA_TEST_DEVICE=cpu make test-gpu` runs most of the tests without a GPU, to test the tests.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import (
    across_weights,
    assert_exact_logprobs,
    sharp_model,
    switched_greedy,
    tokens,
)
from exactness import Float64, is_as_exact_as_torch
from sample_data import packed, siblings, step_gradient, tiny_model
from weight_sets import COMPANIONS, reports_of, same

from peralta_zmq import models
from peralta_zmq.engines.native import decoder
from peralta_zmq.engines.native.native_engine import native_engine
from peralta_zmq.learning.losses import preset
from peralta_zmq.learning.optimizer import make_optimizer
from peralta_zmq.learning.packing import MicroBatch, Packing, make_micro_batches
from peralta_zmq.learning.update import update_parameters
from peralta_zmq.models import base_formats, tree_attention
from peralta_zmq.models.base_formats import PACKED_FORMATS
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Completion, Sampling
from peralta_zmq.weights.publisher import VersionWriter, WeightPublisher
from peralta_zmq.weights.replica import load_version
from peralta_zmq.weights.store import WEIGHTS_FILE, WeightStore
from peralta_zmq.weights.tensor_set import FileTensors

GPU = os.environ.get("PERALTA_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "mps")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        GPU == "mps" and not torch.backends.mps.is_available(), reason="no CUDA or MPS device"
    ),
]
needs_cuda = pytest.mark.skipif(GPU != "cuda", reason="no CUDA device")
SMALL = {"head_dim": 8}  # settings of sharp_model


def generated(device: str) -> list[Completion]:
    """Greedy completions in three rows with a shared prefix, while weights are updated."""
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    engine = native_engine(
        sharp_model(**SMALL).to(device), tokenizer, EngineSettings(slots=3, max_model_len=100)
    )
    sampling = Sampling(temperature=0.0, min_tokens=70, max_completion_length=70)
    return across_weights(engine, lambda step: sharp_model(seed=step, **SMALL), sampling)


@pytest.mark.parametrize("base_dtype", PACKED_FORMATS)
def test_gpu_unpacks_a_base_to_the_bits_of_the_cpu(
    base_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_formats, "CHUNK_BLOCKS_OFF_CPU", 100)
    random = torch.Generator().manual_seed(0)
    scales = torch.randint(-126, 120, (300, 1), generator=random)
    packed = base_formats.pack(torch.randn(300, 200, generator=random) * 2.0**scales, base_dtype)
    on_gpu = replace(packed, codes=packed.codes.to(GPU), scales=packed.scales.to(GPU))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(on_gpu.unpack(dtype).cpu(), packed.unpack(dtype))
    assert on_gpu.checksum() == packed.checksum()


def test_graph_decoding_is_as_exact_as_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = generated(GPU)  # as a graph on CUDA only
    monkeypatch.setattr(decoder, "capture_for", lambda device: None)
    expected = generated("cpu")
    scores = [
        switched_greedy(each, [30 * step for step in each.policy_steps.tolist()], **SMALL)[1]
        for each in expected
    ]
    for completions in (recorded, generated(GPU)):
        assert tokens(completions) == tokens(expected)
        assert_exact_logprobs(completions, np.concatenate(scores, 1))


@needs_cuda
def test_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted_replay(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted_replay)
    generated(GPU)
    assert len(replays) > 150


def batches(device: str) -> list[MicroBatch]:
    groups = [siblings([1.0, 0.0, 0.0], lengths=[4, 7, 9], seed=seed) for seed in range(2)]
    samples, _ = packed(groups, max_tokens=1000)
    return make_micro_batches(samples, Packing(max_tokens=1000), device=torch.device(device))


def trained(device: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of three steps over two groups, and the weights after them, in float64."""
    model = tiny_model().double().to(device)
    optimizer = make_optimizer(dict(model.named_parameters()), lr=1e-3)
    with Float64():
        results = [
            update_parameters(
                optimizer, batches(device),
                compute_logprobs=Scorer(model), loss=preset("reinforce"), max_grad_norm=1.0,
            )
            for _ in range(3)
        ]  # fmt: skip
    return [each.metrics for each in results], {
        name: each.cpu() for name, each in models.weights_of(model).items()
    }


@pytest.mark.skipif(GPU == "mps", reason="MPS has no float64")
def test_training_steps_match_the_cpu() -> None:
    """In float64: AdamW can turn a rounding error of a gradient near 0 into a whole step."""
    metrics, weights = trained(GPU)
    expected_metrics, expected = trained("cpu")
    for one, other in zip(metrics, expected_metrics, strict=True):
        for name in ("loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-6, abs=1e-9)
    for name, each in expected.items():
        torch.testing.assert_close(weights[name], each, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32"),
        pytest.param(torch.bfloat16, id="bf16", marks=needs_cuda),
    ],
)
@pytest.mark.parametrize(
    "whole_tree", [tree_attention.WHOLE_TREE, 0], ids=["whole_trees", "by_span"]
)
def test_gradient_is_as_exact_as_on_the_cpu(
    dtype: torch.dtype, whole_tree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "WHOLE_TREE", whole_tree)

    def gradient(model: Any) -> torch.Tensor:
        device, scorer = model.device.type, Scorer(model, dtype=dtype)
        found, _ = step_gradient(
            model, batches(device), preset("reinforce"), compute_logprobs=scorer
        )
        return found.cpu()

    with Float64():
        exact, _ = step_gradient(tiny_model().double(), batches("cpu"), preset("reinforce"))
    ours, on_cpu = (gradient(tiny_model().to(device)) for device in (GPU, "cpu"))
    assert is_as_exact_as_torch(ours, on_cpu, exact)


def test_published_weights_precede_the_next_step(tmp_path: Path) -> None:
    """The tensors are so large that copies are in progress when the weights change."""
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run-1")
    weights = {f"w{number}": torch.randn(1 << 22, device=GPU) for number in range(8)}
    writer = VersionWriter(store, companions=COMPANIONS)
    with closing(WeightPublisher(writer)) as publisher:
        for step in range(4):
            expected = {name: each.to("cpu", torch.bfloat16) for name, each in weights.items()}
            publisher.publish(step, weights)
            for each in weights.values():
                each.mul_(1.001)
            (report,) = reports_of(publisher)
            assert report.version is not None
            with load_version(store, report.version) as folder:
                assert same(FileTensors(folder / WEIGHTS_FILE), expected)
        assert writer._base
        assert all(each.is_pinned() == (GPU == "cuda") for each in writer._base[1].values())


@pytest.mark.skipif(GPU == "cpu", reason="torch does not limit the memory of a CPU")
def test_memory_of_a_gpu_is_counted_and_limited() -> None:
    device = models.choose_device(GPU)
    total = models.total_bytes(device)
    assert 0 < models.free_bytes(device) <= total
    before = models.free_bytes(device, fraction=0.5)
    kept = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    assert 0 <= before - models.free_bytes(device, fraction=0.5) <= 2 * kept.numel()
    assert before <= total / 2
    models.limit_memory(device, 0.1)
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(int(0.2 * total), dtype=torch.uint8, device=device)
        assert models.is_out_of_memory(caught.value)
    finally:
        models.limit_memory(device, 1.0)
