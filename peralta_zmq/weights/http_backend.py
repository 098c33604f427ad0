"""A trainer's weights folder as its generators see it over HTTP. Knows HTTP; only reads."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from peralta_zmq.atomic_files import CHUNK, About, Content, Manifest
from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.weights.version import NAME

TIMEOUT_SECONDS = 20.0  # without a byte
MAX_LISTING = 16 << 20  # bytes


class HttpBackend:
    """What `serve.Server` offers at http://HOST:PORT."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        parts = urlsplit(address)
        try:
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            self._host = ""
        if not self._host or parts.path.strip("/"):
            raise ConfigError(f"weights.dir '{address}' is not http://HOST:PORT")
        self.where = address
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def names(self) -> list[str]:
        """The versions that the trainer lists."""
        content = b""
        for chunk in self.read(""):
            content += chunk
            if len(content) > MAX_LISTING:
                raise OSError("the list of versions is far too long")
        try:
            listed = cast("list[object]", json.loads(content))
            return [each for each in listed if isinstance(each, str) and NAME.fullmatch(each)]
        except (ValueError, TypeError):
            raise OSError(f"{self.where} does not list versions; is it a trainer?") from None

    def path(self, name: str) -> Path:
        """The name alone."""
        return Path(name)

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """Raises ConnectionError where taking up again may help, another OSError where not."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_SECONDS)
        with contextlib.closing(connection):
            try:
                connection.request("GET", f"/{path}", headers=self._asking(start))
                response = connection.getresponse()
                self._check(response, path, start)
                while chunk := response.read(CHUNK):
                    yield chunk
                if response.length:  # what should have come; a reader of chunks is not told
                    raise ConnectionError(f"{self.where}: the connection broke off")
            except http.client.HTTPException as error:
                raise ConnectionError(f"{self.where}: {type(error).__name__}") from None

    def _asking(self, start: int) -> dict[str, str]:
        return self._headers | ({"Range": f"bytes={start}-"} if start else {})

    def _check(self, response: http.client.HTTPResponse, path: str, start: int) -> None:
        if response.status == http.client.NOT_FOUND:
            raise FileNotFoundError(path)
        if response.status == http.client.UNAUTHORIZED:
            raise PermissionError(f"{self.where} wants the password in weights.token_file")
        if response.status != (http.client.PARTIAL_CONTENT if start else http.client.OK):
            raise OSError(f"{self.where} answers {response.status} for {path}")

    @contextlib.contextmanager
    def reading(self, name: str) -> Generator[None, None, None]:
        """The server marks what it sends."""
        yield

    def write_whole(
        self, name: str, files: Mapping[str, Content], about: About | Callable[[], About]
    ) -> Manifest:
        """Refused, as everything else that writes."""
        raise self._only_read()

    def write_file(self, name: str, content: bytes) -> None:
        """Refused."""
        raise self._only_read()

    def remove(self, name: str) -> None:
        """Refused."""
        raise self._only_read()

    def prepare(self) -> None:
        """Refused."""
        raise self._only_read()

    def lease(self, holder: str) -> str | None:
        """Refused."""
        raise self._only_read()

    def release(self) -> None:
        """There is no lease."""

    def touch(self) -> None:
        """Refused."""
        raise self._only_read()

    def free_bytes(self) -> int:
        """Refused."""
        raise self._only_read()

    def being_read(self) -> set[str]:
        """Refused."""
        raise self._only_read()

    def _only_read(self) -> StoreError:
        return StoreError(f"{self.where} can only be read; a trainer publishes to a folder")
