"""What holds for every HTTP server of the project: slow clients, names, hostile JSON."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from real_programs import until
from synthetic_runs import make_run
from verifier_servers import PROBLEM, FixedResponse, remote_at, reward_of

from peralta_zmq import models
from peralta_zmq.config import load_config
from peralta_zmq.environments.verifier_service import Verifier
from peralta_zmq.errors import RewardError, RewardUnavailableError, TaskError
from peralta_zmq.http_server import Limits
from peralta_zmq.observe.dashboard.app import Dashboard
from peralta_zmq.serving.chats import ChatQueue
from peralta_zmq.serving.server import ChatServer
from peralta_zmq.weights.backends import HttpBackend
from peralta_zmq.weights.server import serve_weights

TOKEN = "0123456789abcdef"
PATHS = {
    "dashboard": "/healthz", "chats": "/v1/models", "weights": "/", "verifier": "/healthz",
}  # fmt: skip
EVERY_SERVER = pytest.mark.parametrize("kind", PATHS)
Serve = Callable[..., int]


@pytest.fixture
def serve(tmp_path: Path, stack: ExitStack) -> Serve:
    """Start a server of this kind on loopback; returns its port."""

    def start(
        kind: str, token: str | None = None, *, host: str = "127.0.0.1", **limits: float
    ) -> int:
        options: dict[str, Any] = {"host": host, "port": 0, "token": token}
        options["limits"] = Limits(**limits)
        if kind == "dashboard":
            server: Any = Dashboard([make_run(tmp_path / "run", num_steps=1)], **options)
            server.server.start()
        elif kind == "chats":
            tokenizer = models.load_tokenizer(models.EMBEDDED)
            options |= {"model": "demo", "template_kwargs": {}}
            server = ChatServer(ChatQueue(slots=8, max_model_len=128), tokenizer, **options)
        elif kind == "weights":
            server = serve_weights(tmp_path, **options)
        else:
            server = Verifier(load_config("bin/verifier", []), **options)
        stack.enter_context(closing(server))
        return int(server.port)

    return start


def status_of(kind: str, port: int, *, address: str = "127.0.0.1", **headers: str) -> int:
    with closing(http.client.HTTPConnection(address, port, timeout=20)) as connection:
        connection.request("GET", PATHS[kind], headers=headers)
        response = connection.getresponse()
        response.read()
        return response.status


# Slow clients.


def one_byte_clients(kind: str, port: int, stack: ExitStack) -> list[socket.socket]:
    """Connections that have sent a request and one byte of a second one."""
    clients = list[socket.socket]()
    for _ in range(64):
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        client.sendall(f"GET {PATHS[kind]} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert client.recv(9) == b"HTTP/1.1 "
        client.sendall(b"G")
        client.setblocking(False)
        clients.append(client)
    return clients


def is_closed(client: socket.socket, byte: bytes = b"") -> bool:
    """Whether the server has closed a connection, to which the client sends a byte if not."""
    try:
        client.sendall(byte)
        while client.recv(1 << 16):
            pass  # a response
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@EVERY_SERVER
@pytest.mark.parametrize("token", [None, TOKEN])
def test_connections_that_send_a_byte_now_and_then_are_closed(
    kind: str, token: str | None, serve: Serve, stack: ExitStack
) -> None:
    clients = one_byte_clients(kind, serve(kind, token, header_seconds=0.5), stack)
    until(lambda: all([is_closed(client, b"E") for client in clients]), seconds=30)


@EVERY_SERVER
@pytest.mark.parametrize("token", [None, TOKEN])
def test_new_client_is_served_beside_64_connections_that_wait(
    kind: str, token: str | None, serve: Serve, stack: ExitStack
) -> None:
    port = serve(kind, token, header_seconds=300.0)
    one_byte_clients(kind, port, stack)
    authorization = {"Authorization": f"Bearer {TOKEN}"} if token else {}
    assert [status_of(kind, port, **authorization) for _ in range(3)] == [200] * 3


@EVERY_SERVER
@pytest.mark.parametrize(("header_seconds", "num_kept"), [(300.0, 64), (0.5, 0)])
def test_idle_connections_are_bounded_and_closed_without_a_request(
    kind: str, serve: Serve, stack: ExitStack, header_seconds: float, num_kept: int
) -> None:
    port = serve(kind, header_seconds=header_seconds)
    address = ("127.0.0.1", port)
    clients = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(150)]
    for client in clients:
        client.setblocking(False)
    until(lambda: sum(is_closed(client) for client in clients) >= len(clients) - num_kept)
    assert num_kept or status_of(kind, port) == 200


@EVERY_SERVER
def test_large_headers_are_refused_before_their_end(kind: str, serve: Serve) -> None:
    with socket.create_connection(("127.0.0.1", serve(kind)), 20) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * Limits().header_bytes)
        assert client.recv(12) == b"HTTP/1.1 400"


def test_connection_that_reads_no_response_is_closed(serve: Serve, stack: ExitStack) -> None:
    client = socket.create_connection(("127.0.0.1", serve("dashboard", idle_seconds=0.5)), 20)
    stack.enter_context(closing(client)).setblocking(False)
    requests = b"GET /dashboard.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000

    def is_reset() -> bool:
        try:
            client.send(requests)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return is_reset()  # until the buffers are full

    until(is_reset, seconds=30)


def test_slow_body_of_a_request_is_not_waited_for(serve: Serve, stack: ExitStack) -> None:
    for kind, path in (("chats", "/v1/chat/completions"), ("verifier", "/score")):
        client = socket.create_connection(("127.0.0.1", serve(kind, idle_seconds=0.5)), 20)
        stack.enter_context(closing(client)).sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 10000\r\n\r\n{".encode()
        )
        client.setblocking(False)
        until(lambda: is_closed(client, b" "), seconds=30)  # noqa: B023


# Names.


@EVERY_SERVER
@pytest.mark.parametrize(
    "host", ["box.lan", "nas.tail1234.ts.net:8470", "trainer", "proxy.example", "[fd00::1]:80", "["]
)
def test_any_name_is_allowed_with_the_password_only(kind: str, host: str, serve: Serve) -> None:
    port = serve(kind, TOKEN)
    assert status_of(kind, port, Host=host, Authorization=f"Bearer {TOKEN}") == 200
    assert status_of(kind, port, Host=host, Authorization=f"bearer {TOKEN}") == 200
    assert status_of(kind, port, Host=host, Authorization="Bearer wrong") == 401
    assert status_of(kind, port, Host=host) == 401


@EVERY_SERVER
def test_only_loopback_names_are_allowed_without_a_password(kind: str, serve: Serve) -> None:
    port = serve(kind)
    for host in ("127.0.0.1", "localhost:80", "LOCALHOST.", "[::1]:8470"):
        assert status_of(kind, port, Host=host) == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example:1", "10.1.2.3", "box.lan", ""):
        assert status_of(kind, port, Host=host) in (400, 401), host


@EVERY_SERVER
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_server_on_an_address_of_ipv6_answers(kind: str, host: str, serve: Serve) -> None:
    port = serve(kind, TOKEN, host=host)
    addresses = ["::1", "127.0.0.1"] if host == "::" else ["::1"]
    for address in addresses:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert status_of(kind, port, address=address, **headers) == 200


# JSON.


def nested(depth: int) -> bytes:
    return b'[{"a":' * (depth // 2) + b"1" + b"}]" * (depth // 2)


DEPTHS = pytest.mark.parametrize("depth", [102, 500, 900, 1000, 5000, 200_000])


@DEPTHS
@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        ("verifier", "/score", "completions"),
        ("verifier", "/reply", "messages"),
        ("chats", "/v1/chat/completions", "messages"),
        ("chats", "/v1/chat/completions", "model"),
    ],
)
def test_deeply_nested_request_is_refused(
    kind: str, path: str, field: str, depth: int, serve: Serve
) -> None:
    body = b'{"env": "calculator", "problem": "x", "%s": %s}' % (field.encode(), nested(depth))
    with closing(http.client.HTTPConnection("127.0.0.1", serve(kind), timeout=20)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 400 and json.loads(response.read())["error"]


@pytest.fixture
def respond(stack: ExitStack) -> Callable[[bytes], int]:
    """Start a server that responds to all requests with this content; returns its port."""
    return lambda content: stack.enter_context(FixedResponse(content)).port


@DEPTHS
def test_deeply_nested_response_is_refused(depth: int, respond: Callable[[bytes], int]) -> None:
    port = respond(nested(depth))
    with pytest.raises(OSError, match="does not list versions; is it a trainer"):
        HttpBackend(f"http://127.0.0.1:{port}").names()
    with pytest.raises(RewardError, match="unexpected response"):
        reward_of(remote_at(port), PROBLEM, "1")
    with pytest.raises(TaskError, match="unexpected response"):
        remote_at(port).problems("train", 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"row": float("inf")},
        {"input_token_ids": [2**31]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": "",
                    "tool_calls": [{"name": "add", "arguments": {"a": "\udfff"}}],
                }
            ]
        },
        {"messages": []},
        {"tools": [1]},
        {"problems": {"a": 1}},
    ],
    ids=str,
)
def test_problems_that_no_verifier_sends_are_refused(
    changes: dict[str, Any], respond: Callable[[bytes], int]
) -> None:
    messages = [{"role": "user", "content": "?"}]
    row = {"id": "x", "task": "x", "answer": "x", "messages": messages}
    response = {"digest": "d", "has_turns": False, "tools": [], "problems": [row | changes]}
    response |= {name: value for name, value in changes.items() if name in response}
    port = respond(json.dumps(response).encode())
    with pytest.raises(TaskError, match="unexpected response"):
        remote_at(port).problems("train", 0)


def test_response_that_is_not_http_is_a_failed_request(respond: Callable[[bytes], int]) -> None:
    port = respond(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc")
    with pytest.raises(ConnectionError):
        list(HttpBackend(f"http://127.0.0.1:{port}").read("RUN.json"))
    with pytest.raises(RewardUnavailableError, match="has not responded"):
        reward_of(remote_at(port, retry_seconds=0.1), PROBLEM, "1")


def test_lone_surrogate_in_a_reply_is_refused(respond: Callable[[bytes], int]) -> None:
    environment = remote_at(respond(b'{"messages": [{"role": "user", "content": "\\ud800"}]}'))
    with pytest.raises(RewardError, match="unexpected response"):
        environment.reply(PROBLEM, PROBLEM.messages * 2).result()
