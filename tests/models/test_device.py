from __future__ import annotations

import platform
from pathlib import Path

import psutil
import pytest
import torch

from peralta_zmq import models
from peralta_zmq.errors import ConfigError
from peralta_zmq.models import device
from peralta_zmq.models.device import multiplies_bf16, native_dtype

CPU = torch.device("cpu")


def test_unknown_device_error_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"'toaster' cannot be used.*try 'auto'"):
        models.choose_device("toaster")


def test_named_dtype_is_used() -> None:
    assert models.choose_dtype(CPU, "float32") == (torch.float32, "set by model.dtype")


@pytest.mark.parametrize(
    ("kind", "has_bf16", "dtype", "reason"),
    [
        ("cpu", True, torch.bfloat16, "this CPU multiplies bfloat16"),
        ("cpu", False, torch.float32, "this CPU reports no bfloat16"),
        ("cuda", True, torch.bfloat16, "this GPU multiplies bfloat16"),
        ("cuda", False, torch.float16, "this GPU has no bfloat16"),
        ("mps", False, torch.float16, "half the memory of float32 on mps"),
    ],
)
def test_native_dtype_is_the_narrowest_in_hardware(
    kind: str, has_bf16: bool, dtype: torch.dtype, reason: str
) -> None:
    assert native_dtype(kind, has_bf16=has_bf16) == (dtype, f"auto: {reason}")


@pytest.mark.parametrize(
    ("cpuinfo", "has_bf16"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 sha_ni\n", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n", True),
        ("flags\t\t: fpu sse2 avx2 avx512f avx512dq avx512vl\n", False),  # by emulation only
        ("Features\t: fp asimd fphp asimdhp sve i8mm bf16 dgh rng\n", True),  # Neoverse V1
        ("Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp\n", False),  # Neoverse N1
        ("", False),
    ],
)
def test_multiplies_bf16_reads_x86_and_arm_flags(cpuinfo: str, has_bf16: bool) -> None:
    assert multiplies_bf16(cpuinfo) == has_bf16


def test_choose_dtype_reads_this_machine_s_cpuinfo() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    has_bf16 = multiplies_bf16(cpuinfo.read_text("utf-8") if cpuinfo.exists() else "")
    assert models.choose_dtype(CPU) == native_dtype("cpu", has_bf16=has_bf16)


@pytest.mark.parametrize(
    ("hidden_size", "flags", "dtype", "reason"),
    [
        (128, "avx512_bf16", torch.bfloat16, "this CPU multiplies bfloat16"),
        (128, "avx512_bf16 avx512_fp16 amx_bf16", torch.bfloat16, "this CPU multiplies bfloat16"),
        (127, "avx512_bf16", torch.float32, "faster on a CPU below hidden size 128"),
        (128, "avx512_bf16 avx512_fp16", torch.float32,
         "this CPU multiplies float32 faster than bfloat16"),
        (128, "avx2", torch.float32, "this CPU reports no bfloat16"),
    ],
)  # fmt: skip
def test_trainer_on_a_cpu_uses_the_dtype_that_it_multiplies_faster(
    monkeypatch: pytest.MonkeyPatch, hidden_size: int, flags: str, dtype: torch.dtype, reason: str
) -> None:
    monkeypatch.setattr(device, "_read_cpuinfo", lambda: f"vendor : GenuineIntel flags : {flags}")
    assert models.training_dtype_of(CPU, hidden_size) == (dtype, f"auto: {reason}")


@pytest.mark.parametrize(
    ("cpuinfo", "is_faster"),
    [
        ("vendor_id : GenuineIntel\nflags : avx512_bf16 amx_bf16 avx512_fp16\n", True),
        ("vendor_id : GenuineIntel\nflags : avx512_bf16 avx512_fp16\n", False),  # AMX hidden
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16\n", True),  # Cooper Lake
        ("vendor_id : AuthenticAMD\nflags : avx512_bf16 avx512_fp16\n", True),
        ("Features : fp asimd bf16\n", True),
    ],
)
def test_intel_without_amx_multiplies_float32_faster(cpuinfo: str, is_faster: bool) -> None:
    assert models.multiplies_bf16_faster(cpuinfo) == is_faster


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs mallopt")
def test_freed_memory_is_kept_until_it_is_released() -> None:
    models.keep_memory()
    process, blocks = psutil.Process(), [torch.ones(1 << 19) for _ in range(32)]  # 64 MiB
    used = process.memory_info().rss
    blocks.clear()
    assert used - process.memory_info().rss < 16 << 20
    models.release_memory()
    assert used - process.memory_info().rss > 48 << 20
