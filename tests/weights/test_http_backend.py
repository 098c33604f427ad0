"""Two machines without a shared folder: the trainer serves, a generator follows, links break."""

from __future__ import annotations

import http.client
import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_sets import COMPANIONS, chain_of, publish, published, same, weights_at

from benchmarks.throttle import Link
from peralta_zmq.atomic_files import read_private_token
from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.weights.backends import open_backend
from peralta_zmq.weights.http_backend import HttpBackend, WeightServer
from peralta_zmq.weights.publisher import WeightPublisher
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import LinkSpeedCheck, WeightSubscriber, link_warning

TOKEN = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    opened = WeightStore.open(tmp_path / "weights")
    opened.claim("run-1")
    return opened


@pytest.fixture
def server(store: WeightStore) -> Iterator[WeightServer]:
    with closing(WeightServer(store.folder, host="127.0.0.1", port=0, token=TOKEN)) as opened:
        yield opened


def reader(port: int, token: str | None = TOKEN) -> WeightStore:
    return WeightStore(open_backend(f"http://127.0.0.1:{port}", token=token))


def get(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}", **headers})
        response = connection.getresponse()
        return response.status, response.read()


def test_follower_serves_what_the_trainer_published(
    store: WeightStore, server: WeightServer, tmp_path: Path
) -> None:
    versions = chain_of(store, 3)
    far = reader(server.port)
    with closing(WeightSubscriber(far, tmp_path / "copy", poll_seconds=0.05)) as follower:
        staged = follower.poll(timeout=20)
        assert staged is not None and staged.version.weights_id == versions[2].weights_id
        assert same(staged.tensors, weights_at(2))
        follower.accept()
        last = publish(store, 3, base=versions[2])
        staged = follower.poll(timeout=20)
        assert staged is not None and staged.bytes_read == last.size
        assert same(staged.tensors, weights_at(3))


def test_broken_connections_are_taken_up_where_they_broke(
    store: WeightStore, server: WeightServer, tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(200_000, generator=random).bfloat16()}
    store.publish(0, weights, companions=COMPANIONS)
    (tmp_path / "copy").mkdir()
    copy = LocalReplica(tmp_path / "copy")
    with closing(Link(server.port, breaks_after=150_000)) as link:
        far = WeightStore(HttpBackend(link.address, token=TOKEN))
        newest = far.newest()
        assert newest is not None
        copy.advance(far, newest)
    assert same(copy.tensors(), weights)


def test_nobody_there_has_no_newest(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    assert reader(port).newest() is None


def test_wrong_password_is_refused(store: WeightStore, server: WeightServer) -> None:
    publish(store, 0)
    assert get(server.port, "/", Authorization="Bearer wrong")[0] == 401
    assert reader(server.port, None).newest() is None
    with pytest.raises(PermissionError, match=r"requires the password in weights\.token_file"):
        reader(server.port, "f" * 16).backend.names()


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/step_00000000/../RUN.json", "/step_00000000/.hidden", "/etc/passwd",
     "/step_00000000/%2e%2e", "//etc/passwd", "/.lease-1", "/step_00000000/a/b", "/step_0000000"],
)  # fmt: skip
def test_only_versions_are_served(store: WeightStore, server: WeightServer, path: str) -> None:
    publish(store, 0)
    (store.folder / "step_00000000" / ".hidden").write_text("x")
    assert get(server.port, path) == (404, b"")


def test_ranges_begin_where_asked(store: WeightStore, server: WeightServer) -> None:
    version = publish(store, 0)
    whole = (version.folder / "manifest.json").read_bytes()
    path = f"/{version.folder.name}/manifest.json"
    assert get(server.port, path) == (200, whole)
    assert get(server.port, path, Range="bytes=10-") == (206, whole[10:])
    assert get(server.port, path, Range="bytes=99999999-") == (206, b"")
    assert get(server.port, path, Range="bytes=-x") == (200, whole)


def test_served_place_cannot_be_published_to(server: WeightServer) -> None:
    with pytest.raises(StoreError, match="is read-only"):
        reader(server.port).claim("run-1")


def test_serving_to_a_network_without_a_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set weights\.token_file"):
        WeightServer(tmp_path, host="0.0.0.0", port=0, token=None)


