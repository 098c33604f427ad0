"""Plans against this machine, and errors of allocations."""

from __future__ import annotations

import json
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from config_files import load
from sample_data import QWEN, TINY

from peralta_zmq import build, models
from peralta_zmq.config import Config, write_resolved
from peralta_zmq.engines.engine_models import loading_errors
from peralta_zmq.errors import OutOfMemoryError
from peralta_zmq.models.model_folders import model_loading_errors


def start(config: Config, folder: Path, settings: dict[str, Any], role: Any = "trainer") -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    build.check_start(config, role, folder)


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_start_warns_if_weights_alone_are_larger_than_the_memory(
    role: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(load("--model.device=cpu"), tmp_path, {**QWEN, "vocab_size": 1 << 40}, role)
    (text,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert f"the {role} needs about " in text and " GiB of cpu are free; " in text
    assert "choose a smaller model.name or a machine with more memory" in text


def test_start_warns_once_if_the_plan_exceeds_the_fraction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load("--model.device=cpu", "--train.memory-fraction=0.000001")
    start(config, tmp_path, TINY)
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "the trainer needs about " in record.getMessage()
    assert "bin/doctor plan" in record.getMessage()
    caplog.clear()
    start(load("--model.device=cpu"), tmp_path, TINY)
    start(load("--model.device=cpu"), tmp_path, {"model_type": "nova"})  # cannot be planned
    assert caplog.records == []


def test_failed_allocation_names_the_setting_to_change(tmp_path: Path) -> None:
    config = load("--model.device=cpu", f"--run.dir={tmp_path}", "--run.name=small")

    def failure() -> str:
        with pytest.raises(OutOfMemoryError) as caught, build.memory_errors(config, "trainer"):
            torch.empty(1 << 60, dtype=torch.uint8)
        return str(caught.value)

    text = failure()
    assert "the trainer is out of memory (" in text and "can't allocate memory" in text
    assert "planned were " in text and "it needs " in text and "\n" not in text
    assert "--run.name" not in text  # a run that has not begun may change every setting
    write_resolved(config, config.run_folder)
    assert failure() == f"{text}; run small keeps its settings: choose another --run.name"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            OutOfMemoryError,
        ),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), OutOfMemoryError),
        (RuntimeError("[malloc] Unable to allocate 4096 bytes."), OutOfMemoryError),
        (
            RuntimeError("[metal::malloc] Attempting to allocate 9000000000 bytes which is ..."),
            OutOfMemoryError,
        ),
        (
            RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (...)"),
            OutOfMemoryError,
        ),
        (MemoryError(), OutOfMemoryError),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
        (ValueError("out of memory"), ValueError),
    ],
)
def test_errors_of_allocations_are_recognized(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind), build.memory_errors(load("--model.device=cpu"), "generator"):
        raise error


@pytest.mark.parametrize(
    "context",
    [model_loading_errors("model folder x cannot be loaded"), loading_errors(Path("x"))],
    ids=["trainer", "engine"],
)
def test_failed_allocation_while_loading_is_no_damaged_folder(
    context: AbstractContextManager[None],
) -> None:
    with (
        pytest.raises(OutOfMemoryError, match="the generator is out of memory"),
        build.memory_errors(load("--model.device=cpu"), "generator"),
        context,
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_fraction_limits_the_free_bytes_of_this_process() -> None:
    cpu = torch.device("cpu")
    assert models.free_bytes(cpu, fraction=1e-9) == 0 < models.free_bytes(cpu, fraction=1.0)
    assert models.free_bytes(cpu, fraction=1.0) <= models.total_bytes(cpu)
