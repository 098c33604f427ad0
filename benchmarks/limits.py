"""What the machine allows: bytes read and products computed in a second, measured when asked."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.harness import seconds


def reader(num_bytes: int, device: torch.device) -> Callable[[], float]:
    """What measures the bytes per second that all of torch's threads read from the memory: the
    best of five sums over one array, kept between calls.

    A sum of fp32 is the fastest reader that torch has: it writes nothing, and two threads wait for
    the memory, not for their adders. The array is as large as the model, and no smaller than
    512 MiB (2 GiB on a GPU), so that no cache holds a part worth the name. On Linux it lies in
    huge pages, which `policy` asks torch for; small ones were read up to 8% slower.
    """
    num_bytes = max(num_bytes, 2**29 if device.type == "cpu" else 2**31)
    numbers = torch.ones(num_bytes // 4, device=device)
    return lambda: numbers.nbytes / min(seconds(numbers.sum) for _ in range(5))


def flops(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a large matrix product, the best of five."""
    size = 2048 if device.type == "cpu" else 8192
    one, other = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: one @ other) for _ in range(5))
