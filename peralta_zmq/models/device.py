"""Device, dtype, threads and memory of the process that runs a model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch uses huge pages for large tensors

import psutil
import torch

from peralta_zmq.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIN_BF16_WIDTH = 128  # hidden size from which most CPUs train faster in bfloat16 (at 192: 2x)
# Files of a cgroup of version 2 and 1 with a limit and its usage, and a key in memory.stat.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# In the text of a RuntimeError of torch for an allocation on cuda, mps and cpu, and of MLX.
MEMORY_TEXTS = (
    *("out of memory", "can't allocate memory"),
    *("Unable to allocate", "[metal::malloc]", "Insufficient Memory"),
)


def worker_info(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    info = {
        "package": _version("peralta_zmq"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": str(torch.get_num_threads()),
    }
    # Receivers accept 128 characters.
    return {name: value.encode("ascii", "replace").decode()[:100] for name, value in info.items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def use_threads(num_workers: int = 1, *, num_cores: int | None = None) -> int:
    """Limit torch to 1 / num_workers of the available cores, or OMP_NUM_THREADS if that is less.

    More threads than cores make processes tenfold slower. Call before the first torch operation.
    """
    threads = max(1, (num_cores or available_cores()) // max(1, num_workers))
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    is_default = limit == "1" and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"  # torchrun's
    if limit.isdecimal() and int(limit) > 0 and not is_default:
        threads = min(threads, int(limit))
    torch.set_num_threads(threads)
    return threads


def use_deterministic_operators() -> None:
    """Let torch compute the same bits again on a CPU with several threads.

    Otherwise the gradient of an indexed tensor is added up in the order in which threads arrive.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False  # else slower


def available_cores(root: Path = Path("/")) -> int:
    """Cores that CPU affinity and the cgroup quotas allow this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [cores or 1]
    for folder in _cgroups(root):
        files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # versions 2 and 1
        quota, period, *_ = (*(word for file in files for word in _words(folder / file)), "", "")
        if quota.isdecimal() and period.isdecimal():  # not max or -1
            limits.append(max(1, int(quota) // int(period)))
    return min(limits)


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of the process's cgroups, of version 1 and 2, and of those around them.

    In a container, `root`/proc may have the machine's names; its cgroup is then the mounted folder.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            for mount in controllers.split(",") if controllers else ("", "unified"):
                mounted = root / "sys/fs/cgroup" / mount
                folder = mounted / path[1:]
                yield from (f for f in (folder, *folder.parents) if f.is_relative_to(mounted))


def _words(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text("ascii").split()
    return []


def choose_device(device: str = "auto") -> torch.device:
    """The named device; `auto` is CUDA or MPS if present, else the CPU. Raises ConfigError."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and torch.backends.mps.is_available():
            device = "mps"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device '{device}' cannot be used here ({reason}); try 'auto'") from None


def device_name(device: torch.device) -> str:
    return (
        f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    )


def choose_dtype(
    device: torch.device, name: str = "auto", *, cpuinfo: str | None = None
) -> tuple[torch.dtype, str]:
    """Dtype for sampling, and the reason; `auto`: the narrowest in which the device multiplies."""
    if name != "auto":
        return DTYPES[name], "set by model.dtype"
    if device.type == "mps":
        return torch.float16, "auto: half the memory of float32 on mps"
    if device.type == "cuda":
        is_here = torch.cuda.is_available()  # a plan may be for a card that this machine lacks
        if is_here and not torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.float16, "auto: this GPU has no bfloat16"
        return torch.bfloat16, "auto: this GPU multiplies bfloat16"
    flags = (_read_cpuinfo() if cpuinfo is None else cpuinfo).split()
    if {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags):
        return torch.float32, "auto: this CPU reports no bfloat16"
    return torch.bfloat16, "auto: this CPU multiplies bfloat16"


