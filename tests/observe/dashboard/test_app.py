"""HTTP server of the dashboard: routes, access control, errors, cost."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from synthetic_runs import append, group, make_run, row

from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.app import Dashboard

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def dashboard(tmp_path: Path, stack: ExitStack) -> Dashboard:
    folder = make_run(tmp_path / "hand", num_steps=3)
    dashboard = stack.enter_context(closing(Dashboard([folder], host="127.0.0.1", port=0)))
    dashboard.start()
    return dashboard


def get(
    dashboard: Dashboard,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body; the path is sent unchanged."""
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=10)
    with closing(connection):
        connection.request(method, path, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()


def test_every_response_has_the_security_headers(dashboard: Dashboard) -> None:
    for path in ("/", "/dashboard.js", "/api/runs/0", "/nothing", "/metrics"):
        _, headers, _ = get(dashboard, path)
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", [
    "/../../metrics.jsonl", "/static/../dashboard.py", "/%2e%2e/%2e%2e/etc/passwd", "/..%2fpage.py",
    "/api/runs/../../config.toml", "/api/runs/1", "/api/runs/-1", "//etc/passwd",
    "/dashboard.js/..",
    "/uPlot.LICENSE", "/api/runs/99999999999999999999999",
])  # fmt: skip
def test_path_outside_the_static_files_is_not_found(dashboard: Dashboard, path: str) -> None:
    assert get(dashboard, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(dashboard: Dashboard, method: str) -> None:
    assert get(dashboard, "/api/runs/0", method=method)[0] == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:1", 200), ("localhost:1", 200), ("[::1]:1", 200),
     ("evil.example", 400), ("127.0.0.1.evil.example:1", 400), ("10.1.2.3", 400), ("", 400)],
)  # fmt: skip
def test_foreign_host_name_is_refused(dashboard: Dashboard, host: str, status: int) -> None:
    assert get(dashboard, "/api/runs", headers={"Host": host})[0] == status


def test_json_has_null_for_nan_and_infinity(tmp_path: Path, dashboard: Dashboard) -> None:
    append(tmp_path / "hand" / "metrics.jsonl", row(4, reward=math.nan, loss=math.inf))
    append(tmp_path / "hand" / "samples.jsonl", group(4, "half a pair \ud800", "b"))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for path in ("/api/runs/0", "/api/runs/0/samples", "/healthz"):
        status, _, body = get(dashboard, path)
        assert status == 200
        json.loads(body, parse_constant=refuse)
    charts = json.loads(get(dashboard, "/api/runs/0")[2])["charts"]
    assert charts[0]["x"][-1] == 4 and charts[0]["columns"][2][-1] is None


def test_responses_have_a_bounded_size(tmp_path: Path, dashboard: Dashboard) -> None:
    append(
        tmp_path / "hand" / "samples.jsonl", *(group(4, *["x" * 100_000] * 100) for _ in range(8))
    )
    assert len(get(dashboard, "/api/runs/0/samples")[2]) < 6_000_000
    append(
        tmp_path / "hand" / "metrics.jsonl", {f"gen/{i}/step": 1.0 for i in range(5000)} | row(4)
    )
    assert len(get(dashboard, "/api/runs/0")[2]) < 1_000_000


