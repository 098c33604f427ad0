"""A trainer's weights folder over HTTP, read-only, for machines without a shared folder.

The trainer calls `serve_weights`, generators use `HttpBackend`. A password (token) keeps other
clients out. Traffic is not encrypted; clients detect damage by the hashes in the manifests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from peralta_zmq.atomic_files import CHUNK, PLAIN_PATH, open_regular, parse_json
from peralta_zmq.errors import StoreError
from peralta_zmq.http_server import HttpServer, RequestHandler, host_and_port
from peralta_zmq.weights.backends import LocalBackend, read_small
from peralta_zmq.weights.leases import FolderLeases
from peralta_zmq.weights.version import RUN_FILE, VERSION_NAME

CLIENT_TIMEOUT_SECONDS = 20.0  # without a byte from the server
MAX_LISTING = 16 << 20  # bytes; a million versions
RANGE = re.compile(r"bytes=(\d{1,18})-")  # value of the header Range, with which a client resumes
VERSION_FILE = re.compile(rf"/({VERSION_NAME.pattern})/({PLAIN_PATH.pattern})")


class HttpBackend:
    """Client of a trainer's weight server at http://HOST:PORT."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        self._host, self._port = host_and_port(address, option="weights.dir", default_port=80)
        self.address = address
        self.leases = FolderLeases(None)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def names(self) -> list[str]:
        """Names of the versions that the server lists."""
        try:
            return list(map(str, parse_json(read_small(self, "", limit=MAX_LISTING))))
        except (ValueError, TypeError):
            raise OSError(f"{self.address} does not list versions; is it a trainer?") from None

    def path(self, name: str) -> Path:
        """The name alone, because the store is not a folder of this machine."""
        return Path(name)

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """A file in chunks, from offset `start`.

        Raises ConnectionError or TimeoutError if the caller can resume, another OSError if not.
        """
        headers = self._headers | ({"Range": f"bytes={start}-"} if start else {})
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=CLIENT_TIMEOUT_SECONDS
        )
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
        """Raise OSError unless the response has the file from offset `start`."""
        if status == HTTPStatus.NOT_FOUND:
            raise FileNotFoundError(path)
        if status == HTTPStatus.UNAUTHORIZED:
            raise PermissionError(f"{self.address} requires the password in weights.token_file")
        if status != (HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK):
            raise OSError(f"{self.address} returned HTTP status {status} for {path}")

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        """Raise StoreError; replaces the methods that only a trainer calls, to publish."""
        raise StoreError(f"{self.address} is read-only; a trainer publishes to a folder")

    write_folder = write_file = remove = prepare = free_bytes = _refuse


def serve_weights(folder: Path, *, host: str, port: int, token: str | None) -> HttpServer:
    """Serve a weights folder. Raises ConfigError as `HttpServer` does."""
    return HttpServer(
        _Handler,
        host=host,
        port=port,
        token=token,
        settings=("wire.bind", "weights.serve_port"),
        backend=LocalBackend(folder),
    )


class _Handler(RequestHandler):
    """GET / lists the versions; GET /RUN.json and /step_NUMBER/FILE return files.

    RUN.json names the run that owns the store. A header `Range: bytes=START-` is supported.
    """

    backend: LocalBackend

    def do_GET(self) -> None:
        if not self.is_authorized():
            self.respond(HTTPStatus.UNAUTHORIZED)
            return
        try:
            if self.path == "/":
                names = sorted(filter(VERSION_NAME.fullmatch, self.backend.names()))
                self.respond(HTTPStatus.OK, json.dumps(names).encode())
            elif self.path == f"/{RUN_FILE}":
                self._send_file(RUN_FILE)
            elif match := VERSION_FILE.fullmatch(self.path):
                with self.backend.leases.reading(match[1]):
                    self._send_file(match[1], *match[2].split("/"))
            else:
                self.respond(HTTPStatus.NOT_FOUND)
        except FileNotFoundError:
            self.respond(HTTPStatus.NOT_FOUND)

    def _send_file(self, *path: str) -> None:
        """Send a file of the folder, from the offset that the client requested."""
        requested = RANGE.fullmatch(self.headers.get("Range", ""))
        with os.fdopen(open_regular(self.backend.folder, *path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = min(int(requested[1]), size) if requested else 0
            self.send_response(HTTPStatus.PARTIAL_CONTENT if requested else HTTPStatus.OK)
            if requested:
                self.send_header("Content-Range", f"bytes {start}-{max(start, size - 1)}/{size}")
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            file.seek(start)
            try:
                shutil.copyfileobj(file, self.wfile, CHUNK)
            except (ConnectionError, TimeoutError):  # the client resumes with a new request
                self.close_connection = True
