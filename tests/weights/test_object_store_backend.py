"""Object stores fulfil the contract of a weight store: a local one of obstore and an S3 server.

The server is moto's, if `moto_server` is on PATH or named by PERALTA_MOTO_SERVER
(pip install 'moto[s3,server]' in a separate environment).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from weight_sets import publish, publish_chain, same, weights_at

from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore
from tools.link_proxy import free_ports

pytest.importorskip("obstore", reason="needs the extra s3: pip install 'peralta_zmq[s3]'")


MOTO = os.environ.get("PERALTA_MOTO_SERVER") or shutil.which("moto_server")


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Address of an S3 server with one bucket."""
    if MOTO is None:
        pytest.skip("moto_server is not on PATH: pip install 'moto[s3,server]'")
    port = free_ports()
    server = subprocess.Popen([MOTO, "-p", str(port)], stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        create_bucket(server, address)
        yield address
    finally:
        server.kill()
        server.wait()


def create_bucket(server: subprocess.Popen[bytes], address: str) -> None:
    """Retry until the server has started."""
    while server.poll() is None:
        try:
            request = urllib.request.Request(f"{address}/bucket", method="PUT")
            with urllib.request.urlopen(request, timeout=10):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"moto_server exited with code {server.returncode}")


@pytest.fixture(params=["file", "s3"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> WeightStore:
    from peralta_zmq.weights.backends import ObjectStoreBackend

    address = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT", request.getfixturevalue("endpoint"))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        address = "s3://bucket/run"
    opened = WeightStore(ObjectStoreBackend(address))
    opened.claim("run")
    return opened


def test_chain_is_published_and_read(store: WeightStore, tmp_path: Path) -> None:
    versions = publish_chain(store, 3)
    assert store.newest() == versions[2]
    (tmp_path / "copy").mkdir()
    replica = LocalReplica(tmp_path / "copy")
    replica.advance(store, versions[2])
    assert same(replica.tensors(), weights_at(2))


def test_pruning_removes_old_versions(store: WeightStore) -> None:
    pruner = Pruner(store, Retention(last=2))
    for step in range(4):
        publish(store, step, pruner=pruner)
    assert [version.number for version in store.versions()] == [2, 3]


def test_newest_ignores_a_version_without_stable(store: WeightStore) -> None:
    good = publish(store, 0)
    store.backend.write_file("step_00000001/manifest.json", b"{}")
    store.backend.write_file("step_00000001/delta.bin", b"partial")
    assert store.newest() == good
