"""Two machines without a shared folder: the trainer serves its weights, connections break."""

from __future__ import annotations

import gc
import http.client
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bad_network import Break, Slow
from sockets import eventually
from weight_sets import COMPANIONS, publish, publish_chain, same, weights_at

from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.http_server import HttpServer
from peralta_zmq.weights.backends import open_backend
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.server import serve_weights
from peralta_zmq.weights.store import WeightStore, folder_name
from peralta_zmq.weights.subscriber import WeightSubscriber
from tools.link_proxy import LinkProxy

TOKEN = "0123456789abcdef"


@pytest.fixture
def server(store: WeightStore) -> Iterator[HttpServer]:
    with closing(serve_weights(store.folder, host="127.0.0.1", port=0, token=TOKEN)) as opened:
        yield opened


def client_of(server: HttpServer, token: str | None = TOKEN) -> WeightStore:
    return WeightStore.open(f"http://127.0.0.1:{server.port}", token=token)


def get(server: HttpServer, path: str, **headers: str) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}", **headers})
        response = connection.getresponse()
        return response.status, response.read()


def test_subscriber_follows_over_http(
    store: WeightStore, server: HttpServer, tmp_path: Path
) -> None:
    versions = publish_chain(store, 3)
    remote = client_of(server)
    with closing(WeightSubscriber(remote, tmp_path / "copy", poll_seconds=0.05)) as subscriber:
        pending = subscriber.poll(timeout=20)
        assert pending is not None and pending.version.weights_id == versions[2].weights_id
        assert same(pending.tensors, weights_at(2))
        subscriber.accept()
        newest = publish(store, 3, base=versions[2])
        pending = subscriber.poll(timeout=20)
        assert pending is not None and pending.bytes_read == newest.size
        assert same(pending.tensors, weights_at(3))


def test_broken_transfer_is_resumed(store: WeightStore, server: HttpServer, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(200_000, generator=random).bfloat16()}
    store.publish(0, weights, companions=COMPANIONS)
    (tmp_path / "copy").mkdir()
    replica = LocalReplica(tmp_path / "copy")
    with LinkProxy(server.port, num_ports=1) as link:
        link.damage = Break(150_000)
        remote = WeightStore.open(f"http://127.0.0.1:{link.port}", token=TOKEN)
        newest = remote.newest()
        assert newest is not None
        replica.advance(remote, newest)
    assert same(replica.tensors(), weights)


def test_wrong_token_is_refused(store: WeightStore, server: HttpServer) -> None:
    publish(store, 0)
    assert get(server, "/", Authorization="Bearer wrong")[0] == 401
    client = client_of(server, None)
    assert client.newest() is None and "requires the password" in client.last_error
    with pytest.raises(PermissionError, match=r"requires the password in security\.token_file"):
        client_of(server, "f" * 16).backend.names()


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/step_00000000/../RUN.json", "/step_00000000/.hidden", "/etc/passwd",
     "/step_00000000/%2e%2e", "//etc/passwd", "/.lock-1", "/step_00000000/a/b", "/step_0000000/x"],
)  # fmt: skip
def test_server_serves_nothing_but_versions(
    store: WeightStore, server: HttpServer, path: str
) -> None:
    publish(store, 0)
    names = (".lock-1", "step_0000000/x", "step_00000000/.hidden", "step_00000000/a/b")
    for file in map(store.folder.joinpath, names):
        file.parent.mkdir(exist_ok=True)
        file.write_text("not served")
    assert get(server, path) == (404, b"")


def test_20000_versions_are_listed(store: WeightStore, server: HttpServer) -> None:
    for number in range(20_000):
        (store.folder / folder_name(number)).mkdir()
    assert client_of(server).numbers() == list(range(20_000))


@pytest.mark.parametrize(
    "kind", ["link to a file", "link to a version", "pipe", "folder", "linked run file"]
)
def test_server_serves_only_regular_files_of_the_folder(
    store: WeightStore, server: HttpServer, tmp_path: Path, kind: str
) -> None:
    version = publish(store, 0)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "manifest.json").write_text("not of the run")
    path = version.folder / "manifest.json"
    if kind == "linked run file":
        path = store.folder / "RUN.json"
    path.unlink()
    if kind in ("link to a file", "linked run file"):
        path.symlink_to(secret / "manifest.json")
    elif kind == "link to a version":
        shutil.rmtree(version.folder)
        version.folder.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert get(server, f"/{path.relative_to(store.folder)}") == (404, b"")


