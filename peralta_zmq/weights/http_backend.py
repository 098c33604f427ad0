"""Client of a trainer's weight server (server.py), for machines without a shared folder."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from peralta_zmq.addresses import host_and_port
from peralta_zmq.atomic_files import CHUNK, parse_json
from peralta_zmq.errors import StoreError
from peralta_zmq.weights.backends import read_small
from peralta_zmq.weights.locks import FolderLocks


class HttpBackend:
    """Client of a trainer's weight server at http://HOST:PORT."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        self._host, self._port = host_and_port(address, option="weights.dir", default_port=80)
        self.address = address
        self.locks = FolderLocks(None)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def names(self) -> list[str]:
        try:
            listing = read_small(self, "", limit=16 << 20)  # bytes; a million versions
            return list(map(str, parse_json(listing)))
        except (ValueError, TypeError):
            raise OSError(f"{self.address} does not list versions; is it a trainer?") from None

    def path(self, name: str) -> Path:
        return Path(name)

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """A file in chunks, from offset `start`.

        Raises ConnectionError or TimeoutError if the caller can resume, another OSError if not.
        """
        headers = self._headers | ({"Range": f"bytes={start}-"} if start else {})
        connection = http.client.HTTPConnection(self._host, self._port, timeout=20.0)
        with contextlib.closing(connection):
            try:
                connection.request("GET", f"/{path}", headers=headers)
                response = connection.getresponse()
                self._check_status(response.status, path, start)
                while chunk := response.read(CHUNK):
                    yield chunk
                if response.length:  # bytes still missing; read(n) returns b"" without an error
                    raise ConnectionError(f"{self.address}: the connection ended early")
            except (http.client.HTTPException, ValueError) as error:  # ValueError: a chunk below 0
                raise ConnectionError(f"{self.address}: {type(error).__name__}") from None

    def _check_status(self, status: int, path: str, start: int) -> None:
        if status == HTTPStatus.NOT_FOUND:
            raise FileNotFoundError(path)
        if status == HTTPStatus.UNAUTHORIZED:
            raise PermissionError(f"{self.address} requires the password in security.token_file")
        if status != (HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK):
            raise OSError(f"{self.address} returned HTTP status {status} for {path}")

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        """Raise StoreError; replaces the methods that only a trainer calls, to publish."""
        raise StoreError(f"{self.address} is read-only; a trainer publishes to a folder")

    write_folder = write_file = remove = prepare = free_bytes = _refuse
