"""The link proxy forwards bytes, stops when it is cut, continues when restored, flips a bit."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tools.link_proxy import LinkProxy, listening_ports

SILENT_SECONDS, TIMEOUT = 0.3, 15.0  # in which nothing must arrive, and in which something must


@pytest.fixture
def servers() -> Iterator[list[socket.socket]]:
    listening = listening_ports()
    yield listening
    for server in listening:
        server.close()


def connect(
    link: LinkProxy, server: socket.socket, *, port: int
) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    client.settimeout(TIMEOUT)
    accepted.settimeout(TIMEOUT)
    return client, accepted


def is_silent(end: socket.socket) -> bool:
    """True if nothing arrives for SILENT_SECONDS."""
    end.settimeout(SILENT_SECONDS)
    try:
        end.recv(100)
    except TimeoutError:
        return True
    finally:
        end.settimeout(TIMEOUT)
    return False


def test_all_ports_forward_both_ways(servers: list[socket.socket]) -> None:
    with LinkProxy(servers[0].getsockname()[1]) as link:
        for index, server in enumerate(servers):
            client, accepted = connect(link, server, port=link.port + index)
            with client, accepted:
                client.sendall(b"there")
                assert accepted.recv(100) == b"there"
                accepted.sendall(b"back")
                assert client.recv(100) == b"back"


def test_cut_link_delays_bytes_until_it_is_restored(servers: list[socket.socket]) -> None:
    with LinkProxy(servers[0].getsockname()[1]) as link:
        client, accepted = connect(link, servers[0], port=link.port)
        with client, accepted:
            link.cut()
            client.sendall(b"held")
            assert is_silent(accepted)
            link.restore()
            assert accepted.recv(100) == b"held"


def test_cut_link_delays_the_end_of_a_connection(servers: list[socket.socket]) -> None:
    with LinkProxy(servers[0].getsockname()[1]) as link:
        client, accepted = connect(link, servers[0], port=link.port)
        with client, accepted:
            link.cut()
            accepted.close()
            assert is_silent(client)
            link.restore()
            assert client.recv(100) == b""


def test_reset_closes_connections_and_accepts_new_ones(servers: list[socket.socket]) -> None:
    with LinkProxy(servers[0].getsockname()[1]) as link:
        client, accepted = connect(link, servers[0], port=link.port)
        with client, accepted:
            client.sendall(b"there")
            assert accepted.recv(100) == b"there"
            link.reset()
            assert client.recv(100) == accepted.recv(100) == b""
        client, accepted = connect(link, servers[0], port=link.port)
        with client, accepted:
            client.sendall(b"again")
            assert accepted.recv(100) == b"again"


def test_flip_changes_one_bit_after_those_before_it(servers: list[socket.socket]) -> None:
    with LinkProxy(servers[0].getsockname()[1]) as link:
        client, accepted = connect(link, servers[1], port=link.port + 1)
        other, other_accepted = connect(link, servers[0], port=link.port)
        with client, accepted, other, other_accepted:
            link.flip(1, 8 * 5 + 2)  # of the second port: in the sixth byte of both directions
            other.sendall(bytes(9))
            assert other_accepted.recv(100) == bytes(9)
            client.sendall(bytes(4))
            assert accepted.recv(100) == bytes(4)
            accepted.sendall(bytes(4))
            assert client.recv(100) == b"\0\4\0\0"
            assert not link.cancel_flip(1)
            client.sendall(bytes(4))
            assert accepted.recv(100) == bytes(4)


def test_cancelled_flip_changes_nothing(servers: list[socket.socket]) -> None:
    with LinkProxy(servers[0].getsockname()[1]) as link:
        client, accepted = connect(link, servers[0], port=link.port)
        with client, accepted:
            link.flip(0, 3)
            assert link.cancel_flip(0)
            client.sendall(bytes(4))
            assert accepted.recv(100) == bytes(4)