def multiplies_bf16_faster(cpuinfo: str | None = None) -> bool:
    """Whether a CPU that multiplies bfloat16 does so faster than float32.

    Intel's since Sapphire Rapids (with avx512_fp16) do so with AMX. Where a virtual machine hides
    AMX, vdpbf16ps has half the speed of float32.
    """
    words = set((_read_cpuinfo() if cpuinfo is None else cpuinfo).split())
    return not words >= {"GenuineIntel", "avx512_fp16"} or "amx_bf16" in words


def _read_cpuinfo() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text("ascii", errors="replace") if cpuinfo.exists() else ""


def training_dtype(model: Any, name: str = "auto") -> tuple[torch.dtype, str]:
    width = int(getattr(model.config, "hidden_size", MIN_BF16_WIDTH))
    return training_dtype_of(model.device, width, name)


def training_dtype_of(
    device: torch.device, hidden_size: int, name: str = "auto", *, cpuinfo: str | None = None
) -> tuple[torch.dtype, str]:
    """Dtype of the trainer's matrix products, and the reason.

    On a CPU, a model with a small hidden size loses more time in casts to bfloat16 than it gains.
    """
    if name != "auto":
        return DTYPES[name], "set by train.dtype"
    native, reason = choose_dtype(device, cpuinfo=cpuinfo)
    if native == torch.float16:
        return torch.float32, f"auto: no bfloat16 on {device.type}"
    if native == torch.float32:
        return native, reason
    if device.type == "cpu" and hidden_size < MIN_BF16_WIDTH:
        return torch.float32, f"auto: faster on a CPU below hidden size {MIN_BF16_WIDTH}"
    if device.type == "cpu" and not multiplies_bf16_faster(cpuinfo):
        return torch.float32, "auto: this CPU multiplies float32 faster than bfloat16"
    return native, reason


def is_out_of_memory(error: BaseException) -> bool:
    """True for an allocation that failed, in Python, or in torch or MLX on any device."""
    if isinstance(error, RuntimeError):
        return any(text in str(error) for text in MEMORY_TEXTS)
    return isinstance(error, MemoryError)


def limit_memory(device: torch.device, fraction: float | None) -> None:
    """Limit this process to a fraction of a GPU's memory; beyond it torch raises an error."""
    if fraction is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    if fraction is not None and device.type == "mps":
        torch.mps.set_per_process_memory_fraction(fraction)


def total_bytes(device: torch.device) -> int:
    """Bytes of a GPU; on a CPU of the machine, or the limit of the process's cgroup."""
    return _memory(device)[0]


def free_bytes(device: torch.device, *, fraction: float | None = None) -> int:
    """Bytes that can be allocated, at most what is left of `fraction` of all bytes."""
    total, free, used = _memory(device)
    return free if fraction is None else max(0, min(free, int(fraction * total) - used))


def _memory(device: torch.device) -> tuple[int, int, int]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        # What torch keeps of freed tensors can be allocated again.
        return total, free + torch.cuda.memory_reserved(device) - used, used
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        used = torch.mps.current_allocated_memory()
        return total, total - used, used
    machine = psutil.virtual_memory()
    limits = memory_limits()
    total = min([machine.total, *(limit for limit, _ in limits)])
    free = min([machine.available, *(free for _, free in limits)])
    return total, free, psutil.Process().memory_info().rss


def memory_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Limit of each cgroup around this process in bytes, and what it can still allocate."""
    found: list[tuple[int, int]] = []
    for folder in _cgroups(root):
        stat = _words(folder / "memory.stat")
        for name, current, key in MEMORY_FILES:
            limit = _words(folder / name)
            used = _words(folder / current)
            if limit and used and key in stat and limit != ["max"]:
                # The kernel frees inactive pages of the file cache before it enforces a limit.
                free = int(limit[0]) - int(used[0]) + int(stat[stat.index(key) + 1])
                found.append((int(limit[0]), max(0, free)))
    return found
