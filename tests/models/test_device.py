from __future__ import annotations

import platform
from pathlib import Path

import psutil
import pytest
import torch

from peralta_zmq import models
from peralta_zmq.errors import ConfigError
from peralta_zmq.models import device

CPU = torch.device("cpu")


def test_unknown_device_error_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"'toaster' cannot be used.*try 'auto'"):
        models.choose_device("toaster")


def test_named_dtype_is_used() -> None:
    assert models.choose_dtype(CPU, "float32") == (torch.float32, "set by model.dtype")


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
def test_dtype_on_a_cpu_follows_x86_and_arm_flags(cpuinfo: str, has_bf16: bool) -> None:
    dtype, _ = models.choose_dtype(CPU, cpuinfo=cpuinfo)
    assert dtype == (torch.bfloat16 if has_bf16 else torch.float32)
    assert models.choose_dtype(torch.device("mps"), cpuinfo=cpuinfo)[0] == torch.float16


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
    hidden_size: int, flags: str, dtype: torch.dtype, reason: str
) -> None:
    cpuinfo = f"vendor : GenuineIntel flags : {flags}"
    chosen = models.training_dtype_of(CPU, hidden_size, cpuinfo=cpuinfo)
    assert chosen == (dtype, f"auto: {reason}")


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


V1 = "5:memory:{0}\n4:cpu,cpuacct:{0}\n1:name=systemd:/other\n"


def write_cgroup(
    root: Path, version: int, path: str, *, cores: float | None = None, limit: int | None = None
) -> None:
    """Write the files of a cgroup, of which 300 bytes are used and 10 can be reclaimed."""
    quota = "" if cores is None else f"{cores * 1000:.0f}"
    files = {
        "cpu.max": f"{quota or 'max'} 1000", "memory.max": str(limit or "max"),
        "memory.high": "max", "memory.current": "300", "memory.stat": "anon 5\ninactive_file 10",
    } if version == 2 else {
        "cpu/cpu.cfs_quota_us": quota or "-1", "cpu/cpu.cfs_period_us": "1000",
        "memory/memory.limit_in_bytes": str(limit or 2**63 - 4096),
        "memory/memory.usage_in_bytes": "300",
        "memory/memory.stat": "inactive_file 3\ntotal_inactive_file 10",
    }  # fmt: skip
    for name, text in files.items():
        mount, _, file = name.rpartition("/")
        target = root / "sys/fs/cgroup" / mount / path.strip("/") / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")


@pytest.mark.parametrize(("version", "own"), [(2, "0::{}\n"), (1, V1), (1, f"{V1}0::/\n")])
def test_least_limit_of_the_cgroups_around_the_process_counts(
    tmp_path: Path, version: int, own: str
) -> None:
    """The kernel enforces the limits of all cgroups between the process and the root."""
    path = "/user.slice/my job.scope"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own.format(path))
    cores = models.available_cores()
    assert models.available_cores(tmp_path) == cores  # no files
    assert device.memory_limits(tmp_path) == []
    write_cgroup(tmp_path, version, "/")
    write_cgroup(tmp_path, version, path, limit=5000)
    write_cgroup(tmp_path, version, "/user.slice", limit=1000, cores=1.5)
    write_cgroup(tmp_path, version, "/other", limit=400, cores=1)  # not around it
    assert models.available_cores(tmp_path) == 1
    limits = device.memory_limits(tmp_path)
    assert (min(limit for limit, _ in limits), min(free for _, free in limits)) == (1000, 710)


@pytest.mark.parametrize("version", [1, 2])
def test_limit_of_a_container_that_has_the_name_of_the_machine_counts(
    tmp_path: Path, version: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    own = V1.format("/docker/c0ffee") if version == 1 else "0::/../c0ffee\n"
    (tmp_path / "proc/self/cgroup").write_text(own)
    write_cgroup(tmp_path, version, "/", limit=1000, cores=1)
    assert models.available_cores(tmp_path) == 1
    assert (1000, 710) in device.memory_limits(tmp_path)


@pytest.mark.parametrize(("variables", "threads"), [
    ({}, 6), ({"OMP_NUM_THREADS": "2"}, 2), ({"OMP_NUM_THREADS": "4,2"}, 4),
    ({"OMP_NUM_THREADS": "64"}, 6), ({"OMP_NUM_THREADS": "0"}, 6), ({"OMP_NUM_THREADS": "x"}, 6),
    ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}, 1),
    ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 6),  # torchrun has set it
])  # fmt: skip
def test_omp_num_threads_lowers_the_threads(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], threads: int
) -> None:
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    try:
        assert models.use_threads(2, num_cores=12) == torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
