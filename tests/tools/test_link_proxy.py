"""A link passes bytes, stops when it is cut and goes on when it is mended."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tools.link_proxy import Link, listening_ports

SILENT, PATIENCE = 0.3, 15.0  # seconds in which nothing must come, and in which something must


@pytest.fixture
def servers() -> Iterator[list[socket.socket]]:
    listening = listening_ports()
    yield listening
    for each in listening:
        each.close()


def joined(link: Link, server: socket.socket, *, port: int) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(("127.0.0.1", port))
    far, _ = server.accept()
    near.settimeout(PATIENCE)
    far.settimeout(PATIENCE)
    return near, far


def is_silent(end: socket.socket) -> bool:
    """Whether nothing comes for a while."""
    end.settimeout(SILENT)
    try:
        end.recv(100)
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE)
    return False


def test_both_ports_pass_both_ways(servers: list[socket.socket]) -> None:
    with Link(servers[0].getsockname()[1]) as link:
        for index, server in enumerate(servers):
            near, far = joined(link, server, port=link.port + index)
            with near, far:
                near.sendall(b"there")
                assert far.recv(100) == b"there"
                far.sendall(b"back")
                assert near.recv(100) == b"back"


def test_a_cut_link_holds_everything_back_and_loses_nothing(servers: list[socket.socket]) -> None:
    with Link(servers[0].getsockname()[1]) as link:
        near, far = joined(link, servers[0], port=link.port)
        with near, far:
            link.cut()
            near.sendall(b"held")
            assert is_silent(far)
            link.mend()
            assert far.recv(100) == b"held"


def test_an_end_is_told_only_when_the_link_is_mended(servers: list[socket.socket]) -> None:
    with Link(servers[0].getsockname()[1]) as link:
        near, far = joined(link, servers[0], port=link.port)
        with near, far:
            link.cut()
            far.close()
            assert is_silent(near)
            link.mend()
            assert near.recv(100) == b""


def test_a_reset_closes_connections_and_takes_new_ones(servers: list[socket.socket]) -> None:
    with Link(servers[0].getsockname()[1]) as link:
        near, far = joined(link, servers[0], port=link.port)
        with near, far:
            near.sendall(b"there")
            assert far.recv(100) == b"there"
            link.reset()
            assert near.recv(100) == far.recv(100) == b""
        near, far = joined(link, servers[0], port=link.port)
        with near, far:
            near.sendall(b"again")
            assert far.recv(100) == b"again"
