from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import TINY, tiny_model

from peralta_zmq import atomic_files, models
from peralta_zmq.errors import GoneError, StoreError
from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.replica import load_version
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.tensors import MappedTensors
from peralta_zmq.weights.version import WEIGHTS, Version

TENSORS = {"a": torch.arange(6.0).reshape(2, 3).bfloat16(), "b": torch.ones(4).bfloat16()}
COMPANIONS = {"config.json": b"{}"}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    opened = WeightStore.open(tmp_path / "weights")
    opened.claim("run-1")
    return opened


def publish(store: WeightStore, step: int, **options: Any) -> Version:
    return store.publish(step, TENSORS, **{"companions": COMPANIONS, **options})


def publish_and_keep(store: WeightStore, step: int, *, keep_last: int) -> None:
    Pruner(store, Retention(keep_last)).prune(publish(store, step))


def loaded(store: WeightStore, version: Version) -> dict[str, torch.Tensor]:
    with load_version(store, version) as folder:
        return dict(MappedTensors(folder / WEIGHTS))


def visible(store: WeightStore) -> list[str]:
    """Names but for the lease."""
    return sorted(name for name in os.listdir(store.folder) if not name.startswith(".lease-"))


def numbers(store: WeightStore) -> list[int]:
    return list(atomic_files.steps_in(store.folder))


def test_published_tensors_come_back_bit_identical(store: WeightStore) -> None:
    read = loaded(store, publish(store, 1))
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    assert read.keys() == TENSORS.keys()


def test_newest_is_what_was_published_last(store: WeightStore) -> None:
    publish(store, 1)
    assert publish(store, 2) == store.newest()


def test_newest_of_an_empty_folder_is_none(store: WeightStore) -> None:
    assert store.newest() is None


def test_newest_of_a_folder_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert WeightStore.open(tmp_path / "nowhere").newest() is None


def test_step_1000_is_newer_than_step_999(store: WeightStore) -> None:
    publish(store, 999)
    publish(store, 1000)
    newest = store.newest()
    assert newest is not None and newest.step == 1000


def test_number_is_never_reused_after_a_roll_back(store: WeightStore) -> None:
    publish(store, 7)
    again = publish(store, 5)
    assert (again.number, again.step) == (8, 5)


def test_roll_back_is_the_newest_version(store: WeightStore) -> None:
    publish(store, 7)
    publish(store, 5)
    newest = store.newest()
    assert newest is not None and newest.step == 5


def test_other_readers_see_the_version(store: WeightStore) -> None:
    published = publish(store, 1)
    assert WeightStore.open(store.folder).newest() == published


def test_only_the_newest_are_kept(store: WeightStore) -> None:
    for step in range(5):
        publish_and_keep(store, step, keep_last=2)
    assert numbers(store) == [3, 4]


def test_loaded_copy_is_gone_afterwards(store: WeightStore) -> None:
    with load_version(store, publish(store, 1)) as folder:
        assert sorted(os.listdir(folder)) == ["config.json", WEIGHTS, "replica.json"]
    assert not folder.exists()


def test_copy_survives_a_prune_while_it_is_used(store: WeightStore) -> None:
    with load_version(store, publish(store, 1)) as folder:
        publish_and_keep(store, 2, keep_last=1)
        assert torch.equal(MappedTensors(folder / WEIGHTS)["a"], TENSORS["a"])


def test_pruned_version_says_look_again(store: WeightStore) -> None:
    old = publish(store, 1)
    publish_and_keep(store, 2, keep_last=1)
    with pytest.raises(StoreError, match="was removed meanwhile"):
        loaded(store, old)


# What a reader must not take.


def without_stable(folder: Path) -> None:
    (folder / "STABLE").unlink()


def without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def stable_of_another(folder: Path) -> None:
    (folder / "STABLE").write_text("0" * 64)


@pytest.mark.parametrize("harm", [without_stable, without_manifest, empty, stable_of_another])
def test_half_written_version_is_passed_over(
    store: WeightStore, harm: Callable[[Path], None]
) -> None:
    good = publish(store, 1)
    harm(publish(store, 2).folder)
    assert store.newest() == good


@pytest.mark.parametrize("step", [None, [], "x", float("inf"), {}])
def test_version_without_a_step_is_passed_over(store: WeightStore, step: Any) -> None:
    atomic_files.write_folder(store.folder / "step_00000009", {WEIGHTS: b"w"}, {"step": step})
    assert store.newest() is None


def test_version_without_weights_is_passed_over(store: WeightStore) -> None:
    atomic_files.write_folder(store.folder / "step_00000009", {"config.json": b"{}"}, {"step": 9})
    assert store.newest() is None


def test_stray_names_are_passed_over(store: WeightStore) -> None:
    good = publish(store, 1)
    for name in ("step_9", "step_99999999.bak", ".tmp-step_00000009-1", "lost+found"):
        (store.folder / name).mkdir()
    (store.folder / "step_00000008").write_text("a file")
    assert store.newest() == good


def truncated(content: bytes) -> bytes:
    return content[:-1]


def zero_tail(content: bytes) -> bytes:
    return content[:-2] + b"\0\0"


def bit_flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def too_long(content: bytes) -> bytes:
    return content + b"\0"


@pytest.mark.parametrize("damage", [truncated, zero_tail, bit_flip, too_long])
def test_damaged_weights_are_not_loaded(
    store: WeightStore, damage: Callable[[bytes], bytes]
) -> None:
    version = publish(store, 1)
    file = version.folder / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(StoreError, match="does not verify"):
        loaded(store, version)


