"""Run the numeric tests as if on older processors.

Environment variables limit the instruction sets of torch's operators (ATEN_CPU_CAPABILITY), of MKL
(MKL_ENABLE_INSTRUCTIONS), of oneDNN (ONEDNN_MAX_CPU_ISA) and of our C kernels
(PERALTA_KERNELS), so that one machine runs the code paths for older ones. Combinations with an
instruction set that this processor lacks are skipped. `make test-isa` calls this module.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from peralta_zmq.compiler import INSTRUCTION_SET, cpu_features

REPO = Path(__file__).resolve().parent.parent
# Tests that compare numbers computed by torch, oneDNN or the kernels.
TESTS = ("tests/engines", "tests/models", "tests/learning")
QUICK_TESTS = (
    "tests/engines/native/kernels",
    "tests/engines/native/test_attention.py",
    "tests/engines/native/test_packed_linears.py",
    "tests/models/test_layer_ops.py",
    "tests/models/test_scorer.py",
    "tests/learning/test_losses.py",
)


# Values of MKL_ENABLE_INSTRUCTIONS by those of ATEN_CPU_CAPABILITY.
MKL = {"default": "SSE4_2", "avx2": "AVX2", "avx512": "AVX512"}


class Row(NamedTuple):
    """One combination of limits; an empty string means no limit."""

    torch: str  # value of ATEN_CPU_CAPABILITY
    onednn: str  # value of ONEDNN_MAX_CPU_ISA
    kernels: str  # value of PERALTA_KERNELS
    threads: int
    needs: str = ""  # CPU feature without which the row is skipped
    is_quick: bool = False  # also run with --quick


X86_ROWS = (
    Row("default", "AVX2", "x86-64", 1, is_quick=True),
    Row("default", "", "none", 2),
    Row("avx2", "AVX2", "x86-64-v3", 2, "avx2", is_quick=True),
    Row("avx2", "AVX512_CORE_BF16", "none", 1, "avx512_bf16"),
    Row("avx512", "AVX512_CORE", "x86-64-v3", 1, "avx512f"),
    Row("avx512", "AVX512_CORE_BF16", "cooperlake", 2, "avx512_bf16"),
    Row("avx512", "AVX512_CORE_AMX", "native", 1, "amx_bf16"),
    Row("avx512", "AVX512_CORE_AMX", "native", 2, "amx_bf16", is_quick=True),
)
OTHER_ROWS = (Row("", "", "none", 1), Row("", "", "native", 2, is_quick=True))


def main() -> int:
    """Run the rows and print a line for each; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows and tests, for .ci/run")
    quick = parser.parse_args().quick
    rows = X86_ROWS if platform.machine() in ("x86_64", "AMD64") else OTHER_ROWS
    available, has_failed = cpu_features().split(), False
    for row in rows:
        if quick and not row.is_quick:
            continue
        title = (
            f"torch {row.torch or '-'}, oneDNN {row.onednn or '-'}, kernels {row.kernels}, "
            f"threads {row.threads}"
        )
        if row.needs and row.needs not in available:
            sys.stdout.write(f"skipped: {title} (no {row.needs} here)\n")
            continue
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", str(2 // row.threads), "--dist", "worksteal",
             *(QUICK_TESTS if quick else TESTS)],
            cwd=REPO, env=_environment(row), capture_output=True, text=True,
        )  # fmt: skip
        has_failed |= done.returncode != 0
        lines = done.stdout.splitlines()
        outcome = lines[-1] if done.returncode == 0 else done.stdout + done.stderr
        sys.stdout.write(f"{title}: {outcome} ({time.monotonic() - started:.0f} s)\n")
        sys.stdout.flush()
    return int(has_failed)


def _environment(row: Row) -> dict[str, str]:
    limits = {
        "ATEN_CPU_CAPABILITY": row.torch,
        "MKL_ENABLE_INSTRUCTIONS": MKL.get(row.torch, ""),
        "ONEDNN_MAX_CPU_ISA": row.onednn,
        INSTRUCTION_SET: row.kernels,
        "OMP_NUM_THREADS": str(row.threads),
    }
    others = {name: value for name, value in os.environ.items() if name not in limits}
    return {**others, **{name: value for name, value in limits.items() if value}}


if __name__ == "__main__":
    sys.exit(main())
