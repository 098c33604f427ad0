"""Whether keys and values fit in memory, asked before they are allocated.

Counts nothing else: the model lies there already, packing takes one product more at a time (and
keeps a tied head twice), and a step's logits are small beside them.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from peralta_zmq import models
from peralta_zmq.engines.native.decoder import cache_shape
from peralta_zmq.errors import ConfigError

GIB = 2**30


def check_room(model: models.Model, *, slots: int, extra_rows: int, capacity: int) -> None:
    """Raise ConfigError when keys and values of all rows would not fit in the free memory."""
    row = capacity * 2 * math.prod(cache_shape(model.config).values()) * model.dtype.itemsize
    needed, free = row * (slots + extra_rows), free_bytes(model.device)
    if free is not None and needed > free:
        fitting = int(free // row) - extra_rows
        remedy = f"use engine.slots {fitting}" if fitting > 0 else "use less"
        raise ConfigError(
            f"engine.slots {slots} of engine.max_model_len {capacity} tokens need "
            f"{needed / GIB:.1f} GiB for keys and values, {free / GIB:.1f} GiB are free on "
            f"{model.device}; {remedy}, or a smaller engine.max_model_len"
        )


def free_bytes(device: torch.device) -> int | None:
    """Memory that this process may still take; None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    known = [each for each in (_of_machine(), _of_cgroup()) if each is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    file = Path("/proc/meminfo")
    if not file.exists():
        return None
    numbers = dict(line.split(":") for line in file.read_text("ascii").splitlines())
    return int(numbers["MemAvailable"].split()[0]) * 1024


def _of_cgroup() -> int | None:
    folder = Path("/sys/fs/cgroup")
    limit = folder / "memory.max"
    if not limit.exists() or limit.read_text("ascii").strip() == "max":
        return None
    used = int((folder / "memory.current").read_text("ascii"))
    stat = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
    return int(limit.read_text("ascii")) - used + int(stat["inactive_file"])
