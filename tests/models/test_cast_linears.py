"""Linear layers under autocast: exactness, and the tensors kept for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import is_as_exact_as_torch
from sample_data import tiny_model
from torch import Tensor, nn

from peralta_zmq.models.cast_linears import replace_linears
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.rollout import PrefixTree, TreeSpan

TREE = PrefixTree((TreeSpan(-1, 12),))


class Model(nn.Module):
    """A linear layer and a head."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(64, 96, bias=bias), nn.Linear(96, 8)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def results(model: Model, dtype: torch.dtype) -> list[Tensor]:
    """The output of the layer, and the gradients of its input and parameters."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 40, 64, generator=random).to(model.layer.weight.dtype).requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float64):
        out = model.layer(rows)
    out.backward(torch.randn(out.shape, generator=random).to(out.dtype))
    found = [out.detach(), rows.grad, *(each.grad for each in model.layer.parameters())]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_are_as_exact_as_torch(bias: bool) -> None:
    exact = results(Model(bias=bias).double(), torch.float64)
    theirs = results(Model(bias=bias), torch.bfloat16)
    model = Model(bias=bias)
    assert replace_linears(model) == 1
    ours = results(model, torch.bfloat16)
    assert len(ours) == 3 + bias
    for our, their, reference in zip(ours, theirs, exact, strict=True):
        assert our.dtype == their.dtype
        assert is_as_exact_as_torch(our, their, reference)


@pytest.mark.parametrize("frozen", ["weight", "rows"])
def test_only_tensors_that_gradients_need_are_kept(frozen: str) -> None:
    model, kept = Model(bias=True), list[tuple[int, ...]]()
    replace_linears(model)
    model.layer.weight.requires_grad_(frozen != "weight")
    rows = torch.randn(40, 64, requires_grad=frozen != "rows")

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out = model.layer(rows)
    out.sum().backward()
    assert kept == [(96, 64) if frozen == "weight" else (40, 64)]
    assert model.layer.bias.grad is not None
    assert (rows.grad is None) == (frozen == "rows")
    assert (model.layer.weight.grad is None) == (frozen == "weight")


def test_output_without_autocast_is_that_of_torch() -> None:
    model = Model(bias=True)
    rows = torch.randn(5, 64)
    expected = model.layer(rows)
    replace_linears(model)
    assert torch.equal(model.layer(rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_scorer_keeps_no_cast_weights(dtype: torch.dtype) -> None:
    model = tiny_model()
    scorer = Scorer(model, dtype=dtype)
    linears = [each for each in model.modules() if type(each) is nn.Linear]
    shapes = {each.weight.shape for each in linears} | {each.weight.t().shape for each in linears}
    kept = list[Tensor]()

    def keep(tensor: Tensor) -> Any:
        kept.append(tensor)
        return tensor

    tokens = torch.arange(3, 15)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scorer(tokens, [TREE], torch.arange(1, 12)).sum().backward()
    assert kept
    assert not [each for each in kept if each.dtype != torch.float32 and each.shape in shapes]
