"""Temporary copies of sets of tensors: no file remains, and none is written without room."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from weight_sets import same, weights_at

from peralta_zmq.weights import tensor_set


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


class ReadWithoutFiles(dict[str, torch.Tensor]):
    """A set of tensors that are read while a folder is empty."""

    def __init__(self, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        super().__init__(tensors)
        self._folder = folder

    def values(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        for tensor in super().values():
            assert not os.listdir(self._folder)
            yield tensor


def test_temporary_copy_has_no_file_that_a_kill_could_leave(folder: Path) -> None:
    weights = weights_at(1)
    copies = tensor_set.temporary_copy(ReadWithoutFiles(weights, folder))
    assert same(copies, weights)
    assert not os.listdir(folder)


def test_temporary_copy_needs_twice_its_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": torch.ones(1024)}
    disk = SimpleNamespace(f_bavail=15, f_frsize=512)
    monkeypatch.setattr(os, "statvfs", lambda folder: disk)
    with pytest.raises(OSError, match=f"{folder}") as caught:
        tensor_set.temporary_copy(weights)
    assert caught.value.errno == errno.ENOSPC
    disk.f_bavail = 16
    assert same(tensor_set.temporary_copy(weights), weights)


def test_temporary_copy_that_cannot_be_completed_leaves_no_file(folder: Path) -> None:
    weights, limits = {"w": torch.ones(1 << 16)}, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            tensor_set.temporary_copy(weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(folder)
    assert same(tensor_set.temporary_copy(weights), weights)
