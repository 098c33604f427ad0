"""Planned peak memory against the measured one, each setting in a process of its own.

.venv/bin/python -m pytest -s -m slow tests/memory/test_measured_plans.py prints both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_data import save_model

from peralta_zmq.memory import gib
from tools.base_model import new_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak of a process"),
]
REPO = Path(__file__).parents[2]
# A sixth of the layers of Qwen3-0.6B with a fifth of its vocabulary: 158 M parameters.
SHAPE = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "eos_token_id": 2, "bos_token_id": None,
}  # fmt: skip
BATCH = ("--sampling.num-generations=4", "--train.batch-size=4", "--engine.max-model-len=256",
         "--sampling.max-completion-length=96")  # fmt: skip
LARGE = ("--sampling.num-generations=8", "--train.batch-size=16", "--engine.max-model-len=512",
         "--sampling.max-completion-length=128")  # fmt: skip
STEP = (*LARGE, "--train.dtype=bfloat16", "--engine.slots=8")
ADAPTERS = (*BATCH, "--train.dtype=bfloat16", "--lora.rank=16", "--engine.slots=4")
SETTINGS = {
    "full_float32": ("trainer", *BATCH, "--train.dtype=float32"),
    "full_bfloat16": ("trainer", *BATCH, "--train.dtype=bfloat16"),
    "adamw_bf16": ("trainer", *BATCH, "--train.dtype=bfloat16", "--train.optim=adamw_bf16"),
    "adamw_8bit": ("trainer", *BATCH, "--train.dtype=bfloat16", "--train.optim=adamw_8bit"),
    "lora": ("trainer", *ADAPTERS),
    "lora_nf4": ("trainer", *ADAPTERS, "--lora.base-dtype=nf4"),
    "checkpointing": ("trainer", *STEP, "--train.gradient-checkpointing",
                      "--train.max-tokens-per-microbatch=4096"),
    "micro_batches": ("trainer", *STEP, "--train.max-tokens-per-microbatch=2048"),
    "engine_bfloat16": ("generator", *LARGE, "--model.dtype=bfloat16", "--engine.slots=32"),
    "engine_float32": ("generator", *LARGE, "--model.dtype=float32", "--engine.slots=64"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and the tokenizer of the embedded one."""
    folder = tmp_path_factory.mktemp("model")
    save_model(new_model(SHAPE, seed=0).to(torch.bfloat16), folder)
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_plan_is_within_15_percent_of_the_measured_peak(name: str, folder: Path) -> None:
    role, *arguments = SETTINGS[name]
    command = [
        sys.executable,
        REPO / "tests/support/measured_memory.py",
        role,
        str(folder),
        *arguments,
    ]
    options = ("--model.device=cpu", "--engine.name=native")
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=REPO, timeout=280,
        env={"PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    row = json.loads(result.stdout.splitlines()[-1])
    parts = ", ".join(f"{part} {gib(size)}" for part, size in row["parts"].items())
    ratio = row["planned"] / row["measured"]
    sizes = "planned {planned}, measured {measured}, imports {process} GiB".format(
        **{key: gib(row[key]) for key in ("planned", "measured", "process")}
    )
    print(f"\n{name}: {sizes}, ratio {ratio:.3f}, {row['phase']}: {parts}")
    assert 0.85 <= ratio <= 1.15
