"""A complete local copy of one version, updated in place by deltas.

The folder holds what `from_pretrained` needs, and while the copy is valid the manifest of
its version as `replica.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from pathlib import Path

from peralta_zmq import atomic_files
from peralta_zmq.errors import StoreError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.weights import delta
from peralta_zmq.weights import tensors as sets
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import DELTA, WEIGHTS, Version, folder_name

STATE, INCOMING = "replica.json", "incoming"


class LocalReplica:
    """`version` is None while there is no valid copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version: Version | None = None
        self.mapped = False  # a model may have mapped the weights file: replace it, do not patch it

    def tensors(self) -> sets.MappedTensors:
        """Views of the weights; their values change when a delta is applied."""
        return sets.MappedTensors(self.folder / WEIGHTS)

    def recover(self) -> Version | None:
        """The version that an earlier process left, if its weights verify."""
        with contextlib.suppress(OSError, *atomic_files.MALFORMED):
            text = (self.folder / STATE).read_bytes()
            stable = hashlib.sha256(text).hexdigest().encode()
            manifest = atomic_files.parse_manifest(text, stable=stable, where=STATE)
            version = Version.from_manifest(Path(folder_name(manifest.about["number"])), manifest)
            if sets.digest_of(self.tensors()) == version.field("result"):
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
        """Fetch what is missing for `version`, then change the copy; returns the bytes read.

        `model` is the required model fingerprint. `before_change` is called after all files were
        fetched. Raises StoreError: before the change with the copy untouched, after it with no
        valid copy left.
        """
        if self.version is not None and self.version.weights_id == version.weights_id:
            return 0
        if version.run_id != store.run_id:
            raise StoreError(f"version {version.number} belongs to another run")
        if model not in (None, version.field("model")):
            store.quarantine(version)
            raise StoreError(f"version {version.number} is of another model")
        chain = store.chain(version, self.version)
        incoming = self.folder / INCOMING
        shutil.rmtree(incoming, ignore_errors=True)
        try:
            with ExitStack() as marks:
                for link in chain:
                    marks.enter_context(store.backend.reading(folder_name(link.number)))
                for link in chain:
                    _fetch(store, link, incoming / str(link.number))
            failpoint("load.fetched")
            before_change()
            self._change(store, chain, incoming)
        except OSError as error:  # of the local disk
            raise StoreError(f"the copy in {self.folder} cannot be written: {error}") from None
        finally:
            with contextlib.suppress(OSError):  # rmtree raises a failed close even so
                shutil.rmtree(incoming, ignore_errors=True)
        return sum(link.size for link in chain)

    def _change(self, store: WeightStore, chain: list[Version], incoming: Path) -> None:
        self.version = None
        (self.folder / STATE).unlink(missing_ok=True)
        failpoint("load.unmarked")
        if self.mapped:
            shutil.copyfile(self.folder / WEIGHTS, self.folder / f"{INCOMING}.weights")
            os.replace(self.folder / f"{INCOMING}.weights", self.folder / WEIGHTS)
            self.mapped = False
        for link in chain:
            try:
                self._check(link, self._apply(link, incoming / str(link.number)))
            except ValueError as error:
                store.count_mismatch(link)
                if link is not chain[-1]:
                    store.count_mismatch(chain[-1])
                raise StoreError(f"version {link.number} does not verify: {error}") from None
            failpoint("load.changed")
        self._write_state(chain[-1])
        failpoint("load.marked")

    def _apply(self, link: Version, fetched: Path) -> Mapping[str, int]:
        """Apply a fetched delta or keyframe; returns the crc32 of each tensor."""
        if link.kind == "delta":
            chunks = atomic_files.read_chunks(fetched / DELTA)
            target = sets.MappedTensors(self.folder / WEIGHTS, writable=True)
            return delta.apply(delta.reader_of(chunks), target)
        for file in fetched.iterdir():
            os.replace(file, self.folder / file.name)
        return sets.checksums_of(self.tensors())

    def _check(self, link: Version, checksums: Mapping[str, int]) -> None:
        specs = self.tensors().specs
        if link.field("model") not in (None, sets.fingerprint(specs)):
            raise ValueError("the weights are of another model than the manifest's")
        if link.field("result") not in (None, sets.set_digest(checksums, specs)):
            raise ValueError("the weights do not have the digest in the manifest")

    def _write_state(self, version: Version) -> None:
        _, text = atomic_files.describe(version.manifest.files, version.manifest.about)
        atomic_files.replace_file(self.folder / STATE, text)
        self.version = version


def _fetch(store: WeightStore, version: Version, target: Path) -> None:
    """Copy all files of a version, verified while they are read."""
    target.mkdir(parents=True)
    for name in version.manifest.files:
        with (target / name).open("wb") as copy:
            for chunk in store.read(version, name):
                copy.write(chunk)
                failpoint("load.chunk")


@contextlib.contextmanager
def load_version(store: WeightStore, version: Version) -> Generator[Path, None, None]:
    """A temporary folder with the complete, verified weights of a version.

    Raises StoreError, as `LocalReplica.advance`.
    """
    with tempfile.TemporaryDirectory(prefix="peralta-") as folder:
        LocalReplica(Path(folder)).advance(store, version)
        yield Path(folder)


def export_step(store: WeightStore, step: int, target: Path) -> Version:
    """Write the newest version of `step` to the new folder `target`, for `from_pretrained`.

    Raises StoreError if there is no version of the step, it cannot be read, or `target` exists.
    """
    version = store.version_of_step(step)
    if target.exists():
        raise StoreError(f"{target} exists; choose a new folder")
    try:
        with load_version(store, version) as folder:
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns(STATE))
    except OSError as error:
        raise StoreError(f"{target} cannot be written ({error.strerror})") from None
    return version
