"""The bench of memory: sampled memory, cells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import memory
from peralta_zmq import models

SHAPE = {
    **memory.COMMON, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96, "vocab_size": 500,
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_watch_finds_the_peak_of_anonymous_memory() -> None:
    program = "import time; big = b'x' * (64 << 20); time.sleep(0.3); del big; time.sleep(0.1)"
    process = subprocess.Popen([sys.executable, "-c", program], text=True)
    peak = memory.watch(process)
    assert 64 << 20 < peak < 100 << 20


@pytest.mark.slow
def test_cell_is_measured_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(memory.SHAPES, "0.6b", SHAPE)
    monkeypatch.setattr(memory, "QUICK", {})
    name = "full_0.6b_fp32"
    measured = memory.measure(name, memory.CELLS[name], tmp_path, quick=True)
    claims = {claim.name: claim for claim in measured}
    needed = claims["full_0.6b_fp32_needed"].ours
    num_parameters = sum(torch.Size(each).numel() for each in shapes_of(SHAPE, tmp_path).values())
    assert needed == pytest.approx(16 * num_parameters, rel=0.01)
    assert claims["full_0.6b_fp32_memory"].ours > needed


def shapes_of(shape: dict[str, Any], folder: Path) -> dict[str, torch.Size]:
    memory.write_model(shape, folder / "again")
    return {name: each.shape for name, each in models.folder_weights(folder / "again").items()}
