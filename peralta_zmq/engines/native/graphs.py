"""CUDA graphs of decode steps: one launch instead of hundreds of small kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

Forward: TypeAlias = Callable[[Tensor], Tensor]
Replay: TypeAlias = Callable[[], None]
# Captures a function; returns its result tensor, which each replay fills, and the replay function.
Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]


class GraphCache:
    """Captured graphs by key, which read and write the addresses of one memory layout."""

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self._capture = capture
        self._device = device
        self._layout: Hashable = None
        # Inputs, result and replay function; None: first call done, no graph yet.
        self._graphs: dict[Hashable, tuple[Tensor, Tensor, Replay] | None] = {}

    def run(self, forward: Forward, inputs: Tensor, *, key: Hashable, layout: Hashable) -> Tensor:
        """Return `forward(inputs)`, from a graph if possible; valid until the next call.

        Functions with the same key must do the same operations on tensors of equal shapes, and read
        no number back to the host. The first call with a key runs `forward`, the second captures a
        graph. A new `layout` drops all graphs.
        """
        if layout != self._layout:
            self._layout = layout
            self._graphs = {}
        if key not in self._graphs:
            self._graphs[key] = None
            return forward(inputs.to(self._device))
        graph = self._graphs[key]
        if graph is None:
            static = inputs.to(self._device)  # the graph reads its inputs from this tensor
            graph = self._graphs[key] = (static, *self._capture(partial(forward, static)))
        static, result, replay = graph
        static.copy_(inputs)
        replay()
        return result


def capture_for(device: torch.device) -> Capture | None:
    """The capture function of a device; None if it does not support graphs."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    pool = torch.cuda.graph_pool_handle()  # for all graphs: a result is read before the next one

    def capture(forward: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            forward()  # not captured: CUDA libraries cannot initialize during a capture
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = forward()
        return result, graph.replay

    return capture