def test_port_in_use_is_refused(store: WeightStore, server: WeightServer) -> None:
    with pytest.raises(ConfigError, match=r"weights\.serve_port \d+ cannot be used"):
        WeightServer(store.folder, host="127.0.0.1", port=server.port, token=None)


@pytest.mark.parametrize(
    "mode, text, match",
    [(0o644, TOKEN, "chmod 600"), (0o600, "short", "weak password"), (None, "", "cannot be read")],
)
def test_password_file_is_checked(tmp_path: Path, mode: Any, text: str, match: str) -> None:
    file = tmp_path / "token"
    if mode is not None:
        file.write_text(text)
        os.chmod(file, mode)
    with pytest.raises(ConfigError, match=match):
        read_private_token(str(file))


def test_password_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN + "\n")
    assert read_private_token(str(file)) == TOKEN
    assert read_private_token(None) is None


@pytest.mark.parametrize("address", ["http://", "http://host:99999", "http://host:1/path"])
def test_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not http://HOST:PORT"):
        open_backend(address)


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'ftp://x' is neither"):
        open_backend("ftp://x")


def test_link_that_is_fast_enough_says_nothing() -> None:
    assert link_warning(28e6, 2.5e6, 12.0) is None


def test_link_that_is_too_slow_says_by_how_much() -> None:
    said = link_warning(1.19e9, 2.5e6, 30.0)  # 476 s
    assert said is not None and said.startswith("this link cannot keep up: ")
    assert "476.0 s" in said and "every 16th version" in said


def versions_a_second_apart(judge: LinkSpeedCheck, *sizes: float) -> list[str | None]:
    return [
        judge.add(number, int(size), noticed=float(number), bytes_per_second=1e6)
        for number, size in enumerate(sizes)
    ]


def test_link_is_judged_by_two_slow_versions_and_once() -> None:
    said = versions_a_second_apart(LinkSpeedCheck(), 9e6, 9e6, 2e5, 2e6, 3e6, 9e6)
    assert [bool(each) for each in said] == [False, False, False, False, True, False]
    assert "3.0 MB takes 3.0 s at 1.00 MB/s, a step 1.0 s" in str(said[4])


def test_generator_behind_a_slow_link_says_so(
    store: WeightStore, server: WeightServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(40_000, generator=random).bfloat16()}  # 80 kB: 0.6 s
    with (
        closing(Link(server.port, mbit_per_s=1)) as link,
        closing(
            WeightSubscriber(
                WeightStore(HttpBackend(link.address, token=TOKEN)),
                tmp_path / "copy",
                poll_seconds=0.05,
            )
        ) as follower,
    ):
        for step in itertools.count():
            store.publish(step, weights, companions=COMPANIONS)
            if follower.poll(timeout=0.1):
                follower.accept()
            if "this link cannot keep up" in caplog.text:
                break
    assert "a version of 0.1 MB takes" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_100m_parameters_follow_over_20_mbit_and_60_ms(
    store: WeightStore, server: WeightServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {"w": 0.02 * torch.randn(100_000_000, generator=random)}
    visible: dict[str, float] = {}
    with (
        closing(Link(server.port, mbit_per_s=20, delay=0.06)) as link,
        closing(WeightPublisher(store, companions=COMPANIONS, keyframe_interval=100)) as publisher,
        closing(
            WeightSubscriber(
                WeightStore(HttpBackend(link.address, token=TOKEN)),
                tmp_path / "copy",
                poll_seconds=0.2,
            )
        ) as follower,
    ):
        for step in range(4):
            publisher.publish(step, weights)
            (report,) = published(publisher)
            assert report.version is not None
            started = time.monotonic()
            staged = follower.poll(timeout=120)
            assert staged is not None and staged.version.weights_id == report.version.weights_id
            visible[report.version.kind] = time.monotonic() - started
            expected = weights["w"].bfloat16()
            assert torch.equal(staged.tensors["w"], expected)
            follower.accept()
            noise = torch.randn(100_000_000, generator=random)
            weights["w"] += 2e-6 * noise.sign_()
    with capsys.disabled():
        print(f"\nvisible after: {visible}")
    assert visible["keyframe"] > 70  # 200 MB at 2.5 MB/s
    assert visible["delta"] < 0.2 * visible["keyframe"]
