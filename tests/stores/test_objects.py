"""A bucket keeps the store's contract; obstore's own local bucket stands for a server here."""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.stores.copy import Copy
from peralta_zmq.stores.store import WeightStore
from weight_sets import chain_of, publish, same, weights_at

pytest.importorskip("obstore", reason="needs the extra s3: pip install 'peralta_zmq[s3]'")


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    from peralta_zmq.stores.objects import Bucket

    (tmp_path / "bucket").mkdir()
    opened = WeightStore(Bucket(f"file://{tmp_path}/bucket"))
    opened.claim("run-1")
    return opened


def test_chains_are_published_and_read(store: WeightStore, tmp_path: Path) -> None:
    versions = chain_of(store, 3)
    assert store.newest() == versions[2]
    (tmp_path / "copy").mkdir()
    copy = Copy(tmp_path / "copy")
    copy.advance(store, versions[2])
    assert same(copy.tensors(), weights_at(2))


def test_old_versions_are_removed(store: WeightStore) -> None:
    for step in range(4):
        publish(store, step, keep_last=2)
    assert [each.number for each in store.versions()] == [2, 3]


def test_version_without_stable_is_not_there(store: WeightStore, tmp_path: Path) -> None:
    good = publish(store, 0)
    torn = publish(store, 1)
    (tmp_path / "bucket" / torn.folder.name / "STABLE").unlink()
    assert store.newest() == good
