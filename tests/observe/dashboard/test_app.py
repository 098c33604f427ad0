"""HTTP server of the dashboard: routes, access control, errors, cost."""

from __future__ import annotations

import http.client
import json
import math
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import append, group, make_run, row

from peralta_zmq.errors import ConfigError
from peralta_zmq.http_server import HttpServer
from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.app import Dashboard

TOKEN = "0123456789abcdef" * 2


Serve = Callable[..., Dashboard]


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    """Start a dashboard of these run folders, on any free port of this machine by default."""

    def start(*folders: Path, **options: Any) -> Dashboard:
        options = {"host": "127.0.0.1", "port": 0} | options
        dashboard = stack.enter_context(closing(Dashboard(folders, **options)))
        dashboard.server.start()
        return dashboard

    return start


@pytest.fixture
def dashboard(tmp_path: Path, serve: Serve) -> Dashboard:
    return serve(make_run(tmp_path / "hand", num_steps=3))


def get(
    dashboard: Dashboard, path: str, *, method: str = "GET",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Mapping[str, str], bytes]:  # fmt: skip
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


def test_path_outside_the_static_files_is_not_found(dashboard: Dashboard) -> None:
    for path in (
        "/../../metrics.jsonl", "/static/../dashboard.py", "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2fpage.py", "/api/runs/../../config.toml", "/api/runs/1", "/api/runs/-1",
        "//etc/passwd", "/dashboard.js/..", "/uPlot.LICENSE",
        "/api/runs/99999999999999999999999",
    ):  # fmt: skip
        assert get(dashboard, path)[0] == 404, path


def test_other_methods_are_refused(dashboard: Dashboard) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert get(dashboard, "/api/runs/0", method=method)[0] == 405, method


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
    large = group(4, *["x" * 100_000] * 100)
    append(tmp_path / "hand" / "samples.jsonl", *(8 * [large]))
    assert len(get(dashboard, "/api/runs/0/samples")[2]) < 6_000_000
    many_generators = {f"gen/{i}/step": 1.0 for i in range(5000)}
    append(tmp_path / "hand" / "metrics.jsonl", many_generators | row(4))
    assert len(get(dashboard, "/api/runs/0")[2]) < 1_000_000


