"""C beside this file, compiled once for a machine. Knows compilers, not what they are given."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
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
        logger.info("%s is not compiled, which is slower: %s", source, error)
        return None
    for name, kinds in functions.items():
        getattr(library, name).argtypes = kinds
    return library


def processor() -> str:
    """What it can do: a home that is shared by machines holds a library for each."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux, or hidden
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _built(source: Path, defines: tuple[str, ...]) -> Path:
    """The library for this machine, built when it is not there yet; its name tells its content, as
    to load a damaged one may end the process."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError(f"no C compiler here (cc); {REMEDY}")
    flags = [compiler, *FLAGS, *defines]
    known = repr((flags, processor(), platform.libc_ver(), _openmp())).encode()
    name = f"{source.stem}-{_hash(source.read_bytes() + known)}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peralta_zmq"
    for built in folder.glob(f"{name}-*.so"):
        if built.stem == f"{name}-{_hash(built.read_bytes())}":
            return built
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        object_, library = Path(beside) / "its.o", Path(beside) / "its.so"
        _run([*flags, "-c", str(source), "-o", str(object_)])
        # Without FLAGS: some compilers let a library of such flags change the process's floats.
        _run([compiler, "-shared", str(object_), str(_openmp()), "-lm", "-o", str(library)])
        with library.open("rb") as whole:
            os.fsync(whole.fileno())
            built = folder / f"{name}-{_hash(whole.read())}.so"
        os.replace(library, built)
    return built


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


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
