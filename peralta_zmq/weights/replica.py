"""A local, whole copy of one version that is brought forward by deltas.

Knows a folder of this machine and a store; knows nothing of engines. The folder holds what
`from_pretrained` needs, and `copy.json` while it is sound.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peralta_zmq import atomic_files
from peralta_zmq.errors import StoreError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.weights import delta
from peralta_zmq.weights import tensors as sets
from peralta_zmq.weights.version import DELTA, WEIGHTS, Version, name_of, version_of

if TYPE_CHECKING:
    from peralta_zmq.weights.store import WeightStore

SOUND, INCOMING = "copy.json", "incoming"


class LocalReplica:
    """The copy; `version` is None while there is no sound one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version: Version | None = None
        self.shared = False  # transformers may go on using the file that it loaded

    def tensors(self) -> sets.MappedTensors:
        """Views of the copy's weights; they change when it advances by a delta."""
        return sets.MappedTensors(self.folder / WEIGHTS)

    def recover(self) -> Version | None:
        """The version of an earlier process, if every bit of it is still there."""
        with contextlib.suppress(OSError, *atomic_files.MALFORMED):
            said = json.loads((self.folder / SOUND).read_bytes())
            files = {name: (int(size), str(digest)) for name, (size, digest) in said["files"]}
            manifest = atomic_files.Manifest(said["digest"], said["about"], files)
            version = version_of(Path(name_of(said["about"]["number"])), manifest)
            if sets.digest_of(self.tensors()) == version.says("result"):
                self.version = version
        return self.version

    def advance(
        self,
        store: WeightStore,
        version: Version,
        *,
        model: str | None = None,
        before_change: Callable[[], None] = lambda: None,
    ) -> int:
        """Fetch what leads from here to `version`, then change the copy; returns the bytes read.

        `model` is the fingerprint to insist on. `before_change` is called when the fetched files
        lie here whole. Raises StoreError: before the change with the copy untouched, afterwards
        with no sound copy left.
        """
        if self.version is not None and self.version.weights_id == version.weights_id:
            return 0
        if version.run_id != store.run_id:
            raise StoreError(f"version {version.number} belongs to another run")
        if model not in (None, version.says("model")):
            store.quarantine(version)
            raise StoreError(f"version {version.number} is of another model")
        links = store.chain(version, self.version)
        incoming = self.folder / INCOMING
        shutil.rmtree(incoming, ignore_errors=True)
        try:
            with ExitStack() as reading:
                for link in links:
                    reading.enter_context(store.place.reading(name_of(link.number)))
                for link in links:
                    _fetch(store, link, incoming / str(link.number))
            failpoint("load.fetched")
            before_change()
            self._change(store, links, incoming)
        except OSError as error:  # our own disk
            raise StoreError(f"the copy in {self.folder} cannot be written: {error}") from None
        finally:
            with contextlib.suppress(OSError):  # a failed close inside is not ignored by rmtree
                shutil.rmtree(incoming, ignore_errors=True)
        return sum(link.size for link in links)

    def _change(self, store: WeightStore, links: list[Version], incoming: Path) -> None:
        self.version = None
        (self.folder / SOUND).unlink(missing_ok=True)
        failpoint("load.unmarked")
        if self.shared:
            shutil.copyfile(self.folder / WEIGHTS, self.folder / f"{INCOMING}.weights")
            os.replace(self.folder / f"{INCOMING}.weights", self.folder / WEIGHTS)
            self.shared = False
        for link in links:
            try:
                checksums = self._apply(link, incoming / str(link.number))
                self._check(link, checksums)
            except ValueError as error:
                store.mismatch(link)
                if link is not links[-1]:
                    store.mismatch(links[-1])
                raise StoreError(f"version {link.number} does not verify: {error}") from None
            failpoint("load.changed")
        self._mark(links[-1])
        failpoint("load.marked")

    def _apply(self, link: Version, fetched: Path) -> Mapping[str, int]:
        """Take a fetched version in; returns the crc32 of each tensor."""
        if link.kind == "delta":
            chunks = atomic_files.read_chunks(fetched / DELTA)
            return delta.apply(
                delta.reader_of(chunks), sets.MappedTensors(self.folder / WEIGHTS, writable=True)
            )
        for file in fetched.iterdir():
            os.replace(file, self.folder / file.name)
        return sets.checksums_of(self.tensors())

    def _check(self, link: Version, checksums: Mapping[str, int]) -> None:
        specs = self.tensors().specs
        if link.says("model") not in (None, sets.fingerprint(specs)):
            raise ValueError("it is of another model than its manifest says")
        if link.says("result") not in (None, sets.set_digest(checksums, specs)):
            raise ValueError("its weights are others than its manifest says")

    def _mark(self, version: Version) -> None:
        manifest = version.manifest
        said: dict[str, Any] = {
            "digest": manifest.digest, "about": manifest.about,
            "files": list(manifest.files.items()),
        }  # fmt: skip
        atomic_files.replace_file(self.folder / SOUND, json.dumps(said).encode())
        self.version = version


def _fetch(store: WeightStore, version: Version, target: Path) -> None:
    """All files of a version, verified on the way."""
    target.mkdir(parents=True)
    for name in version.manifest.files:
        with (target / name).open("wb") as copy:
            for chunk in store.read(version, name):
                copy.write(chunk)
                failpoint("load.chunk")
