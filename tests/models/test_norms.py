"""RMS norm against float64 and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import is_as_exact_as_torch
from sample_data import tiny_model
from torch import Tensor

from peralta_zmq.models.norms import replace_norms, rms_norm
from peralta_zmq.models.scoring import Scorer

EPSILON = 1e-3


def by_operations(rows: Tensor, weight: Tensor) -> Tensor:
    """The operations of transformers; in float64 the reference."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight * normalized.to(rows.dtype)


def results(function: Any, rows: Tensor, weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of rows and weight for a fixed gradient of the output."""
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    out = function(rows, weight)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(gradient.to(out.dtype))
    assert rows.grad is not None and weight.grad is not None
    return [out.detach(), rows.grad, weight.grad]


@pytest.mark.parametrize("shape", [(1, 50, 192), (2, 7, 4, 48)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_output_and_gradients_are_as_exact_as_transformers(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (3 * torch.randn(shape, generator=generator)).to(dtype)
    weight = torch.randn(shape[-1], generator=generator)
    exact = results(by_operations, rows.double(), weight.double())
    ours = results(lambda x, w: rms_norm(x, w, EPSILON), rows, weight)
    theirs = results(by_operations, rows, weight)
    for our, their, reference in zip(ours, theirs, exact, strict=True):
        assert our.dtype == their.dtype
        assert is_as_exact_as_torch(our, their, reference)


def test_scorer_replaces_the_norms_of_qwen3_but_not_of_gemma() -> None:
    model = tiny_model()
    Scorer(model)
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    assert norms and all(type(norm).forward is not norm.forward for norm in norms)
    assert replace_norms(tiny_model(model_type="gemma")) == 0
