"""Weight versions: the names and manifest fields of a published version, and their validation.

A version holds the weights after one training step, in a folder step_NUMBER: all of them (a
keyframe), or the change since an earlier version, its parent (a delta).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from peralta_zmq.atomic_files import CorruptError, Manifest

WEIGHTS, DELTA = "model.safetensors", "delta.bin"
RUN_FILE = "RUN.json"  # names the run that owns a weight store
VERSION_NAME = re.compile(r"step_\d{8}")
FORMAT = 2  # of the manifest
# Integer fields of the manifest with their defaults; None: the field is required.
NUMBERS = {"number": None, "step": None, "parent": -1, "depth": 0, "lineage": 0}
# Optional text fields: run; fingerprint of the model; digests of the parent's and of this version's
# weights; for a LoRA adapter, digest and name of the base model.
TEXTS = ("run_id", "model", "base", "result", "adapts", "adapts_name")


@dataclass(frozen=True, slots=True)
class Version:
    """A published weight version."""

    number: int  # in the store; not reused if the run is rolled back to an earlier step
    step: int  # training step
    folder: Path  # only the name if the store is not a folder
    manifest: Manifest
    run_id: str
    kind: Literal["keyframe", "delta"]  # all weights, or the change since the parent
    parent: int  # number of the version that a delta changes; -1 for a keyframe
    depth: int  # number of deltas since the keyframe, including this one
    lineage: int  # number of roll-backs of the run before this version

    @classmethod
    def from_manifest(cls, folder: Path, manifest: Manifest) -> Version:
        """Raises CorruptError if the manifest is inconsistent or of another folder."""
        about = manifest.about
        values = [about.get(name, default) for name, default in NUMBERS.items()]
        if not all(type(value) is int for value in values):
            raise CorruptError(f"{folder.name}: one of {', '.join(NUMBERS)} is not an integer")
        number, step, parent, depth, lineage = cast("list[int]", values)
        if folder_name(number) != folder.name or step < 0:
            raise CorruptError(f"{folder.name}: its manifest has number {number}, step {step}")
        kind = about.get("kind", "keyframe")
        if kind not in ("keyframe", "delta") or (kind == "delta") != (0 <= parent < number):
            raise CorruptError(f"{folder.name}: kind {kind!r:.80} with parent {parent}")
        if (WEIGHTS if kind == "keyframe" else DELTA) not in manifest.files:
            raise CorruptError(f"{folder.name}: a {kind} without its weights file")
        if not all(isinstance(about.get(name), str | None) for name in TEXTS):
            raise CorruptError(f"{folder.name}: one of {', '.join(TEXTS)} is not a string")
        run_id = str(about.get("run_id"))
        return cls(number, step, folder, manifest, run_id, kind, parent, depth, lineage)

    @property
    def weights_id(self) -> str:
        """Identifies a version across runs: 16 hexadecimal digits of the manifest's sha256."""
        return self.manifest.digest[:16]

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(size for size, _ in self.manifest.files.values())

    def field(self, name: str) -> str | None:
        """A text field of the manifest (one of TEXTS), or None if absent."""
        return cast("str | None", self.manifest.about.get(name))


def folder_name(number: int) -> str:
    """Name of a version's folder: 7 -> step_00000007."""
    return f"step_{number:08d}"