def test_metrics_and_health_cover_all_runs(tmp_path: Path, serve: Serve) -> None:
    runs = (("a", 1), ("b", 2))
    dashboard = serve(
        *(make_run(tmp_path / name / "demo", num_steps=steps) for name, steps in runs)
    )
    status, headers, body = get(dashboard, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    text = body.decode()
    assert 'peralta_step{run="a/demo"} 1.0\nperalta_step{run="b/demo"} 2.0\n' in text
    assert "nan" not in text.lower()
    health = json.loads(get(dashboard, "/healthz")[2])
    assert health["status"] == "ok"
    assert {name: run["step"] for name, run in health["runs"].items()} == {"a/demo": 1, "b/demo": 2}
    assert health["runs"]["b/demo"]["age_seconds"] < 60


def test_taken_port_falls_back_to_the_next_one(dashboard: Dashboard, serve: Serve) -> None:
    port = dashboard.port
    second = serve(Path("unused"), port=port)
    assert port < second.port < port + 20
    assert second.banner == [f"dashboard: http://127.0.0.1:{second.port} (port {port} is taken)"]
    with pytest.raises(ConfigError, match="port 65536 cannot be used"):
        serve(Path("unused"), port=65_536)


def test_invalid_requests_are_not_logged(
    dashboard: Dashboard, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_connection(("127.0.0.1", dashboard.port), 10)) as client:
        client.sendall(b"NONSENSE\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    assert caplog.messages == []


def test_access_from_other_machines_needs_the_token(tmp_path: Path, serve: Serve) -> None:
    folder = make_run(tmp_path / "hand", num_steps=1)
    with pytest.raises(ConfigError, match=r"on 0\.0\.0\.0 is open to other machines without"):
        serve(folder, host="0.0.0.0")
    dashboard = serve(folder, host="0.0.0.0", token=TOKEN)
    assert dashboard.banner[1].startswith("warning: other machines can open the dashboard")
    assert dashboard.banner[0] == f"dashboard: http://{socket.gethostname()}:{dashboard.port}"
    for path in ("/", "/api/runs", "/metrics", "/?token=wrong", "/healthz"):
        assert get(dashboard, path)[0] == 401
    status, headers, _ = get(dashboard, f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=lax" in headers["set-cookie"]
    cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
    assert get(dashboard, "/api/runs", headers=cookie)[0] == 200
    assert get(dashboard, "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
    for name in ("box.lan", dashboard.banner[0].partition("http://")[2]):
        assert get(dashboard, "/", headers={**cookie, "Host": name})[0] == 200


def test_password_of_one_dashboard_is_kept_beside_another(tmp_path: Path, serve: Serve) -> None:
    tokens = [TOKEN, TOKEN[::-1]]
    dashboards = [serve(make_run(tmp_path / token, num_steps=1), token=token) for token in tokens]
    cookies = dict[str, str]()  # as a browser keeps them: those of all ports of a host together
    for dashboard, token in zip(dashboards, tokens, strict=True):
        name, _, value = get(dashboard, f"/?token={token}")[1]["set-cookie"].partition("=")
        cookies[name] = value.partition(";")[0]
    header = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
    assert [get(dashboard, "/", headers=header)[0] for dashboard in dashboards] == [200, 200]


def test_errors_stay_in_the_dashboard(
    dashboard: Dashboard, serve: Serve, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(view, "update", fails)
    assert [get(dashboard, "/api/runs/0")[0] for _ in range(3)] == [500] * 3
    assert get(dashboard, "/healthz")[0] == 200
    assert caplog.messages == ["dashboard request failed at /api/runs/0 (RuntimeError('broken'))"]
    monkeypatch.setattr(HttpServer, "run", fails)
    broken = serve(Path("unused"))
    broken.server.thread.join(30)
    assert not broken.server.thread.is_alive()
    assert "broken" in caplog.text and "this process continues" in caplog.text


def test_dashboard_of_10000_steps_uses_one_percent_of_a_core(tmp_path: Path, serve: Serve) -> None:
    """A browser polls once a second; each time there is a new step with samples."""
    folder = make_run(tmp_path / "hand", num_steps=10_000)
    dashboard = serve(folder, live=True)
    cursor = json.loads(get(dashboard, "/api/runs/0")[2])["cursor"]
    assert dashboard.server.thread.ident
    clock = time.pthread_getcpuclockid(dashboard.server.thread.ident)
    times: list[float] = []  # seconds of the thread per poll; other processes make some slow
    for step in range(10_001, 10_041):
        before = time.clock_gettime(clock)
        append(folder / "metrics.jsonl", row(step))
        append(folder / "samples.jsonl", group(step, *["x" * 400] * 16))
        update = json.loads(get(dashboard, f"/api/runs/0?cursor={cursor}")[2])
        cursor, newest = update["cursor"], update["state"]["num_samples"]
        sent = json.loads(get(dashboard, f"/api/runs/0/samples?first={newest}")[2])["samples"]
        assert [group["step"] for group in sent] == [step]
        times.append(time.clock_gettime(clock) - before)
    assert min(times) < 0.01


def test_list_has_the_newest_values_of_runs_that_are_added(tmp_path: Path, serve: Serve) -> None:
    make_run(tmp_path / "first", num_steps=3, quiet=60.0)
    dashboard = serve(tmp_path)
    append(
        make_run(tmp_path / "a second", num_steps=2) / "eval.jsonl", {"step": 0, "accuracy": 0.5}
    )
    first, second = json.loads(get(dashboard, "/api/runs")[2])["runs"]
    assert (first["run"], first["status"], first["step"], first["eval"]) == (
        "first",
        "silent",
        "3",
        "-",
    )
    assert (second["run"], second["status"], second["eval"]) == ("a second", "training", "0.500")
    assert (second["model"], second["task"], second["max_steps"]) == ("embedded", "calculator", "4")
    settings = json.loads(get(dashboard, "/api/runs/1/settings")[2])["settings"]
    assert settings["train.max_steps"] == "4"


def test_samples_and_answers_are_those_of_the_query(tmp_path: Path, dashboard: Dashboard) -> None:
    append(tmp_path / "hand" / "samples.jsonl", *(group(step) for step in range(4, 40)))
    answer = {"step": 7, "question": "q", "expected": "e", "completions": ["a"], "rewards": [0.5]}
    append(tmp_path / "hand" / "answers.jsonl", {**answer, "cut_off": [False]})

    def steps(query: str) -> list[int]:
        body = get(dashboard, f"/api/runs/0/samples?{query}")[2]
        return [sample["step"] for sample in json.loads(body)["samples"]]

    assert steps("first=1")[:3] == [3, 4, 5]
    assert steps("step=9")[0] == 9
    assert steps("")[-1] == 39
    for query in ("first=x", "first=-1", "step=1234567890123", "first="):
        assert get(dashboard, f"/api/runs/0/samples?{query}")[0] == 400
    (example,) = json.loads(get(dashboard, "/api/runs/0/answers?step=7")[2])["examples"]
    assert (example["expected"], example["answers"][0]["reward"]) == ("e", 0.5)
    assert json.loads(get(dashboard, "/api/runs/0/answers?step=8")[2])["examples"] == []
