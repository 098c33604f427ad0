"""Plans of the trainers that the benches `memory` and `memory_lora` measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_files import load

from benchmarks import memory, memory_lora
from benchmarks.pages import worst_of
from peralta_zmq.memory import GIB, Machine, plan_trainer, read_shape

MACHINE = Machine("cpu", 23.5 * GIB)  # that of the recorded results
BENCHES = {"memory": memory.CELLS, "memory_lora": memory_lora.CELLS}
CELLS = [
    (bench, name) for bench, cells in BENCHES.items() for name in cells if not cells[name].commit
]
EVALUATION = ("KV cache", "logits and prompts", "converted weight")  # parts that are not measured


@pytest.mark.parametrize(("bench", "name"), CELLS)
def test_plan_is_within_15_percent_of_the_recorded_memory(
    bench: str, name: str, tmp_path: Path
) -> None:
    cell = BENCHES[bench][name]
    (tmp_path / "config.json").write_text(json.dumps(memory.SHAPES[cell.size]))
    shape = read_shape(tmp_path)
    number, length = len(cell.lengths), sum(cell.lengths) // len(cell.lengths)
    config = load(
        *cell.flags, f"--sampling.num-generations={number}", f"--train.batch-size={number}",
        f"--sampling.max-completion-length={length}", "--train.dtype=bfloat16",
        f"--engine.max-model-len={memory.NUM_PROMPT + length}",
    )  # fmt: skip
    parts = plan_trainer(config, shape, MACHINE).parts
    planned = sum(size for part, size in parts.items() if not part.startswith(EVALUATION))
    measured = worst_of(bench, f"{name}_memory")
    if config.lora.rank and config.lora.base_dtype == "bfloat16":  # the base is a mapped file
        measured += 2.0 * shape.num_parameters
    assert 0.85 <= planned / measured <= 1.15, (planned, measured)
