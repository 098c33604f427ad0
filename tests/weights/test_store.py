"""Versions are published, found and verified; invalid folders are ignored or refused."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from damage import CHANGES
from sample_data import TINY, tiny_model
from weight_sets import loaded, publish

from peralta_zmq import models
from peralta_zmq.errors import OutageError, StoreError
from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.store import WEIGHTS_FILE, WeightStore, version_of_step


@pytest.mark.parametrize("denied", ["", "RUN.json", "step_00000001/STABLE"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EHOSTDOWN])
def test_store_that_cannot_be_read_keeps_the_error(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, denied: str, number: int
) -> None:
    def fails(*path: object, **options: object) -> Iterator[bytes]:
        raise OSError(number, os.strerror(number))

    publish(store, 1)
    read, names = store.backend.read, store.backend.names
    if denied:

        def read_one(path: str) -> Iterator[bytes]:
            return fails() if path == denied else read(path)

        monkeypatch.setattr(store.backend, "read", read_one)
    else:
        monkeypatch.setattr(store.backend, "names", fails)
    assert store.newest() is None
    assert f"{store.address} cannot be read: {os.strerror(number)}" in store.last_error
    monkeypatch.setattr(store.backend, "read", read)
    monkeypatch.setattr(store.backend, "names", names)
    assert store.newest() is not None and store.last_error == ""


@pytest.mark.parametrize("step", [None, 1, 2])
@pytest.mark.parametrize("denied", ["RUN.json", "step_00000001/STABLE"])
def test_version_that_cannot_be_read_is_not_called_missing(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, denied: str, step: int | None
) -> None:
    publish(store, 1)
    read = store.backend.read

    def read_others(path: str, *, start: int = 0) -> Iterator[bytes]:
        if path == denied:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path, start=start)

    monkeypatch.setattr(store.backend, "read", read_others)
    with pytest.raises(StoreError, match=r"cannot be .*Permission denied"):
        version_of_step(store, step)


@pytest.mark.parametrize("address", ["/missing", "/dev/null", "http://127.0.0.1:1"])
def test_only_a_missing_store_has_no_error(address: str) -> None:
    store = WeightStore.open(address)
    assert store.newest() is None
    assert bool(store.last_error) == (address != "/missing")


# Invalid versions.


@pytest.mark.parametrize("damage", CHANGES)
def test_damaged_weights_are_not_loaded(store: WeightStore, damage: Callable[[Path], None]) -> None:
    version = publish(store, 1)
    damage(version.folder / WEIGHTS_FILE)
    with pytest.raises(StoreError, match="does not verify"):
        loaded(store, version)


def test_removed_version_is_reported_as_removed(store: WeightStore) -> None:
    version = publish(store, 1)
    store.backend.remove(version.folder.name)
    with pytest.raises(StoreError, match="was removed meanwhile"):
        loaded(store, version)


# Claiming.


def test_store_can_be_claimed_again_by_its_run_only(store: WeightStore) -> None:
    WeightStore.open(store.folder).claim("run")
    assert store.run_id == "run"
    assert WeightStore.open(store.folder.parent).run_id is None
    with pytest.raises(StoreError, match=r"belongs to run run, not to run-2.*--weights\.dir"):
        WeightStore.open(store.folder).claim("run-2")


@pytest.mark.parametrize("folder", ["{}/weights", "{}/weights/below", "/proc/weights"])
def test_claim_of_a_file_or_a_read_only_folder_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(StoreError, match=r"cannot be written.*--weights\.dir"):
        WeightStore.open(folder.format(tmp_path)).claim("run")


@pytest.mark.parametrize("mount_point_stays", [True, False])
def test_known_store_that_is_gone_is_not_created(
    store: WeightStore, tmp_path: Path, mount_point_stays: bool
) -> None:
    store.folder.rename(tmp_path / "away")
    if mount_point_stays:
        store.folder.mkdir()
    with pytest.raises(OutageError, match=r"is gone; is it mounted\? Mount it.*--weights\.dir"):
        WeightStore.open(store.folder).claim("run", known=True, create=False)
    assert not store.folder.exists() or os.listdir(store.folder) == []
    if mount_point_stays:
        store.folder.rmdir()
    (tmp_path / "away").rename(store.folder)
    WeightStore.open(store.folder).claim("run", known=True, create=False)


def test_claim_reports_a_mount_that_is_lost_meanwhile_as_gone(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = WeightStore.open(store.folder)

    def lose_mount() -> None:
        store.folder.rename(store.folder.with_name("elsewhere"))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(again.backend, "prepare", lose_mount)
    with pytest.raises(OutageError, match="is it mounted"):
        again.claim("run", known=True, create=False)


def use_all_descriptors(hard_limit: int) -> None:
    """Let every further open in this process fail; `open_file_limits` restores the limit."""
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard_limit))


@pytest.mark.parametrize("create", [True, False])
def test_claim_without_a_file_descriptor_names_the_remedy(
    store: WeightStore, open_file_limits: tuple[int, int], create: bool
) -> None:
    again = WeightStore.open(store.folder)
    use_all_descriptors(open_file_limits[1])
    with pytest.raises(OutageError, match=r"Too many open files: .*\(ulimit -n\)$") as caught:
        again.claim("run", known=True, create=create)
    assert "mount" not in str(caught.value)
    resource.setrlimit(resource.RLIMIT_NOFILE, open_file_limits)
    again.claim("run", known=True, create=create)


# Publishing.


def test_publish_without_space_for_two_versions_is_refused(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = publish(store, 1).manifest.files[WEIGHTS_FILE][0]
    for free, fits in ((2 * size, True), (2 * size - 1, False)):
        monkeypatch.setattr(store.backend, "free_bytes", partial(int, free))
        if fits:
            publish(store, 2)
        else:
            with pytest.raises(StoreError, match="free"):
                publish(store, 3)
    assert store.numbers() == [1, 2]


def test_failed_publication_names_the_reason(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreError, match=r"cannot publish step 2 .*: No space left on device"):
        publish(store, 2)


def test_publish_without_a_file_descriptor_names_the_remedy(
    store: WeightStore, open_file_limits: tuple[int, int]
) -> None:
    use_all_descriptors(open_file_limits[1])
    with pytest.raises(StoreError, match=r"Too many open files: .*\(ulimit -n\)$"):
        publish(store, 1)


@pytest.mark.parametrize("mount_point_stays", [True, False])
def test_publish_never_writes_to_an_unmounted_folder(
    store: WeightStore, mount_point_stays: bool
) -> None:
    for file in store.folder.iterdir():
        file.unlink()
    if not mount_point_stays:
        store.folder.rmdir()
    with pytest.raises(StoreError, match="cannot publish step 1"):
        publish(store, 1)
    assert not store.folder.exists() or os.listdir(store.folder) == []


def test_folder_with_the_highest_number_does_not_stop_publishing(store: WeightStore) -> None:
    (store.folder / "step_99999999").mkdir()
    pruner = Pruner(store, Retention(last=2))
    versions = [publish(store, step, pruner=pruner) for step in range(4)]
    assert store.newest() == versions[-1]
    assert store.numbers() == [2, 3, 99_999_999]


# Models.


def test_keyframe_loads_with_from_pretrained(store: WeightStore, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(seed=3).bfloat16()
    model.config.save_pretrained(tmp_path / "origin")
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    companions = {
        **models.companion_files(models.EMBEDDED, tokenizer),
        **models.companion_files(tmp_path / "origin", tokenizer),
    }
    version = store.publish(1, models.weights_of(model), companions=companions)
    read = AutoModelForCausalLM.from_pretrained(version.folder, dtype=torch.bfloat16).state_dict()
    assert read["lm_head.weight"].shape == (TINY["vocab_size"], TINY["hidden_size"])
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())
    assert models.load_tokenizer(version.folder).get_vocab() == tokenizer.get_vocab()
