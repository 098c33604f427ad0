"""Plans of the trainers that the benches `memory` and `memory_lora` measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_files import load

from benchmarks import memory, memory_lora
from benchmarks.pages import reports_of
from peralta_zmq.memory import GIB, Machine, plan_trainer, read_shape

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
        "--no-train.master-noise",  # newer than the records
    )  # fmt: skip
    mapped = config.lora.rank and config.lora.base_dtype == "bfloat16"  # the base is a mapped file
    for report in reports_of(bench):
        machine = Machine("cpu", report["machine"]["memory_gib"] * GIB)
        parts = plan_trainer(config, shape, machine).parts
        planned = sum(size for part, size in parts.items() if not part.startswith(EVALUATION))
        [measured] = [each["ours"] for each in report["claims"] if each["name"] == f"{name}_memory"]
        measured += 2.0 * shape.num_parameters if mapped else 0
        assert 0.85 <= planned / measured <= 1.15, (planned, measured)
