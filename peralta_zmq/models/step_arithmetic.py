"""What computes a training step, recorded so that a restart repeats the step bit for bit.

Other instructions, threads or operators add the same numbers in another order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from peralta_zmq.compiler import cpu_features, cpu_line
from peralta_zmq.errors import ConfigError
from peralta_zmq.models import layer_ops

# Beginnings of the names of CPU features that libraries choose their code by.
FEATURES = ("avx", "amx", "fma", "asimd", "sve", "bf16", "i8mm")
# Variables of the environment that change instructions or precision; oneDNN has two prefixes.
LIMITS = (
    *("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"),
    *("ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("DNNL_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE"),
)
RESTORED = ("threads", "operators")  # `use_arithmetic` can change these
LAYOUT = "2"  # changes when the same groups become other rows of tokens


def arithmetic(device: torch.device, dtype: str, num_ranks: int) -> dict[str, str]:
    features = sorted(name for name in cpu_features().split() if name.startswith(FEATURES))
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if os.environ.get(name)]
    processor = cpu_line("model name").partition(":")[2].strip()
    return {
        "device": device.type,
        "ranks": str(num_ranks),
        "layout": LAYOUT,
        "dtype": dtype,
        "torch": torch.__version__,
        "instructions": " ".join(
            [processor, torch.backends.cpu.get_cpu_capability(), *features, *limits]
        ),
        "threads": str(torch.get_num_threads()),
        "operators": layer_ops.operators(),
    }


def use_arithmetic(recorded: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Compute as `recorded` from now on; returns whether the bits are then the same.

    `here` is the `arithmetic` of this process at its start. Without a record, with another number
    of ranks, or on a GPU, nothing changes. Raises ConfigError if this process cannot compute as
    recorded.
    """
    is_on_gpu = recorded.get("device") == here["device"] != "cpu"
    if not recorded or is_on_gpu or recorded["ranks"] != here["ranks"]:
        return False
    is_alone = here["ranks"] == "1"  # other ranks would keep theirs
    fixed = [name for name in here if not (is_alone and name in RESTORED)]
    if changes := [
        _change(name, recorded.get(name, ""), here[name]) for name in fixed
        if recorded.get(name) != here[name]
    ]:  # fmt: skip
        raise ConfigError(f"it was computed with {', '.join(changes)}")
    try:
        layer_ops.use_operators(recorded["operators"])
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{recorded['operators']} cannot be loaded ({error})") from None
    torch.set_num_threads(int(recorded["threads"]))
    return True


def _change(name: str, recorded: str, here: str) -> str:
    """Describe a change; of long texts only the words that one of the two lacks."""

    def words(first: str, second: str) -> str:
        return " ".join(word for word in first.split() if word not in second.split())

    before = words(recorded, here) or "none"
    return f"{name} {before} (here {words(here, recorded) or 'without'})"
