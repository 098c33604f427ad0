"""Plans of the trainers whose memory the bench `memory` measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_files import load

from benchmarks import memory
from peralta_zmq.memory import GIB, Machine, plan_trainer, read_shape

# Bytes of `*_memory` on an AMD EPYC with 2 cores and 23.5 GiB, 2026-11-28.
RECORDED = {
    "full_0.6b_fp32": 12_369_035_264,
    "full_0.6b_fp32_small": 10_613_673_984,
    "full_0.6b_fp32_small_checkpointing": 10_249_154_560,
    "full_0.6b_bf16_moments": 8_332_103_680,
    "full_1.7b_8bit": 19_143_073_792,
    "lora_1.7b_bf16": 4_033_490_944,
    "lora_4b_bf16": 6_512_824_320,
    "lora_4b_int8": 11_278_901_248,
    "lora_4b_nf4": 8_364_679_168,
}
NUM_PROMPT = 110  # tokens
EVALUATION = ("KV cache", "logits and prompts", "converted weight")  # parts that are not measured


@pytest.mark.parametrize("name", memory.CELLS)
def test_plan_is_within_15_percent_of_the_recorded_memory(name: str, tmp_path: Path) -> None:
    cell = memory.CELLS[name]
    (tmp_path / "config.json").write_text(json.dumps(memory.SHAPES[cell.size]))
    shape = read_shape(tmp_path)
    number, length = len(cell.lengths), sum(cell.lengths) // len(cell.lengths)
    config = load(
        *cell.flags, f"--sampling.num-generations={number}", f"--train.batch-size={number}",
        f"--sampling.max-completion-length={length}", "--train.dtype=bfloat16",
        f"--engine.max-model-len={NUM_PROMPT + length}",
        "--no-train.master-noise",  # newer than the records
    )  # fmt: skip
    mapped = config.lora.rank and config.lora.base_dtype == "bfloat16"  # the base is a mapped file
    parts = plan_trainer(config, shape, Machine("cpu", 23.5 * GIB)).parts
    planned = sum(size for part, size in parts.items() if not part.startswith(EVALUATION))
    measured = RECORDED[name] + (2.0 * shape.num_parameters if mapped else 0)
    assert 0.85 <= planned / measured <= 1.15, (planned, measured)
