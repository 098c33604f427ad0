"""Captured decode steps, with torch's operations in place of GPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from engine_data import across_weights, engine_on
from sample_data import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peralta_zmq import models
from peralta_zmq.rollout import Sampling

CPU = torch.device("cpu")
READS_BACK = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class StepRecorder(TorchDispatchMode):
    """Records operations with their tensors, as a CUDA graph does, and replays them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS_BACK, f"{func} makes the host wait, which a graph cannot"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(result), again, strict=True):
                if old.data_ptr() != new.data_ptr():  # no view, not in place
                    old.copy_(new)


class CountingCapture:
    """A capture function that counts captures and replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Any]:
        self.captures += 1
        with StepRecorder() as recorder:
            result = work()
        assert recorder.calls

        def replay() -> None:
            self.replays += 1
            recorder.replay()

        return result, replay


def generated(capture: Any = None) -> dict[int, tuple[list[int], list[float], list[int]]]:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    sizes = {"slots": 3, "max_model_len": 100}
    engine = engine_on(tiny_model(), tokenizer, **sizes, live=True, capture=capture)
    sampling = Sampling(min_tokens=70, max_completion_length=70)
    return {
        each.index: (each.token_ids.tolist(), each.logprobs.tolist(), each.policy_steps.tolist())
        for each in across_weights(engine, lambda seed: tiny_model(seed=seed), sampling)
    }


def test_captured_steps_give_identical_completions() -> None:
    plain, capture = generated(), CountingCapture()
    assert generated(capture) == plain
    longest = max(len(tokens) for tokens, _, _ in plain.values())
    assert longest == 62  # wider than the first rows, which have 32 columns
    assert max(step for _, _, steps in plain.values() for step in steps) > 5
    assert capture.captures > 5  # at least one for each new layout of the shared part
    assert capture.replays > 150
