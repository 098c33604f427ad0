"""A decode step recorded once and replayed: a GPU is asked once for hundreds of small kernels.

Knows tensors and work over them; knows nothing of models. A recording reads and writes the memory
that it saw, so it ends when that memory is laid out anew.
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


class _Recording(NamedTuple):
    given: Tensor  # is filled before a replay
    result: Tensor  # is valid until the next one
    replay: Replay


class Graphs:
    """Recordings of work that comes again with other numbers, a set for each layout of memory."""

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self._capture, self._device = capture, device
        self._layout: Hashable = None
        self._recordings: dict[Hashable, _Recording | None] = {}

    def run(self, work: Work, given: Tensor, *, kind: Hashable, layout: Hashable) -> Tensor:
        """What `work` makes of `given`, to be read before the next run.

        Work of one `kind` does the same operations on tensors of equal shapes, and asks for no
        number back; it may be done twice. It is recorded when it comes the second time.
        """
        if layout != self._layout:
            self._layout, self._recordings = layout, {}
        if kind not in self._recordings:
            self._recordings[kind] = None
            return work(given.to(self._device))
        recording = self._recordings[kind]
        if recording is None:
            recording = self._recordings[kind] = self._record(work, given.to(self._device))
        recording.given.copy_(given)
        recording.replay()
        return recording.result

    def _record(self, work: Work, given: Tensor) -> _Recording:
        return _Recording(given, *self._capture(partial(work, given)))


def capture_for(device: torch.device) -> Capture | None:
    """How work is recorded on this device; None where recording gains nothing."""
    return _cuda_capture(device) if device.type == "cuda" else None


def _cuda_capture(device: torch.device) -> Capture:
    """A stream and a pool of memory for all recordings: none is read once another one runs."""
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # libraries make ready what a capture forbids
            work()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay

    return capture
