"""A bucket keeps the store's contract: a local one of obstore, and a server that speaks S3.

The server is moto's, where `moto_server` is on PATH or named by PERALTA_MOTO_SERVER
(pip install 'moto[s3,server]', best into an environment of its own).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from weight_sets import chain_of, publish, same, weights_at

from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore

pytest.importorskip("obstore", reason="needs the extra s3: pip install 'peralta_zmq[s3]'")


MOTO = os.environ.get("PERALTA_MOTO_SERVER") or shutil.which("moto_server")


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A server that speaks S3, with one bucket."""
    if MOTO is None:
        pytest.skip("moto_server is not on PATH: pip install 'moto[s3,server]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    server = subprocess.Popen([MOTO, "-p", str(port)], stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        made = False
        while not made:
            assert server.poll() is None
            try:
                request = urllib.request.Request(f"{address}/bucket", method="PUT")
                with urllib.request.urlopen(request, timeout=10):
                    made = True
            except OSError:
                time.sleep(0.05)
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["file", "s3"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> WeightStore:
    from peralta_zmq.weights.object_store_backend import ObjectStoreBackend

    address = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT", request.getfixturevalue("endpoint"))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        address = "s3://bucket/run"
    opened = WeightStore(ObjectStoreBackend(address))
    opened.claim("run-1")
    return opened


def test_chains_are_published_and_read(store: WeightStore, tmp_path: Path) -> None:
    versions = chain_of(store, 3)
    assert store.newest() == versions[2]
    (tmp_path / "copy").mkdir()
    copy = LocalReplica(tmp_path / "copy")
    copy.advance(store, versions[2])
    assert same(copy.tensors(), weights_at(2))


def test_old_versions_are_removed(store: WeightStore) -> None:
    pruner = Pruner(store, Retention(last=2))
    for step in range(4):
        publish(store, step, pruner=pruner)
    assert [each.number for each in store.versions()] == [2, 3]


def test_version_without_stable_is_not_there(store: WeightStore) -> None:
    good = publish(store, 0)
    store.backend.write_file("step_00000001/manifest.json", b"{}")
    store.backend.write_file("step_00000001/delta.bin", b"begun")
    assert store.newest() == good