def test_version_of_another_run_is_refused(store: WeightStore, tmp_path: Path) -> None:
    other = WeightStore.open(tmp_path / "other")
    other.claim("run-2")
    foreign = publish(other, 1)
    with pytest.raises(StoreError, match="another run"):
        loaded(store, foreign)


def test_quarantined_version_is_not_offered_again(store: WeightStore) -> None:
    good = publish(store, 1)
    store.quarantine(publish(store, 2))
    assert store.newest() == good


def test_version_after_a_quarantined_one_is_offered(store: WeightStore) -> None:
    store.quarantine(publish(store, 2))
    assert publish(store, 3) == store.newest()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_folder_that_cannot_be_listed_has_no_newest_for_now(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    publish(store, 1)

    def fails(folder: Any) -> list[str]:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "listdir", fails)
    assert store.newest() is None


def test_file_in_place_of_the_folder_has_no_newest(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    assert WeightStore.open(tmp_path / "weights").newest() is None


# What a writer must refuse.


def test_claim_makes_the_folder_this_runs(store: WeightStore) -> None:
    assert WeightStore.open(store.folder).run_id == "run-1"


def test_folder_can_be_claimed_again_by_its_run(store: WeightStore) -> None:
    WeightStore.open(store.folder).claim("run-1")
    assert store.run_id == "run-1"


def test_folder_of_another_run_is_refused_by_name(store: WeightStore) -> None:
    with pytest.raises(StoreError, match=r"belongs to run run-1, not to run-2.*--weights\.dir"):
        WeightStore.open(store.folder).claim("run-2")


def test_unclaimed_folder_has_no_run(tmp_path: Path) -> None:
    assert WeightStore.open(tmp_path).run_id is None


@pytest.mark.parametrize("inside", [".", "below"])
def test_file_in_place_of_the_folder_is_refused(tmp_path: Path, inside: str) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(StoreError, match=r"cannot be written.*--weights\.dir"):
        WeightStore.open(tmp_path / "weights" / inside).claim("run-1")


@pytest.mark.parametrize("root_stays", [True, False])
def test_folder_that_was_ours_and_is_gone_is_not_made_anew(
    store: WeightStore, tmp_path: Path, root_stays: bool
) -> None:
    store.folder.rename(tmp_path / "away")
    if root_stays:
        store.folder.mkdir()
    with pytest.raises(GoneError, match=r"is gone; is it mounted\? Mount it.*--weights\.dir"):
        WeightStore.open(store.folder).claim("run-1", known=True)
    assert not store.folder.exists() or os.listdir(store.folder) == []
    if root_stays:
        store.folder.rmdir()
    (tmp_path / "away").rename(store.folder)
    WeightStore.open(store.folder).claim("run-1", known=True)


@pytest.mark.skipif(not os.access("/proc/self", os.R_OK), reason="needs a read-only folder")
def test_read_only_folder_is_refused() -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        WeightStore.open(Path("/proc/weights")).claim("run-1")


def test_publishing_without_room_for_two_versions_is_refused(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = publish(store, 1).manifest.files[WEIGHTS][0]
    for room, fits in ((2 * size, True), (2 * size - 1, False)):
        space = SimpleNamespace(f_bavail=room, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda folder, space=space: space)
        if fits:
            publish(store, 2)
        else:
            with pytest.raises(StoreError, match="free"):
                publish(store, 3)
    assert numbers(store) == [1, 2]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_that_refuses_leaves_the_older_version_the_newest(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    good = publish(store, 1)

    def fails(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreError, match=os.strerror(code)):
        publish(store, 2)
    assert store.newest() == good
    assert visible(store) == ["RUN.json", "step_00000001"]


def test_publishing_goes_on_after_the_disk_recovers(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=1))
        with pytest.raises(StoreError):
            publish(store, 1)
    assert publish(store, 2) == store.newest()


@pytest.mark.parametrize("root_stays", [True, False])
def test_vanished_mount_is_not_written_to(store: WeightStore, root_stays: bool) -> None:
    for file in store.folder.iterdir():
        file.unlink()
    if not root_stays:
        store.folder.rmdir()
    with pytest.raises(StoreError, match="cannot publish step 1"):
        publish(store, 1)
    assert not store.folder.exists() or os.listdir(store.folder) == []


# Whole models.


def test_tied_tensors_are_published_once(store: WeightStore) -> None:
    model = tiny_model()
    version = store.publish(1, models.weights_of(model), companions={})
    names = loaded(store, version).keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_published_version_loads_with_from_pretrained(store: WeightStore, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(seed=3).bfloat16()
    model.config.save_pretrained(tmp_path / "origin")
    companions = models.companion_files(tmp_path / "origin")
    version = store.publish(1, models.weights_of(model), companions=companions)
    read = AutoModelForCausalLM.from_pretrained(version.folder, dtype=torch.bfloat16)
    theirs = read.state_dict()
    assert theirs["lm_head.weight"].shape == (TINY["vocab_size"], TINY["hidden_size"])
    assert all(torch.equal(theirs[name], tensor) for name, tensor in model.state_dict().items())


def test_published_version_of_the_embedded_base_has_its_tokenizer(store: WeightStore) -> None:
    companions = models.companion_files(models.EMBEDDED)
    version = store.publish(1, TENSORS, companions=companions)
    assert models.load_tokenizer(version.folder).get_vocab() == (
        models.load_tokenizer(models.EMBEDDED).get_vocab()
    )
