"""A local copy follows chains of deltas from any version; inconsistent versions are refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import CHANGES, flip_bit, remove
from weight_sets import COMPANIONS, loaded, names_in, publish, publish_chain, same, weights_at

from peralta_zmq import atomic_files
from peralta_zmq.errors import StoreError
from peralta_zmq.weights.replica import LocalReplica, load_version
from peralta_zmq.weights.store import DELTA_FILE, WEIGHTS_FILE, Version, WeightStore
from peralta_zmq.weights.tensor_set import FileTensors


@pytest.fixture
def replica(tmp_path: Path) -> LocalReplica:
    (tmp_path / "copy").mkdir()
    return LocalReplica(tmp_path / "copy")


def rewritten(store: WeightStore, version: Version, **fields: Any) -> Version | None:
    """The version with other manifest fields and a STABLE that matches."""
    manifest = json.loads((version.folder / "manifest.json").read_text())
    text = json.dumps({**manifest, **fields}).encode()
    (version.folder / "manifest.json").write_bytes(text)
    (version.folder / "STABLE").write_text(atomic_files.hashlib.sha256(text).hexdigest())
    return store.find(version.number)


def test_load_applies_a_chain_in_a_temporary_folder(store: WeightStore) -> None:
    with load_version(store, publish_chain(store, 5)[-1]) as folder:
        shutil.rmtree(store.folder)  # the copy does not need the store
        assert same(FileTensors(folder / WEIGHTS_FILE), weights_at(4))
        assert names_in(folder) == {WEIGHTS_FILE, *COMPANIONS, "replica.json"}
    assert not folder.exists()


def test_advance_reads_only_the_new_delta(store: WeightStore, replica: LocalReplica) -> None:
    first, second, third = publish_chain(store, 3)
    replica.advance(store, second)
    shutil.rmtree(first.folder)
    assert replica.advance(store, third) == third.size < 0.2 * first.size
    assert same(replica.tensors(), weights_at(2))


def test_advance_from_an_old_version_skips_to_the_newest_chain(
    store: WeightStore, replica: LocalReplica
) -> None:
    replica.advance(store, publish(store, 0))
    keyframe = publish(store, 50)
    newest = publish(store, 51, base=keyframe)
    shutil.rmtree(store.folder / "step_00000000")
    assert replica.advance(store, newest) == keyframe.size + newest.size
    assert same(replica.tensors(), weights_at(51))


def test_advance_to_a_rolled_back_step_works(store: WeightStore, replica: LocalReplica) -> None:
    replica.advance(store, publish_chain(store, 3)[-1])
    version = publish(store, 1)
    assert (version.number, version.kind) == (3, "keyframe")  # no number is used again
    assert store.newest() == WeightStore.open(store.folder).newest() == version
    replica.advance(store, version)
    assert same(replica.tensors(), weights_at(1))


def test_undamaged_copy_of_an_earlier_process_is_recovered(
    store: WeightStore, replica: LocalReplica
) -> None:
    versions = publish_chain(store, 3)
    replica.advance(store, versions[1])
    restarted = LocalReplica(replica.folder)
    recovered = restarted.recover()
    assert recovered is not None and recovered.weights_id == versions[1].weights_id
    assert restarted.advance(store, versions[2]) == versions[2].size
    flip_bit(replica.folder / WEIGHTS_FILE)
    assert LocalReplica(replica.folder).recover() is None


@pytest.mark.parametrize("name", COMPANIONS)
@pytest.mark.parametrize("damage", [remove, *CHANGES])
def test_copy_with_a_damaged_companion_is_read_again_at_once(
    store: WeightStore, replica: LocalReplica, damage: Callable[[Path], None], name: str
) -> None:
    first, second = publish_chain(store, 2)
    replica.advance(store, second)
    damage(replica.folder / name)
    restarted = LocalReplica(replica.folder)
    assert restarted.recover() is None
    assert restarted.advance(store, second) == first.size + second.size
    assert (replica.folder / name).read_bytes() == COMPANIONS[name]
    assert same(restarted.tensors(), weights_at(1))


def test_keyframe_replaces_all_files_of_the_one_before(
    store: WeightStore, replica: LocalReplica
) -> None:
    replica.advance(store, publish(store, 0))
    (replica.folder / "replica.json").unlink()  # the next process uses a copy that is not valid
    other = store.publish(1, weights_at(1), companions={"config.json": b"{}", "vocab.txt": b"a"})
    LocalReplica(replica.folder).advance(store, other)
    assert names_in(replica.folder) == {WEIGHTS_FILE, "config.json", "vocab.txt", "replica.json"}


def test_files_of_a_keyframe_are_fsynced(
    store: WeightStore, replica: LocalReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, int] = {}  # inode -> size
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", record)
    replica.advance(store, publish(store, 0))
    for name in names_in(replica.folder):
        file = replica.folder / name
        assert synced[file.stat().st_ino] == file.stat().st_size, name
    assert replica.folder.stat().st_ino in synced


# Keyframe or delta.


def test_delta_of_other_weights_becomes_a_keyframe(store: WeightStore) -> None:
    random = torch.Generator().manual_seed(0)
    old, new = ({"w": torch.randn(9000, generator=random).bfloat16()} for _ in range(2))
    first = store.publish(0, old, companions=COMPANIONS)
    second = store.publish(1, new, companions=COMPANIONS, base=(first, old))
    assert second.kind == "keyframe"
    assert same(loaded(store, second), new)


# Invalid versions.


def refuses(replica: LocalReplica, store: WeightStore, version: Version | None, match: str) -> None:
    assert version is not None
    with pytest.raises(StoreError, match=match) as caught:
        replica.advance(store, version)
    assert "\n" not in str(caught.value)


def test_missing_or_wrong_base_is_named_and_the_copy_stays(
    store: WeightStore, replica: LocalReplica
) -> None:
    versions = publish_chain(store, 4)
    replica.advance(store, versions[0])
    wrong = rewritten(store, versions[2], base="0" * 32)
    refuses(replica, store, wrong, "version 2 was computed from other weights than .* version 1")
    shutil.rmtree(versions[2].folder)
    refuses(replica, store, versions[3], "version 3 needs version 2, which is missing")
    assert same(replica.tensors(), weights_at(0)) and replica.version is not None


@pytest.mark.parametrize(
    "field, reason", [("result", "do not have the digest"), ("model", "another model")]
)
@pytest.mark.parametrize("number", [0, 1])
def test_wrong_digest_in_the_manifest_invalidates_the_copy(
    store: WeightStore, replica: LocalReplica, field: str, reason: str, number: int
) -> None:
    versions = publish_chain(store, 2)
    if (field, number) == ("result", 0):
        rewritten(store, versions[1], base="0" * 32)
    wrong = rewritten(store, versions[number], **{field: "0" * 32})
    refuses(replica, store, wrong, f"version {number} does not verify.*{reason}")
    assert replica.version is None and replica.recover() is None
    replica.advance(store, publish(store, 2))  # a keyframe repairs it
    assert same(replica.tensors(), weights_at(2))


def test_forged_tensor_of_an_impossible_shape_is_refused(
    store: WeightStore, replica: LocalReplica
) -> None:
    version = publish(store, 0)
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}}
    ).encode()
    content = struct.pack("<Q", len(header)) + header  # valid, with correct hashes
    (version.folder / WEIGHTS_FILE).write_bytes(content)
    entry = {"name": WEIGHTS_FILE, "bytes": len(content),
             "sha256": hashlib.sha256(content).hexdigest()}  # fmt: skip
    files = json.loads((version.folder / "manifest.json").read_text())["files"]
    others = [each for each in files if each["name"] != WEIGHTS_FILE]
    refuses(replica, store, rewritten(store, version, files=[entry, *others]), "has shape")


@pytest.mark.parametrize("size", [17 << 20, 90 << 20, 2**62])
def test_large_header_is_refused_after_one_chunk(
    store: WeightStore, replica: LocalReplica, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    version = publish(store, 0)
    with (version.folder / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", size))
        file.truncate(100 << 20)
    entry = {"name": WEIGHTS_FILE, "bytes": 100 << 20, "sha256": "0" * 64}
    large = rewritten(store, version, files=[entry])
    chunks, read = list[str](), store.backend.read

    def counted(path: str, *, start: int = 0) -> Iterator[bytes]:
        for chunk in read(path, start=start):
            chunks.append(path)
            yield chunk

    monkeypatch.setattr(store.backend, "read", counted)
    refuses(replica, store, large, f"does not verify: it has a header of {size} bytes")
    assert chunks.count(f"{version.folder.name}/{WEIGHTS_FILE}") == 1


@pytest.mark.parametrize("sizes", [[40 << 20], [90 << 20], [30 << 20] * 3])
def test_large_companions_are_refused_with_the_reason(store: WeightStore, sizes: list[int]) -> None:
    version = publish(store, 0)
    files = json.loads((version.folder / "manifest.json").read_text())["files"]
    large = [
        {"name": f"tokenizer{number}.json", "bytes": size, "sha256": "0" * 64}
        for number, size in enumerate(sizes)
    ]
    assert rewritten(store, version, files=[*files, *large]) is None
    assert store.newest() is None
    assert f"tokenizer0.json has {sizes[0]} bytes, too many" in store.last_error


def test_weights_of_a_lost_file_raise_an_error(store: WeightStore, replica: LocalReplica) -> None:
    replica.advance(store, publish(store, 0))
    tensors = replica.tensors()
    os.truncate(replica.folder / WEIGHTS_FILE, 200)  # a mapped file would raise SIGBUS
    with pytest.raises(OSError, match="Could not read tensor"):
        dict(tensors)


def test_third_mismatch_quarantines_a_version(store: WeightStore, replica: LocalReplica) -> None:
    versions = publish_chain(store, 2)
    flip_bit(versions[1].folder / DELTA_FILE)
    for _ in range(3):
        refuses(replica, store, versions[1], "does not verify")
    newest = store.newest()
    assert newest is not None and newest.number == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"number": 7}, {"number": "1"}, {"number": True}, {"step": -1}, {"step": float("inf")},
        {"parent": 1}, {"parent": 5}, {"parent": None}, {"depth": "1"}, {"kind": "patch"},
        {"kind": "keyframe"}, {"files": []}, {"result": 5}, {"base": []}, {"model": {}},
        {"run_id": 3}, {"lineage": 0.5}, {"step": 10**400}, {"step": 2**31}, {"lineage": 2**31},
        {"depth": 2**31}, {"files": [{"name": DELTA_FILE, "bytes": 2**63, "sha256": ""}]},
        {"unknown": "x" * (256 << 10)},
    ],
)  # fmt: skip
def test_inconsistent_manifest_is_ignored(store: WeightStore, fields: dict[str, Any]) -> None:
    versions = publish_chain(store, 2)
    assert rewritten(store, versions[1], **fields) is None
    newest = store.newest()
    assert newest is not None and newest.number == 0


def test_forged_version_with_a_very_high_number_does_not_stop_publishing(
    store: WeightStore,
) -> None:
    versions = [publish(store, 1)]
    forged = replace(versions[0], number=99_999_998, folder=store.folder / "step_99999998")
    shutil.copytree(versions[0].folder, forged.folder)
    assert rewritten(store, forged, number=forged.number) == store.newest()
    for step in (2, 3, 4):
        versions.append(publish(store, step, base=versions[-1]))
    assert [version.number for version in versions] == [1, 99_999_999, 3, 4]
    assert [version.parent for version in versions] == [-1, 1, -1, 3]


def test_delta_to_a_removed_version_becomes_a_keyframe(store: WeightStore) -> None:
    publish_chain(store, 3)
    version = publish(store, 1)  # number 3, as after a roll-back
    store.backend.remove(version.folder.name)
    again = publish(store, 2, base=version)
    assert (again.number, again.kind) == (4, "keyframe")  # number 3 is never used again


def test_versions_of_another_run_in_the_folder_are_ignored(
    store: WeightStore, tmp_path: Path
) -> None:
    good = publish(store, 1)
    other = WeightStore.open(tmp_path / "other")
    other.claim("run-2")
    shutil.copytree(publish(other, 9).folder, store.folder / "step_00000009")
    assert store.newest() == good
    with pytest.raises(StoreError, match="another run"):
        loaded(store, publish(other, 10))


def test_weights_of_another_model_are_refused_before_reading(
    store: WeightStore, replica: LocalReplica
) -> None:
    replica.advance(store, publish(store, 0))
    assert replica.version is not None
    other = store.publish(1, {"other": torch.zeros(2).bfloat16()}, companions={})
    with pytest.raises(StoreError, match="version 1 is of another model"):
        replica.advance(store, other, model=replica.version.field("model"))
    assert same(replica.tensors(), weights_at(0))
