"""The link proxy forwards bytes, stops when it is cut, continues when restored, flips a bit."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tools.link_proxy import LinkProxy, listening_ports

SILENT_SECONDS, TIMEOUT = 0.3, 15.0  # in which nothing must arrive, and in which something must

Connect = Callable[[int], tuple[socket.socket, socket.socket]]


@pytest.fixture
def servers(stack: ExitStack) -> list[socket.socket]:
    return [stack.enter_context(server) for server in listening_ports()]


@pytest.fixture
def link(servers: list[socket.socket]) -> Iterator[LinkProxy]:
    with LinkProxy(servers[0].getsockname()[1]) as link:
        yield link


@pytest.fixture
def connect(link: LinkProxy, servers: list[socket.socket], stack: ExitStack) -> Connect:
    """Connect through the port with this index; returns the client's and the server's end."""

    def connected(index: int) -> tuple[socket.socket, socket.socket]:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", link.port + index)))
        accepted = stack.enter_context(servers[index].accept()[0])
        client.settimeout(TIMEOUT)
        accepted.settimeout(TIMEOUT)
        return client, accepted

    return connected


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


def test_all_ports_forward_both_ways(connect: Connect, servers: list[socket.socket]) -> None:
    for index in range(len(servers)):
        client, accepted = connect(index)
        client.sendall(b"there")
        assert accepted.recv(100) == b"there"
        accepted.sendall(b"back")
        assert client.recv(100) == b"back"


def test_cut_link_delays_bytes_and_the_end_of_a_connection(
    link: LinkProxy, connect: Connect
) -> None:
    client, accepted = connect(0)
    link.cut()
    client.sendall(b"held")
    assert is_silent(accepted)
    link.restore()
    assert accepted.recv(100) == b"held"
    link.cut()
    accepted.close()
    assert is_silent(client)
    link.restore()
    assert client.recv(100) == b""


def test_reset_closes_connections_and_accepts_new_ones(link: LinkProxy, connect: Connect) -> None:
    client, accepted = connect(0)
    client.sendall(b"there")
    assert accepted.recv(100) == b"there"
    link.reset()
    assert client.recv(100) == accepted.recv(100) == b""
    client, accepted = connect(0)
    client.sendall(b"again")
    assert accepted.recv(100) == b"again"


def test_flip_changes_one_bit_after_those_before_it(link: LinkProxy, connect: Connect) -> None:
    client, accepted = connect(1)
    other, other_accepted = connect(0)
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