def test_server_follows_a_link_to_the_weights_folder(store: WeightStore, tmp_path: Path) -> None:
    version = publish(store, 0)
    (tmp_path / "link").symlink_to(store.folder)
    with closing(serve_weights(tmp_path / "link", host="127.0.0.1", port=0, token=TOKEN)) as server:
        assert get(server, f"/{version.folder.name}/STABLE")[0] == 200


def test_server_honours_ranges(store: WeightStore, server: HttpServer) -> None:
    version = publish(store, 0)
    content = (version.folder / "manifest.json").read_bytes()
    path = f"/{version.folder.name}/manifest.json"
    assert get(server, path) == (200, content)
    assert get(server, path, Range="bytes=10-") == (206, content[10:])
    assert get(server, path, Range="bytes=99999999-") == (206, b"")
    assert get(server, path, Range="bytes=-x") == (200, content)


def test_disconnected_client_leaves_no_reading_mark(store: WeightStore, server: HttpServer) -> None:
    version = publish(store, 0)
    with (version.folder / "config.json").open("wb") as file:
        file.truncate(64 << 20)  # more than the buffers of a connection hold
    gc.disable()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        with closing(connection):
            headers = {"Authorization": f"Bearer {TOKEN}"}
            connection.request("GET", f"/{version.folder.name}/config.json", headers=headers)
            connection.getresponse().read(1000)
            assert store.backend.locks.being_read() == {version.folder.name}
        eventually(lambda: not store.backend.locks.being_read())
    finally:
        gc.enable()


def test_http_store_cannot_be_published_to(server: HttpServer) -> None:
    with pytest.raises(StoreError, match="is read-only"):
        client_of(server).claim("run")


@pytest.mark.parametrize(
    "address",
    [
        "ftp://x",
        "http://",
        "http://host:99999",
        "http://host:1/x",
        "http://[::1",
        "http://a b:1",
    ],
)
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is (neither a folder nor|not of the form) http://HOST:PORT"
    ):
        open_backend(address)


# Slow links.


def test_subscriber_on_a_slow_link_warns(
    store: WeightStore, server: HttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(40_000, generator=random).bfloat16()}  # 80 kB: 0.6 s
    with LinkProxy(server.port, num_ports=1) as link:
        link.damage = Slow(bits_per_s=1e6)
        remote = WeightStore.open(f"http://127.0.0.1:{link.port}", token=TOKEN)
        with closing(WeightSubscriber(remote, tmp_path / "copy", poll_seconds=0.05)) as subscriber:
            for step in itertools.count():
                store.publish(step, weights, companions=COMPANIONS)
                if subscriber.poll(timeout=0.1):
                    subscriber.accept()
                if "this link cannot keep up" in caplog.text:
                    break
    assert "a version of 0.1 MB takes" in caplog.text


def test_server_without_a_token_or_on_a_used_port_is_refused(
    store: WeightStore, server: HttpServer
) -> None:
    with pytest.raises(ConfigError, match=r"set security\.token_file"):
        serve_weights(store.folder, host="0.0.0.0", port=0, token=None)
    with pytest.raises(ConfigError, match=r"weights\.serve_port \d+ cannot be used"):
        serve_weights(store.folder, host="127.0.0.1", port=server.port, token=None)


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost", "0.0.0.0"])
def test_server_listens_on_what_wire_bind_may_be(store: WeightStore, host: str) -> None:
    with closing(serve_weights(store.folder, host=host, port=0, token=TOKEN)) as server:
        address = "[::1]" if ":" in host else "127.0.0.1"
        backend = open_backend(f"http://{address}:{server.port}", token=TOKEN)
        assert list(backend.names()) == []


@pytest.mark.parametrize("host", ["203.0.113.7", "eth99", "a..b", "2001:db8::1"])
def test_bad_wire_bind_is_not_reported_as_a_bad_port(store: WeightStore, host: str) -> None:
    with pytest.raises(ConfigError, match=f"^wire.bind {host}, port 0 cannot be used"):
        serve_weights(store.folder, host=host, port=0, token=TOKEN)
