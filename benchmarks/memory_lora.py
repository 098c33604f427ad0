"""Memory of LoRA, and time of its steps, as in the bench `memory`.

`CELLS="lora_4b_nf4" bin/bench memory_lora` measures only this cell. `--quick` uses tiny shapes.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Claim
from benchmarks.memory import CHECKPOINTING, GIB, Cell, measured_cells, required

LENGTHS = (512,) * 8  # tokens of the completions


def cell(size: str, base_dtype: str, *, limit: float | None = None) -> Cell:
    """Adapters on a frozen base; one step, because a step takes minutes."""
    flags = ("--lora.rank=16", f"--lora.base-dtype={base_dtype}", CHECKPOINTING)
    return Cell(size=size, flags=flags, lengths=LENGTHS, num_steps=1, limit=limit)


CELLS = {
    "lora_1.7b_bf16": cell("1.7b", "bfloat16"),
    "lora_4b_bf16": cell("4b", "bfloat16"),
    "lora_4b_int8": cell("4b", "int8"),
    "lora_4b_nf4": cell("4b", "nf4", limit=12 * GIB),
}
REQUIRED = required(CELLS)


def run(*, quick: bool) -> Iterator[Claim]:
    """Measure LoRA."""
    return measured_cells(CELLS, quick=quick)
