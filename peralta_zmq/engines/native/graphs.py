"""CUDA graphs of decode steps: one launch instead of hundreds of small kernels.

Capturing records the kernels of a forward pass; a replay launches all of them again. A graph reads
and writes the memory addresses that it was captured with, so it is dropped when tensors move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Replay: TypeAlias = Callable[[], None]
Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]
Forward: TypeAlias = Callable[[Tensor], Tensor]


class _Graph(NamedTuple):
    inputs: Tensor  # filled before a replay
    result: Tensor  # valid until the next replay
    replay: Replay


class GraphCache:
    """Captured graphs of the current memory layout, by key."""

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self._capture, self._device = capture, device
        self._layout: Hashable = None
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: ran once, not captured yet

    def run(self, forward: Forward, inputs: Tensor, *, key: Hashable, layout: Hashable) -> Tensor:
        """Return `forward(inputs)`, from a graph if possible; valid until the next call.

        Functions with the same key must do the same operations on tensors of equal shapes, and must
        not read a number back to the host. The second call with a key captures its graph, for which
        `forward` runs twice. Graphs are dropped when `layout` changes.
        """
        if layout != self._layout:
            self._layout, self._graphs = layout, {}
        if key not in self._graphs:
            self._graphs[key] = None
            return forward(inputs.to(self._device))
        graph = self._graphs[key]
        if graph is None:
            static = inputs.to(self._device)
            graph = self._graphs[key] = _Graph(static, *self._capture(partial(forward, static)))
        graph.inputs.copy_(inputs)
        graph.replay()
        return graph.result


def capture_for(device: torch.device) -> Capture | None:
    """The capture function of a device; None if the device does not support graphs.

    All graphs share one stream and one memory pool, because no result is read after the next
    replay.
    """
    if device.type != "cuda":
        return None
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(forward: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # a first run, as libraries cannot initialize in a capture
            forward()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = forward()
        return result, graph.replay

    return capture
