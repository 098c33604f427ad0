"""Comparisons with float64, because results in float32 differ between processors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LARGEST_LOGIT = 16.0  # size of the larger logits of models in tests
Result = TypeVar("Result")


class Float64(TorchFunctionMode):
    """Leaves tensors in float64 that a model would convert to float32.

    transformers computes norms, softmax and rotary embeddings in float32, also in a float64 model.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)


def _widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def exact_result(compute: Callable[[Any], Result], model: Any) -> Result:
    """`compute(model)` with a copy of the model, in float64."""
    with Float64():
        return compute(copy.deepcopy(model).double())


def assert_as_exact(ours: Tensor, compute: Callable[[Any], Tensor], model: Any) -> None:
    """Our result is as exact as `compute(model)`, in which only operators of torch compute."""
    assert is_as_exact_as_torch(ours, compute(model), exact_result(compute, model))


def is_as_exact_as_torch(
    ours: Tensor, reference: Tensor, exact: Tensor, *, largest_value: float = 0.0
) -> bool:
    """True if our largest error is at most four times that of `reference`, or four rounding steps.

    `reference` comes from torch's operators. Both errors are measured against float64, because
    float32 results differ between processors (here 2.8e-6 from torch and 1.5e-6 from us in the
    worst case). The rounding steps are those of the largest value, for cases that torch computes
    exactly. `largest_value` is that of earlier results if they are larger: the logprob of a
    probable token is near 0, but its error is that of the logits.
    """

    def largest(values: Tensor) -> float:
        return float(values.detach().abs().max())

    assert ours.shape == reference.shape == exact.shape
    errors = {"ours": largest(ours.double() - exact), "torch": largest(reference.double() - exact)}
    rounding = torch.finfo(ours.dtype).eps * max(largest(exact), largest_value)
    print(errors, rounding)  # pytest shows it if the test fails
    return errors["ours"] <= 4 * max(errors["torch"], rounding)
