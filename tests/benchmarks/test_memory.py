"""The bench of memory: model folders, sampled memory, cells."""

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


def test_written_model_is_loaded_with_its_random_weights(tmp_path: Path) -> None:
    memory.write_model(SHAPE, tmp_path / "tiny")
    model = models.load_model(tmp_path / "tiny", device=torch.device("cpu"), dtype=torch.bfloat16)
    weights = models.weights_of(model)
    assert models.load_tokenizer(tmp_path / "tiny").chat_template
    assert weights["model.embed_tokens.weight"].shape == (500, 64)
    assert 0.015 < float(weights["model.layers.1.mlp.up_proj.weight"].float().std()) < 0.025
    assert "lm_head.weight" not in weights


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_watch_finds_the_peak_of_anonymous_memory() -> None:
    program = "import time; big = b'x' * (64 << 20); time.sleep(0.3); del big; time.sleep(0.1)"
    process = subprocess.Popen([sys.executable, "-c", program], text=True)
    peak = memory.watch(process)
    assert 64 << 20 < peak.private < 100 << 20
    assert peak.private <= peak.resident


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
