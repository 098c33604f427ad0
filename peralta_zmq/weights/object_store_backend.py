"""A bucket (S3 and what speaks like it) as a place for versions. Knows obstore; needs extra `s3`.

A bucket has no rename: STABLE, written last, makes a version whole. Credentials and endpoint come
from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import About, Content, Manifest
from peralta_zmq.errors import ConfigError

UNLIMITED = 1 << 62  # bytes free
PART = 8 << 20  # bytes of one part of an upload


class ObjectStoreBackend:
    """s3://BUCKET/PREFIX. Trainers do not lease it: give each run its own prefix."""

    def __init__(self, address: str) -> None:
        try:
            self._library: Any = importlib.import_module("obstore")
        except ImportError:
            raise ConfigError(
                f"weights.dir '{address}' needs obstore; pip install 'peralta_zmq[s3]'"
            ) from None
        plain = os.environ.get("AWS_ENDPOINT", "").startswith("http://")
        self._bucket: Any = self._library.store.from_url(
            address, client_options={"allow_http": plain, "timeout": "60s"}
        )
        self.where = address

    def names(self) -> list[str]:
        """The prefixes below ours."""
        with self._as_os_error():
            listed: Any = self._library.list_with_delimiter(self._bucket)
            return [str(each).rpartition("/")[2] for each in listed["common_prefixes"]]

    def path(self, name: str) -> Path:
        """The name alone."""
        return Path(name)

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """An object in chunks."""
        options = {"range": {"offset": start}} if start else None
        with self._as_os_error():
            found: Any = self._library.get(self._bucket, path, options=options)
            for chunk in found.stream(min_chunk_size=atomic_files.CHUNK):
                yield bytes(chunk)

    def write_whole(
        self, name: str, files: Mapping[str, Content], about: About | Callable[[], About]
    ) -> Manifest:
        """The files, the manifest, then STABLE."""
        written = {each: self._put(f"{name}/{each}", content) for each, content in files.items()}
        manifest, text = atomic_files.describe(written, about() if callable(about) else about)
        self._put(f"{name}/{atomic_files.MANIFEST}", text)
        self._put(f"{name}/{atomic_files.STABLE}", manifest.digest.encode())
        return manifest

    def write_file(self, name: str, content: bytes) -> None:
        """An object appears whole by itself."""
        self._put(name, content)

    def remove(self, name: str) -> None:
        """STABLE first, so that no reader begins."""
        with contextlib.suppress(OSError), self._as_os_error():
            found = [each["path"] for page in self._library.list(self._bucket, f"{name}/")
                     for each in page]  # fmt: skip
            for path in sorted(found, key=lambda each: not each.endswith(atomic_files.STABLE)):
                self._library.delete(self._bucket, path)

    def prepare(self) -> None:
        """Raises OSError when the bucket cannot be reached."""
        self.names()

    def lease(self, holder: str) -> str | None:
        """Nobody else is known."""
        return None

    def release(self) -> None:
        """There is no lease."""

    def touch(self) -> None:
        """Listings of a bucket are never old."""

    def free_bytes(self) -> int:
        """As much as anyone pays for."""
        return UNLIMITED

    @contextlib.contextmanager
    def reading(self, name: str) -> Generator[None, None, None]:
        """Nobody is told; `weights.keep_seconds` gives readers their time."""
        yield

    def being_read(self) -> set[str]:
        """Unknown."""
        return set()

    def _put(self, path: str, content: Content) -> tuple[int, str]:
        hashed, sizes = hashlib.sha256(), [0]

        def pieces() -> Iterator[bytes]:
            for chunk in atomic_files.chunks_of(content):
                hashed.update(chunk)
                sizes[0] += len(chunk)
                yield bytes(chunk)

        with self._as_os_error():
            self._library.put(self._bucket, path, pieces(), chunk_size=PART)
        return sizes[0], hashed.hexdigest()

    @contextlib.contextmanager
    def _as_os_error(self) -> Generator[None, None, None]:
        """What obstore raises, in the words of a file system, on one line."""
        try:
            yield
        except FileNotFoundError:
            raise
        except self._library.exceptions.BaseError as error:
            raise OSError(" ".join(str(error).split())[:200]) from None
