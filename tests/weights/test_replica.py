"""Deltas lead from any version that a reader has to the newest; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_sets import COMPANIONS, chain_of, publish, same, weights_at

from peralta_zmq import atomic_files
from peralta_zmq.errors import StoreError
from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.replica import LocalReplica, export_step, load_version
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.tensors import MappedTensors
from peralta_zmq.weights.version import DELTA, WEIGHTS, Version


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    opened = WeightStore.open(tmp_path / "weights")
    opened.claim("run-1")
    return opened


@pytest.fixture
def copy(tmp_path: Path) -> LocalReplica:
    (tmp_path / "copy").mkdir()
    return LocalReplica(tmp_path / "copy")


def rewrite(version: Version, **fields: Any) -> None:
    """Let the manifest say something else, with a STABLE that agrees."""
    said = json.loads((version.folder / "manifest.json").read_text())
    text = json.dumps({**said, **fields}).encode()
    (version.folder / "manifest.json").write_bytes(text)
    digest = atomic_files.hashlib.sha256(text).hexdigest()
    (version.folder / "STABLE").write_text(digest)


def test_joiner_loads_a_keyframe_and_the_deltas_after_it(store: WeightStore) -> None:
    newest = chain_of(store, 5)[-1]
    with load_version(store, newest) as folder:
        assert same(MappedTensors(folder / WEIGHTS), weights_at(4))
        assert sorted(each.name for each in folder.iterdir()) == [
            "config.json", WEIGHTS, "replica.json", "tokenizer.json",
        ]  # fmt: skip


def test_reader_that_follows_reads_the_new_delta_only(
    store: WeightStore, copy: LocalReplica
) -> None:
    first, second, third = chain_of(store, 3)
    copy.advance(store, second)
    shutil.rmtree(first.folder)  # not needed any more
    assert copy.advance(store, third) == third.size < 0.2 * first.size
    assert same(copy.tensors(), weights_at(2))


def test_reader_far_behind_skips_to_the_newest_chain(
    store: WeightStore, copy: LocalReplica
) -> None:
    copy.advance(store, publish(store, 0))
    keyframe = publish(store, 50)
    newest = publish(store, 51, base=keyframe)
    shutil.rmtree(store.folder / "step_00000000")
    assert copy.advance(store, newest) == keyframe.size + newest.size
    assert same(copy.tensors(), weights_at(51))


def test_copy_of_an_earlier_process_is_recovered(store: WeightStore, copy: LocalReplica) -> None:
    versions = chain_of(store, 3)
    copy.advance(store, versions[1])
    again = LocalReplica(copy.folder)
    recovered = again.recover()
    assert recovered is not None and recovered.weights_id == versions[1].weights_id
    assert again.advance(store, versions[2]) == versions[2].size


def test_copy_with_a_flipped_bit_is_not_recovered(store: WeightStore, copy: LocalReplica) -> None:
    copy.advance(store, publish(store, 1))
    file = copy.folder / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert LocalReplica(copy.folder).recover() is None


def test_roll_back_is_a_version_like_any_other(store: WeightStore, copy: LocalReplica) -> None:
    copy.advance(store, chain_of(store, 3)[-1])
    again = publish(store, 1)
    assert (again.number, again.kind) == (3, "keyframe")
    copy.advance(store, again)
    assert same(copy.tensors(), weights_at(1))


def test_delta_that_would_be_large_becomes_a_keyframe(store: WeightStore) -> None:
    random = torch.Generator().manual_seed(0)
    old, new = ({"w": torch.randn(9000, generator=random).bfloat16()} for _ in range(2))
    first = store.publish(0, old, companions=COMPANIONS)
    second = store.publish(1, new, companions=COMPANIONS, base=(first, old))
    assert second.kind == "keyframe"
    with load_version(store, second) as folder:
        assert same(MappedTensors(folder / WEIGHTS), new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_formats_are_published_too(store: WeightStore, dtype: torch.dtype) -> None:
    old = {"w": torch.randn(2000).to(dtype)}
    new = {"w": old["w"] * 1.001}
    first = store.publish(0, old, companions=COMPANIONS)
    second = store.publish(1, new, companions=COMPANIONS, base=(first, old))
    assert second.kind == ("keyframe" if dtype is torch.float32 else "delta")
    with load_version(store, second) as folder:
        assert torch.equal(MappedTensors(folder / WEIGHTS)["w"], new["w"])


def test_adapters_are_sent_whole(store: WeightStore) -> None:
    adapter = {"q.lora_A.weight": torch.zeros(4, 9).bfloat16()}
    first = store.publish(0, adapter, companions={})
    assert store.publish(1, adapter, companions={}, base=(first, adapter)).kind == "keyframe"


def test_what_a_kept_delta_is_made_from_stays(store: WeightStore) -> None:
    versions = chain_of(store, 4)
    pruner = Pruner(store, Retention(last=1))
    newest = publish(store, 4, base=versions[-1], pruner=pruner)
    assert list(atomic_files.steps_in(store.folder)) == [0, 1, 2, 3, 4]
    publish(store, 5, pruner=pruner)  # a keyframe needs nobody
    assert list(atomic_files.steps_in(store.folder)) == [5]
    assert newest.number == 4


def test_a_restarted_trainer_keeps_them_too(store: WeightStore) -> None:
    newest = chain_of(store, 3)[-1]
    Pruner(WeightStore.open(store.folder), Retention(last=1)).prune(newest)
    assert list(atomic_files.steps_in(store.folder)) == [0, 1, 2]


def test_every_nth_version_is_kept_for_good(store: WeightStore) -> None:
    pruner = Pruner(store, Retention(last=1, interval=3))
    for step in range(7):
        publish(store, step, pruner=pruner)
    assert list(atomic_files.steps_in(store.folder)) == [0, 3, 6]


# What a reader must not take.


def refuses(copy: LocalReplica, store: WeightStore, version: Version, match: str) -> None:
    with pytest.raises(StoreError, match=match) as caught:
        copy.advance(store, version)
    assert "\n" not in str(caught.value)


def test_delta_without_its_base_is_named_and_the_copy_stays(
    store: WeightStore, copy: LocalReplica
) -> None:
    versions = chain_of(store, 4)
    copy.advance(store, versions[0])
    shutil.rmtree(versions[2].folder)
    refuses(copy, store, versions[3], "version 3 needs version 2, which is missing or quarantined")
    assert same(copy.tensors(), weights_at(0)) and copy.version is not None


def test_delta_of_another_base_is_named_and_the_copy_stays(
    store: WeightStore, copy: LocalReplica
) -> None:
    versions = chain_of(store, 3)
    copy.advance(store, versions[0])
    rewrite(versions[2], base="0" * 32)
    lying = store.find(2)
    assert lying is not None
    refuses(copy, store, lying, "version 2 has another base than version 1")
    assert same(copy.tensors(), weights_at(0)) and copy.version is not None


@pytest.mark.parametrize(
    "field, says", [("result", "do not have the digest"), ("model", "another model")]
)
@pytest.mark.parametrize("number", [0, 1])
def test_manifest_that_lies_about_the_weights_is_named(
    store: WeightStore, copy: LocalReplica, field: str, says: str, number: int
) -> None:
    versions = chain_of(store, 2)
    rewrite(versions[number], **{field: "0" * 32})
    if (field, number) == ("result", 0):
        rewrite(versions[1], base="0" * 32)
    lying = store.find(number)
    assert lying is not None
    refuses(copy, store, lying, f"version {number} does not verify.*{says}")
    assert copy.version is None and copy.recover() is None


def test_after_a_lie_a_keyframe_repairs_the_copy(store: WeightStore, copy: LocalReplica) -> None:
    versions = chain_of(store, 2)
    copy.advance(store, versions[0])
    rewrite(versions[1], result="0" * 32)
    lying = store.find(1)
    assert lying is not None
    refuses(copy, store, lying, "does not verify")
    copy.advance(store, publish(store, 2))
    assert same(copy.tensors(), weights_at(2))


def test_a_version_that_never_verifies_is_put_away_after_three_tries(
    store: WeightStore, copy: LocalReplica
) -> None:
    versions = chain_of(store, 2)
    file = versions[1].folder / DELTA
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    for _ in range(3):
        refuses(copy, store, versions[1], "does not verify")
    newest = store.newest()
    assert newest is not None and newest.number == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"number": 7}, {"number": "1"}, {"number": True}, {"step": -1}, {"step": 1.5},
        {"parent": 1}, {"parent": 5}, {"parent": None}, {"depth": "1"}, {"kind": "patch"},
        {"kind": "keyframe"}, {"files": []}, {"result": 5}, {"base": []}, {"model": {}},
        {"run_id": 3}, {"line": 0.5},
    ],
)  # fmt: skip
def test_manifest_that_makes_no_sense_is_passed_over(
    store: WeightStore, fields: dict[str, Any]
) -> None:
    versions = chain_of(store, 2)
    rewrite(versions[1], **fields)
    newest = store.newest()
    assert newest is not None and newest.number == 0


def test_versions_of_a_foreign_run_in_the_folder_are_passed_over(
    store: WeightStore, tmp_path: Path
) -> None:
    good = publish(store, 1)
    other = WeightStore.open(tmp_path / "other")
    other.claim("run-2")
    shutil.copytree(publish(other, 9).folder, store.folder / "step_00000009")
    assert store.newest() == good


def test_weights_of_another_model_are_refused_before_a_byte_is_read(
    store: WeightStore, copy: LocalReplica
) -> None:
    copy.advance(store, publish(store, 0))
    assert copy.version is not None
    other = store.publish(1, {"other": torch.zeros(2).bfloat16()}, companions={})
    with pytest.raises(StoreError, match="version 1 is of another model"):
        copy.advance(store, other, model=copy.version.field("model"))
    assert same(copy.tensors(), weights_at(0))


# Export.


def test_any_step_is_exported_with_its_companions(store: WeightStore, tmp_path: Path) -> None:
    chain_of(store, 4)
    export_step(store, 2, tmp_path / "out")
    assert same(MappedTensors(tmp_path / "out" / WEIGHTS), weights_at(2))
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        "config.json", WEIGHTS, "tokenizer.json",
    ]  # fmt: skip


def test_exporting_a_step_that_is_not_there_names_those_that_are(
    store: WeightStore, tmp_path: Path
) -> None:
    chain_of(store, 2)
    with pytest.raises(StoreError, match=r"no version of step 9.*available steps: 0, 1"):
        export_step(store, 9, tmp_path / "out")


def test_exporting_over_something_is_refused(store: WeightStore, tmp_path: Path) -> None:
    chain_of(store, 1)
    with pytest.raises(StoreError, match="exists; choose"):
        export_step(store, 0, tmp_path)
