"""One published version and what its manifest may say. Knows manifests; reads no file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from peralta_zmq import atomic_files

WEIGHTS, DELTA = "model.safetensors", "delta.bin"
IDENTITY = "RUN.json"
FORMAT = 2
TEXTS = ("run_id", "model", "base", "result", "adapts", "adapts_name")  # of a manifest
NAME = re.compile(r"step_\d{8}")  # a listing may hold what people and machines left there
Kind = Literal["keyframe", "delta"]


@dataclass(frozen=True, slots=True)
class Version:
    """A published version: its number in the store, and the optimizer step that made it."""

    number: int
    step: int
    folder: Path  # where it lies; its name alone when that is no folder of this machine
    manifest: atomic_files.Manifest

    @property
    def run_id(self) -> str:
        """The run that it belongs to."""
        return str(self.manifest.about.get("run_id"))

    @property
    def weights_id(self) -> str:
        """What tells these weights from all others: 16 hexadecimal digits."""
        return self.manifest.digest[:16]

    @property
    def kind(self) -> Kind:
        """Whether it holds all weights or what changed since its parent."""
        return cast(Kind, self.manifest.about.get("kind", "keyframe"))

    @property
    def parent(self) -> int:
        """The number of the version that a delta changes; -1 for a keyframe."""
        return int(self.manifest.about.get("parent", -1))

    @property
    def depth(self) -> int:
        """Deltas between the keyframe and this version, itself included."""
        return int(self.manifest.about.get("depth", 0))

    @property
    def line(self) -> int:
        """Roll-backs of the run before it was made; 0 when it does not say."""
        return int(self.manifest.about.get("line", 0))

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(size for size, _ in self.manifest.files.values())

    def says(self, field: str) -> str | None:
        """A text of the manifest: result, base, model, adapts; None when it does not say."""
        return cast("str | None", self.manifest.about.get(field))


def name_of(number: int) -> str:
    """7 -> step_00000007."""
    return f"step_{number:08d}"


def version_of(folder: Path, manifest: atomic_files.Manifest) -> Version:
    """The version that a manifest describes. Raises CorruptError when it makes no sense."""
    about = manifest.about
    number, step = about.get("number"), about.get("step")
    depth, parent, line = about.get("depth", 0), about.get("parent", -1), about.get("line", 0)
    kind = about.get("kind", "keyframe")
    numbers = all(type(each) is int for each in (number, step, depth, parent, line))
    if not numbers or name_of(cast(int, number)) != folder.name or cast(int, step) < 0:
        raise atomic_files.CorruptError(f"{folder.name}: its manifest names another number or step")
    if kind not in ("keyframe", "delta") or (kind == "delta") != (0 <= parent < cast(int, number)):
        raise atomic_files.CorruptError(f"{folder.name}: neither a keyframe nor a delta")
    if (WEIGHTS if kind == "keyframe" else DELTA) not in manifest.files:
        raise atomic_files.CorruptError(f"{folder.name}: a {kind} without its weights")
    if not all(_is_text(about.get(field)) for field in TEXTS):
        raise atomic_files.CorruptError(f"{folder.name}: a digest that is none")
    return Version(cast(int, number), cast(int, step), folder, manifest)


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)
