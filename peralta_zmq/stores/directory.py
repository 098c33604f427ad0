"""Published weights as a folder of step-numbered versions. Knows files; knows nothing of models.

A version is one finished folder (see durable): model.safetensors, what transformers needs to load
it, a manifest, and STABLE. It appears by a rename, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import safe_open

from peralta_zmq import durable
from peralta_zmq.errors import StoreError

WEIGHTS = "model.safetensors"
IDENTITY = "RUN.json"
MIN_FREE_VERSIONS = 2
MAX_MISMATCHES = 3  # a NAS may serve stale pages once or twice


@dataclass(frozen=True, slots=True)
class Version:
    """A published version: its number in the folder, and the optimizer step that made it."""

    number: int
    step: int
    folder: Path
    manifest: durable.Manifest

    @property
    def run_id(self) -> str:
        """The run that it belongs to."""
        return str(self.manifest.about.get("run_id"))

    @property
    def wid(self) -> str:
        """What tells these weights from all others: 16 hexadecimal digits."""
        return self.manifest.digest[:16]


class DirectoryStore:
    """One run's weights folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mismatches: Counter[str] = Counter()  # by manifest digest

    @property
    def run_id(self) -> str | None:
        """The run that owns the folder, or None before a trainer has made it."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads((self.folder / IDENTITY).read_text("utf-8"))["run_id"])
        return None

    def claim(self, run_id: str) -> None:
        """Make the folder this run's.

        Raises StoreError when it cannot be written or belongs to another run.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / IDENTITY).exists():
                text = json.dumps({"format": 1, "run_id": run_id}) + "\n"
                durable.replace_file(self.folder / IDENTITY, text.encode())
            elif not os.access(self.folder, os.W_OK):
                raise PermissionError("not writable")
        except OSError as error:
            reason = error.strerror or str(error)
            raise StoreError(
                f"weights folder {self.folder} cannot be written ({reason}); "
                "mount it, free it, or choose another with --weights.dir"
            ) from None
        if self.run_id != run_id:
            raise StoreError(
                f"weights folder {self.folder} belongs to run {self.run_id}, not to {run_id}; "
                "choose another with --weights.dir, or delete it"
            )
        durable.sweep(self.folder)

    def publish(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        companions: Mapping[str, bytes],
        keep_last: int = 3,
    ) -> Version:
        """Write the next version with its companion files (config, tokenizer), then prune.

        Numbers follow the step and are never reused. Raises StoreError when the folder is gone,
        full or read-only; nothing half-written stays.
        """
        weights = safetensors.torch.save(dict(tensors), metadata={"format": "pt"})
        try:
            number = max([step, *(taken + 1 for taken in durable.steps_in(self.folder))])
            final = self.folder / f"step_{number:08d}"
            self._check_space(len(weights))
            if (run_id := self.run_id) is None:  # an empty folder where the mount was
                raise OSError(f"{IDENTITY} is gone; is it mounted?")
            about = {"format": 1, "run_id": run_id, "number": number, "step": step}
            manifest = durable.write_folder(final, {WEIGHTS: weights, **companions}, about)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StoreError(f"cannot publish step {step} to {self.folder}: {reason}") from None
        self.prune(keep_last)
        return Version(number, step, final, manifest)

    def newest(self) -> Version | None:
        """The newest version whose STABLE and manifest agree, or None.

        None too while the folder cannot be listed: the NAS may come back.
        """
        with contextlib.suppress(OSError):
            return self._newest()
        return None

    def _newest(self) -> Version | None:
        for number, folder in reversed(durable.steps_in(self.folder).items()):
            try:
                manifest = durable.read_manifest(folder)
                step = int(manifest.about["step"])
            except (OSError, durable.CorruptError, *durable.MALFORMED):
                continue
            if self._mismatches[manifest.digest] < MAX_MISMATCHES and WEIGHTS in manifest.files:
                return Version(number, step, folder, manifest)
        return None

    @contextlib.contextmanager
    def load(self, version: Version) -> Generator[Path, None, None]:
        """A local, verified copy of the version's folder, removed on leaving.

        Raises StoreError when it cannot be read (look again) or is not what the manifest
        promised; after three such mismatches the version is quarantined.
        """
        if version.run_id != self.run_id:
            raise StoreError(f"version {version.number} belongs to another run")
        with tempfile.TemporaryDirectory(prefix="peralta-") as local:
            try:
                for name in version.manifest.files:
                    with (Path(local) / name).open("wb") as copy:
                        for chunk in durable.read_verified(version.folder, name, version.manifest):
                            copy.write(chunk)
            except FileNotFoundError:  # pruned while we read; a newer one is there
                raise StoreError(f"version {version.number} is gone; look again") from None
            except OSError as error:
                raise StoreError(f"version {version.number} cannot be read: {error}") from None
            except durable.CorruptError as error:
                self._mismatches[version.manifest.digest] += 1
                raise StoreError(f"version {version.number} does not verify: {error}") from None
            yield Path(local)

    def prune(self, keep_last: int) -> None:
        """Remove all but the newest `keep_last` versions."""
        for folder in list(durable.steps_in(self.folder).values())[:-keep_last]:
            durable.remove_folder(folder)

    def quarantine(self, version: Version) -> None:
        """Do not offer this version again; a number is never reused."""
        self._mismatches[version.manifest.digest] = MAX_MISMATCHES

    def _check_space(self, size: int) -> None:
        space = os.statvfs(self.folder)
        free = space.f_bavail * space.f_frsize
        if free < MIN_FREE_VERSIONS * size:
            raise OSError(f"{free >> 20} MiB free, {MIN_FREE_VERSIONS * size >> 20} MiB needed")


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, each read when asked for."""

    def __init__(self, file: Path) -> None:
        self._file = cast(Any, safe_open(file, framework="pt"))
        self._names = cast("list[str]", self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        return cast(torch.Tensor, self._file.get_tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
