"""C beside this file, compiled once for a machine. Knows compilers, not what they are given."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# What lets sums be reordered; a NaN stays a NaN.
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math",
)  # fmt: skip
BUILD_SECONDS = 60.0
REMEDY = "Debian's is in the packages gcc and libc6-dev"
logger = logging.getLogger(__name__)


def load(
    source: str, functions: Mapping[str, Sequence[Any]], defines: tuple[str, ...] = ()
) -> ctypes.CDLL | None:
    """The library of `source`, whose `functions` take arguments of these kinds; None, and a line
    that says why, where it cannot be built."""
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(str(_built(Path(__file__).with_name(source), defines)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home is the second
        logger.info("decoding by torch alone, which is slower: %s", error)
        return None
    for name, kinds in functions.items():
        getattr(library, name).argtypes = kinds
    return library


def processor() -> str:
    """What it can do: a home that is shared by machines holds a library for each."""
    if sys.platform != "linux":
        return ""
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _built(source: Path, defines: tuple[str, ...]) -> Path:
    """The library for this machine, built when it is not there yet."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError(f"no C compiler here (cc); {REMEDY}")
    flags = [compiler, *FLAGS, *defines]
    known = repr((flags, processor(), _openmp())).encode()
    key = hashlib.sha256(source.read_bytes() + known).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peralta_zmq"
    built = folder / f"{source.stem}-{key}.so"
    if not built.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            object_, library = Path(beside) / "its.o", Path(beside) / "its.so"
            _run([*flags, "-c", str(source), "-o", str(object_)])
            # Without FLAGS: some compilers let a library of such flags change the process's floats.
            _run([compiler, "-shared", str(object_), str(_openmp()), "-lm", "-o", str(library)])
            with library.open("rb") as whole:
                os.fsync(whole.fileno())
            os.replace(library, built)
    return built


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    if done.returncode:
        why = (done.stderr.strip() or "nothing said").splitlines()[-1]
        raise OSError(f"{command[0]} fails ({why}); {REMEDY}")


def _openmp() -> Path:
    """torch's own: the threads of another one would wait beside its, each busily."""
    packages = Path(torch.__file__).parent
    for folder in (packages / "lib", packages.with_name("torch.libs")):
        for library in sorted(folder.glob("libgomp*")):
            return library
    raise FileNotFoundError("torch brings no libgomp")
