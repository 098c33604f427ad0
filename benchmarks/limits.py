"""What the machine allows: bytes read and products computed in a second, measured when asked."""

from __future__ import annotations

import torch

from benchmarks.harness import seconds


def bandwidth(device: torch.device) -> float:
    """Bytes per second that are read from the device's memory, the best of five."""
    numbers = torch.ones(2**27 if device.type == "cpu" else 2**29, device=device)  # 512 MiB, 2 GiB
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(5))


def flops(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a large matrix product, the best of five."""
    size = 2048 if device.type == "cpu" else 8192
    one, other = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: one @ other) for _ in range(5))
