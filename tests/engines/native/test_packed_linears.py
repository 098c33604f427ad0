"""Packed linear layers against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import is_as_exact_as_torch
from peak_memory import PeakMemory
from sample_data import TINY
from torch.nn.functional import linear

from peralta_zmq import models
from peralta_zmq.engines.native.kernels.gemm import PanelWeight, can_pack, panel_kernel
from peralta_zmq.engines.native.packed_linears import FusedLinear, ModelWeights, PackedLinear
from tools.base_model import new_model

NAMES = ["wide", "narrow"]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: Any) -> torch.dtype:
    if not can_pack(request.param):
        pytest.skip("this build of torch cannot pack this dtype")
    return request.param


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_packed_linears_are_as_exact_as_plain_ones(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linears = [torch.nn.Linear(48, size).to(dtype) for size in (64, 16)]
    fused = FusedLinear(linears, NAMES, [f"{name}_bias" for name in NAMES])
    packed = [PackedLinear(fused, index) for index in (0, 1)]

    def compare() -> None:
        inputs = torch.randn(num_rows, 3, 48).to(dtype)
        for ours, torchs in zip(packed, linears, strict=True):
            exact = linear(inputs.double(), torchs.weight.double(), torchs.bias.double())
            assert is_as_exact_as_torch(ours(inputs), torchs(inputs), exact)

    with torch.inference_mode():
        compare()
        compare()  # other inputs, the same layers
        for plain in linears:
            plain.weight.mul_(2)
            plain.bias.mul_(2)
        weights = {name: plain.weight for name, plain in zip(NAMES, linears, strict=True)}
        biases = {f"{name}_bias": plain.bias for name, plain in zip(NAMES, linears, strict=True)}
        fused.load({**weights, **biases})
        compare()


def test_packed_bias_is_a_copy(dtype: torch.dtype) -> None:
    """The source may be a mapped file, which changes before the next version is applied."""
    plain, inputs = torch.nn.Linear(48, 16).to(dtype), torch.randn(3, 48).to(dtype)
    fused = FusedLinear([plain], ["weight"], ["bias"])
    weights = {"weight": plain.weight.detach() * 2, "bias": plain.bias.detach() * 2}
    fused.load(weights)
    with torch.inference_mode():
        before = fused.output(0, inputs)
        weights["bias"].zero_()
        assert torch.equal(fused.output(0, inputs), before)


def test_new_weights_are_loaded_into_the_same_memory(dtype: torch.dtype) -> None:
    """CompiledLayers keeps the addresses."""
    plain = torch.nn.Linear(48, 16).to(dtype)
    fused = FusedLinear([plain], ["weight"], ["bias"])
    if not isinstance(fused.packed, PanelWeight):
        pytest.skip("no panels for this dtype on this machine")
    assert fused.bias is not None
    before = fused.packed.data_ptr(), fused.bias.data_ptr()
    fused.load({"weight": plain.weight.detach() * 2, "bias": plain.bias.detach() * 2})
    assert (fused.packed.data_ptr(), fused.bias.data_ptr()) == before


def test_packing_frees_each_plain_weight() -> None:
    if not can_pack(torch.float32) or panel_kernel(torch.float32) is None:
        pytest.skip("no panels on this machine")
    with PeakMemory() as memory:
        model = new_model({**TINY, "num_hidden_layers": 12}, seed=0)
        size = sum(tensor.nbytes for tensor in models.weights_of(model).values())
        assert memory.peak < 1.2 * size
        ModelWeights(model, pack=True)
    assert memory.peak < 1.5 * size  # an output head and two layers more, not all weights twice
