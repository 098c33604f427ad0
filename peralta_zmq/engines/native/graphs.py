"""CUDA graphs of decode steps: one launch instead of hundreds of small kernels.

A graph reads and writes the memory that it was captured with, so it is dropped when tensors move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Replay: TypeAlias = Callable[[], None]
Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]
Work: TypeAlias = Callable[[Tensor], Tensor]


class _Graph(NamedTuple):
    inputs: Tensor  # filled before a replay
    result: Tensor  # valid until the next replay
    replay: Replay


class GraphCache:
    """Captured graphs by key, for the current memory layout."""

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self._capture, self._device = capture, device
        self._layout: Hashable = None
        self._graphs: dict[Hashable, _Graph | None] = {}

    def run(self, work: Work, inputs: Tensor, *, key: Hashable, layout: Hashable) -> Tensor:
        """Return `work(inputs)`; the result is valid until the next run.

        Work with the same key must do the same operations on tensors of equal shapes and must not
        read a number back to the host. The second run captures the work, which executes it twice.
        """
        if layout != self._layout:
            self._layout, self._graphs = layout, {}
        if key not in self._graphs:
            self._graphs[key] = None
            return work(inputs.to(self._device))
        graph = self._graphs[key]
        if graph is None:
            static = inputs.to(self._device)
            graph = self._graphs[key] = _Graph(static, *self._capture(partial(work, static)))
        graph.inputs.copy_(inputs)
        graph.replay()
        return graph.result


def capture_for(device: torch.device) -> Capture | None:
    """The capture function of a device; None if the device has no graphs.

    All graphs use one stream and one memory pool: no result is read after the next replay.
    """
    if device.type != "cuda":
        return None
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # libraries initialize here, which a capture forbids
            work()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay

    return capture
