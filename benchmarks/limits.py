"""Limits of the machine: memory bandwidth and matrix throughput, measured on call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.harness import seconds


def bandwidth_meter(num_bytes: int, device: torch.device) -> Callable[[], float]:
    """A function that measures the bytes per second that all threads of torch read from memory.

    It takes the best of five sums over one fp32 array: a sum writes nothing and is limited by the
    memory, not by the adders. The array is as large as the model and at least 512 MiB (2 GiB on a
    GPU), so that caches do not matter. On Linux it is in huge pages (requested by
    `peralta_zmq.models`); reading small pages was up to 8% slower.
    """
    num_bytes = max(num_bytes, 2**29 if device.type == "cpu" else 2**31)
    numbers = torch.ones(num_bytes // 4, device=device)
    return lambda: numbers.nbytes / min(seconds(numbers.sum) for _ in range(5))


def flops(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations per second of a large matmul, the best of five."""
    size = 2048 if device.type == "cpu" else 8192
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: one @ other) for _ in range(5))
