"""Checkpoints: content, verification, pruning."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damage import flip_bit, remove, truncate
from measured_memory import PeakMemory
from trainer_sessions import states_of

from peralta_zmq import atomic_files
from peralta_zmq.errors import JournalError, OutageError
from peralta_zmq.trainer.checkpoint import CHECKPOINTS, Checkpoint, newest, prune, write_checkpoint

LEDGER = {"ann/0011": 17}


def checkpoint_at(step: int) -> Checkpoint:
    tensors = {
        "model/w": torch.full((2, 3), float(step)),
        "adamw/step/w": torch.tensor(float(step)),
        "rng/torch": torch.arange(16, dtype=torch.uint8),
    }
    return Checkpoint(step, tensors, {"ledger": LEDGER})


def saved(folder: Path, *steps: int) -> None:
    for step in steps:
        write_checkpoint(folder, checkpoint_at(step), run_id="run-1")


def step_of(folder: Path) -> int | None:
    restored = newest(folder, run_id="run-1")
    return None if restored is None else restored.step


def test_newest_comes_back_bit_identical_with_shape_and_type(tmp_path: Path) -> None:
    saved(tmp_path, 999, 1000)
    restored = newest(tmp_path, run_id="run-1")
    assert restored is not None and (restored.step, restored.progress) == (1000, {"ledger": LEDGER})
    for name, tensor in checkpoint_at(1000).tensors.items():
        tensor_read = restored.tensors[name]
        assert (tensor_read.dtype, tensor_read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(tensor_read, tensor)
    assert newest(tmp_path / "nothing", run_id="run-1") is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_neither_writing_nor_reading_copies_all_tensors(tmp_path: Path) -> None:
    tensors = {f"model/w{number}": torch.ones(1 << 23) for number in range(4)}
    with PeakMemory() as memory:
        write_checkpoint(tmp_path, Checkpoint(1, tensors, {}), run_id="run-1")
        restored = newest(tmp_path, run_id="run-1")
    assert memory.peak - memory.before < tensors["model/w0"].nbytes
    assert restored is not None
    assert all(torch.equal(restored.tensors[name], each) for name, each in tensors.items())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.safetensors", b"12345678"),
        ("progress.json", b"[" * 100_000),
        ("progress.json", b'{"a":' * 500 + b"1" + b"}" * 500),
        ("progress.json", b"[]"),
    ],
)
def test_verified_checkpoint_with_invalid_content_is_skipped(
    tmp_path: Path, name: str, content: bytes
) -> None:
    saved(tmp_path, 10)
    names = ("state.safetensors", "progress.json")
    files = {each: (tmp_path / "step_000010" / each).read_bytes() for each in names}
    files[name] = content
    atomic_files.write_folder(tmp_path / "step_000020", files, {"run_id": "run-1", "step": 20})
    assert step_of(tmp_path) == 10


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_restored_checkpoint_is_not_mapped(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    restored = newest(tmp_path, run_id="run-1")
    assert restored is not None
    tensors = dict(restored.tensors)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text("utf-8")
    os.truncate(tmp_path / "step_000010" / "state.safetensors", 100)
    assert torch.equal(tensors["model/w"], torch.full((2, 3), 10.0))
    with pytest.raises(OSError, match="Could not read tensor"):
        dict(restored.tensors)


@pytest.mark.parametrize("name", ["state.safetensors", "progress.json", "manifest.json", "STABLE"])
@pytest.mark.parametrize("damage", [flip_bit, truncate, remove])
def test_damaged_newest_checkpoint_falls_back_to_the_previous(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    saved(tmp_path, 10, 20)
    damage(tmp_path / "step_000020" / name)
    assert step_of(tmp_path) == 10


def test_only_damaged_checkpoints_are_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    flip_bit(tmp_path / "step_000010" / "state.safetensors")
    with pytest.raises(JournalError, match=r"no checkpoint in .* verifies; put a copy back"):
        step_of(tmp_path)
    assert (tmp_path / "step_000010").exists()


def test_reading_without_a_file_descriptor_names_the_remedy(
    tmp_path: Path, open_file_limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10)
    steps_in = atomic_files.steps_in

    def list_and_use_all_descriptors(folder: Path) -> dict[int, Path]:
        steps = steps_in(folder)
        os.close(lowest := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, open_file_limits[1]))
        return steps

    monkeypatch.setattr(atomic_files, "steps_in", list_and_use_all_descriptors)
    with pytest.raises(OutageError, match=r"Too many open files: .*\(ulimit -n\)$") as caught:
        step_of(tmp_path)
    assert "mount" not in str(caught.value)


def test_checkpoint_that_did_not_verify_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    truncate(tmp_path / "step_000020" / "state.safetensors")
    saved(tmp_path, 20)
    assert step_of(tmp_path) == 20


def test_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    with pytest.raises(JournalError, match=r"belongs to run run-1, not to run-2.*--run\.name"):
        newest(tmp_path, run_id="run-2")


@pytest.mark.parametrize(("keep_last", "kept"), [(2, [20, 30]), (1, [30]), (None, [5, 10, 20, 30])])
def test_newest_are_kept(tmp_path: Path, keep_last: int | None, kept: list[int]) -> None:
    saved(tmp_path, 5, 10, 20, 30)
    prune(tmp_path, keep_last)
    assert sorted(os.listdir(tmp_path)) == [f"step_{step:06d}" for step in kept]


def test_trainer_keeps_the_checkpoints_that_the_settings_name(tmp_path: Path) -> None:
    states_of(tmp_path, 5, "--checkpoint.interval=1", "--checkpoint.keep-last=2")
    kept = sorted(os.listdir(tmp_path / "demo" / CHECKPOINTS))
    assert kept == ["step_000004", "step_000005"]
