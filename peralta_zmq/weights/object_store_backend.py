"""Weight versions in an object store such as S3. Needs the extra `s3` (obstore).

Credentials and endpoint are taken from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_REGION, AWS_ENDPOINT.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import About, Content, Manifest
from peralta_zmq.errors import import_extra
from peralta_zmq.weights.locks import FolderLocks

PART = 8 << 20  # bytes of one part of a multipart upload


class ObjectStoreBackend:
    """Store at s3://BUCKET/PREFIX. A version is complete when STABLE, written last, exists.

    It has no publisher lock: two trainers must not use the same prefix. It has no read marks:
    `weights.keep_seconds` must be long enough for the slowest reader.
    """

    def __init__(self, address: str) -> None:
        self._obstore = import_extra("obstore", extra="s3", needed_by=f"weights.dir '{address}'")
        is_plain_http = os.environ.get("AWS_ENDPOINT", "").startswith("http://")
        self._bucket: Any = self._obstore.store.from_url(
            address, client_options={"allow_http": is_plain_http, "timeout": "60s"}
        )
        self.address = address
        self.locks = FolderLocks(None)

    def names(self) -> list[str]:
        """Names of the folders; objects at the top level are not listed."""
        with self._as_os_error():
            listing: Any = self._obstore.list_with_delimiter(self._bucket)
            return [str(prefix).rpartition("/")[2] for prefix in listing["common_prefixes"]]

    def path(self, name: str) -> Path:
        return Path(name)

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """An object in chunks, from offset `start`."""
        options = {"range": {"offset": start}} if start else None
        with self._as_os_error():
            result: Any = self._obstore.get(self._bucket, path, options=options)
            for chunk in result.stream(min_chunk_size=atomic_files.CHUNK):
                yield bytes(chunk)

    def write_folder(self, name: str, files: Mapping[str, Content], about: About) -> Manifest:
        written = {file: self._put(f"{name}/{file}", content) for file, content in files.items()}
        manifest, text = atomic_files.describe(written, about)
        self._put(f"{name}/{atomic_files.MANIFEST}", text)
        self._put(f"{name}/{atomic_files.STABLE}", manifest.digest.encode())
        return manifest

    def write_file(self, name: str, content: bytes) -> None:
        self._put(name, content)

    def remove(self, name: str) -> None:
        """Delete a folder, STABLE first: readers skip a folder without it."""
        with contextlib.suppress(OSError), self._as_os_error():
            pages = self._obstore.list(self._bucket, f"{name}/")
            paths = [entry["path"] for page in pages for entry in page]
            for path in sorted(paths, key=lambda path: not path.endswith(atomic_files.STABLE)):
                self._obstore.delete(self._bucket, path)

    def prepare(self) -> None:
        self.names()

    def free_bytes(self) -> int:
        return 1 << 62  # free bytes

    def _put(self, path: str, content: Content) -> tuple[int, str]:
        sha256 = hashlib.sha256()
        size = 0

        def chunks() -> Iterator[bytes]:
            nonlocal size
            for chunk in atomic_files.chunks_of(content):
                sha256.update(chunk)
                size += len(chunk)
                yield bytes(chunk)

        with self._as_os_error():
            self._obstore.put(self._bucket, path, chunks(), chunk_size=PART)
        return size, sha256.hexdigest()

    @contextlib.contextmanager
    def _as_os_error(self) -> Generator[None, None, None]:
        """Convert obstore's exceptions to OSError with a one-line message."""
        try:
            yield
        except FileNotFoundError:
            raise
        except self._obstore.exceptions.BaseError as error:
            raise OSError(" ".join(str(error).split())[:200]) from None