def test_metrics_and_health_cover_all_runs(tmp_path: Path, stack: ExitStack) -> None:
    runs = (("a", 1), ("b", 2))
    folders = [make_run(tmp_path / name / "demo", num_steps=steps) for name, steps in runs]
    dashboard = stack.enter_context(closing(Dashboard(folders, host="127.0.0.1", port=0)))
    dashboard.start()
    status, headers, body = get(dashboard, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    text = body.decode()
    assert 'peralta_step{run="a/demo"} 1.0\nperalta_step{run="b/demo"} 2.0\n' in text
    assert "nan" not in text.lower()
    health = json.loads(get(dashboard, "/healthz")[2])
    assert health["status"] == "ok"
    assert {name: run["step"] for name, run in health["runs"].items()} == {"a/demo": 1, "b/demo": 2}
    assert health["runs"]["b/demo"]["age_seconds"] < 60


def test_taken_port_falls_back_to_the_next_one(tmp_path: Path, stack: ExitStack) -> None:
    folder = make_run(tmp_path / "hand", num_steps=1)
    busy = stack.enter_context(closing(socket.socket()))
    busy.bind(("127.0.0.1", 0))
    busy.listen()
    port = busy.getsockname()[1]
    dashboard = stack.enter_context(closing(Dashboard([folder], host="127.0.0.1", port=port)))
    assert port < dashboard.port < port + 20
    assert dashboard.banner == [
        f"dashboard: http://127.0.0.1:{dashboard.port} (port {port} is taken)"
    ]


@pytest.mark.parametrize("port", [-1, 65_536])
def test_invalid_port_is_refused(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=f"dashboard.port {port} is invalid; choose one from 1"):
        Dashboard([tmp_path], host="127.0.0.1", port=port)


def test_invalid_requests_are_not_logged(
    dashboard: Dashboard, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_connection(("127.0.0.1", dashboard.port), 10)) as client:
        client.sendall(b"NONSENSE\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    assert caplog.messages == []


def test_access_from_other_machines_needs_the_token(tmp_path: Path, stack: ExitStack) -> None:
    folder = make_run(tmp_path / "hand", num_steps=1)
    with pytest.raises(ConfigError, match=r"dashboard.host 0.0.0.0 would let every"):
        Dashboard([folder], host="0.0.0.0", port=0)
    dashboard = Dashboard([folder], host="0.0.0.0", port=0, token=TOKEN)
    stack.enter_context(closing(dashboard))
    dashboard.start()
    assert dashboard.banner[1].startswith("warning: other machines can open the dashboard")
    assert dashboard.banner[0] == f"dashboard: http://{socket.gethostname()}:{dashboard.port}"
    for path in ("/", "/api/runs", "/metrics", "/?token=wrong", "/healthz"):
        assert get(dashboard, path)[0] == 401
    status, headers, _ = get(dashboard, f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=strict" in headers["set-cookie"]
    cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
    assert get(dashboard, "/api/runs", headers=cookie)[0] == 200
    assert get(dashboard, "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
    assert get(dashboard, "/", headers={**cookie, "Host": "evil.example"})[0] == 400
    own_name = dashboard.banner[0].partition("http://")[2]
    assert get(dashboard, "/", headers={**cookie, "Host": own_name})[0] == 200


def test_errors_stay_in_the_dashboard(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(view, "update", fails)
    folder = make_run(tmp_path / "hand", num_steps=1)
    dashboard = stack.enter_context(closing(Dashboard([folder], host="127.0.0.1", port=0)))
    dashboard.start()
    assert [get(dashboard, "/api/runs/0")[0] for _ in range(3)] == [500] * 3
    assert get(dashboard, "/healthz")[0] == 200
    assert caplog.messages == ["dashboard request failed at /api/runs/0 (RuntimeError('broken'))"]
    monkeypatch.setattr(Dashboard, "run", fails)
    broken = stack.enter_context(closing(Dashboard([folder], host="127.0.0.1", port=0)))
    broken.start()
    broken._thread.join(30)
    assert not broken._thread.is_alive()
    assert "broken" in caplog.text and "training continues" in caplog.text


def test_dashboard_of_10000_steps_uses_one_percent_of_a_core(
    tmp_path: Path, stack: ExitStack
) -> None:
    """A browser polls once a second; each time there is a new step with samples."""
    folder = make_run(tmp_path / "hand", num_steps=10_000)
    dashboard = stack.enter_context(
        closing(Dashboard([folder], host="127.0.0.1", port=0, live=True))
    )
    dashboard.start()
    cursor = json.loads(get(dashboard, "/api/runs/0")[2])["cursor"]
    thread = dashboard._thread
    assert isinstance(thread, threading.Thread) and thread.ident
    clock = time.pthread_getcpuclockid(thread.ident)
    times: list[float] = []  # seconds of the thread per poll; other processes make some slow
    for step in range(10_001, 10_041):
        before = time.clock_gettime(clock)
        append(folder / "metrics.jsonl", row(step))
        append(folder / "samples.jsonl", group(step, *["x" * 400] * 16))
        update = json.loads(get(dashboard, f"/api/runs/0?cursor={cursor}")[2])
        cursor, newest = update["cursor"], update["state"]["num_samples"]
        sent = json.loads(get(dashboard, f"/api/runs/0/samples?after={newest - 1}")[2])["samples"]
        assert [group["step"] for group in sent] == [step]
        times.append(time.clock_gettime(clock) - before)
    assert min(times) < 0.01
