"""HTTP server of a trainer's weights folder, for generators that do not share the folder.

    /                   names of the versions, as JSON
    /RUN.json           the run that owns the folder
    /step_NUMBER/FILE   a file, or with the header `Range: bytes=START-` the part from START on

Traffic is not encrypted; clients detect damage by the hashes in the manifests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from peralta_zmq.atomic_files import CHUNK, PLAIN_PATH, open_regular
from peralta_zmq.http_server import HttpServer, Limits, open_port
from peralta_zmq.weights.backends import LocalBackend
from peralta_zmq.weights.store import RUN_FILE, VERSION_NAME

RANGE = re.compile(r"bytes=(\d{1,18})-")
VERSION_FILE = re.compile(rf"({VERSION_NAME.pattern})/({PLAIN_PATH.pattern})")


def serve_weights(
    folder: Path, *, host: str, port: int, token: str | None, limits: Limits | None = None
) -> HttpServer:
    """Serve a weights folder in a thread. Raises ConfigError as `open_port` does."""
    backend = LocalBackend(folder)

    # Ordinary functions, which starlette calls in threads: the folder may be on a slow NAS.
    def list_versions(request: Request) -> Response:
        try:
            names = sorted(filter(VERSION_NAME.fullmatch, backend.names()))
        except FileNotFoundError:  # an unmounted NAS
            raise HTTPException(404) from None
        return Response(json.dumps(names), media_type="application/json")

    def send_file(request: Request) -> Response:
        path = str(request.path_params["path"])
        match = VERSION_FILE.fullmatch(path)
        if match is None and path != RUN_FILE:
            raise HTTPException(404)
        names = path.split("/")
        try:
            size = _size_of(folder, names)
        except FileNotFoundError:
            raise HTTPException(404) from None
        requested = RANGE.fullmatch(request.headers.get("range", ""))
        start = min(int(requested[1]), size) if requested else 0
        headers = {"Content-Length": str(size - start)}
        if requested:
            headers["Content-Range"] = f"bytes {start}-{max(start, size - 1)}/{size}"
        status = 206 if requested else 200
        if request.method == "HEAD":  # starlette would read the whole file
            return Response(status_code=status, headers=headers)
        return FileResponse(_read(backend, names, start, size), status, headers)

    server = HttpServer(
        "weight server",
        [Route("/", list_versions), Route("/{path:path}", send_file)],
        listening=open_port(host, port, token=token, settings=("wire.bind", "weights.serve_port")),
        token=token,
        token_setting="security.token_file",
        refuse=lambda request, error: Response(status_code=error.status_code),
        limits=limits,
    )
    server.start()
    return server


class FileResponse(StreamingResponse):
    """A streamed file, which is closed also if the client disconnects before its end."""

    def __init__(
        self, pieces: Generator[bytes, None, None], status: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(pieces, status, headers, media_type="application/octet-stream")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Otherwise its reading mark would keep the version until a garbage collection. In a
            # thread, because the folder may be on a slow NAS.
            await run_in_threadpool(self._pieces.close)


def _size_of(folder: Path, names: list[str]) -> int:
    descriptor = open_regular(folder, *names)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _read(
    backend: LocalBackend, names: list[str], start: int, size: int
) -> Generator[bytes, None, None]:
    """Yield a file up to `size`, which a trainer may have replaced since, from `start` on."""
    with ExitStack() as stack:
        if len(names) > 1:
            stack.enter_context(backend.locks.reading(names[0]))
        file = stack.enter_context(os.fdopen(open_regular(backend.folder, *names), "rb"))
        file.seek(start)
        while chunk := file.read(min(CHUNK, size - start)):
            start += len(chunk)
            yield chunk
