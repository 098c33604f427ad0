"""Compiles the C files of this folder, once per machine, and loads the libraries."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# Sums may be reordered; NaN stays NaN (no -ffinite-math-only).
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math",
)  # fmt: skip
COMPILE_TIMEOUT = 60.0  # seconds
REMEDY = "on Debian, install the packages gcc and libc6-dev"
POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
logger = logging.getLogger(__name__)


def load(
    source: str,
    functions: Mapping[str, Sequence[Any]],
    defines: tuple[str, ...] = (),
    *,
    check: Callable[[ctypes.CDLL], bool],
) -> ctypes.CDLL | None:
    """The compiled library of `source`; `functions` maps names to argument types.

    None if it cannot be compiled or if `check` finds wrong results; the reason is logged.
    """
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(str(_compiled(Path(__file__).with_name(source), defines)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        # RuntimeError: Path.home() of a user without a home directory
        logger.info("%s is not compiled, which is slower: %s", source, error)
        return None
    for name, argument_types in functions.items():
        getattr(library, name).argtypes = argument_types
    if check(library):
        return library
    logger.warning("%s is not used, which is slower: its results differ from torch's", source)
    return None


def processor() -> str:
    """The CPU flags, part of the library's key: machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # not Linux, or hidden
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compiled(source: Path, defines: tuple[str, ...]) -> Path:
    """The library for this machine, compiled if it is not in the user's cache folder.

    Its name contains the hash of its content: loading a damaged library may end the process.
    """
    cc = shutil.which("cc")
    if cc is None:
        raise FileNotFoundError(f"no C compiler here (cc); {REMEDY}")
    flags = [cc, *FLAGS, *defines]
    machine = repr((flags, processor(), platform.libc_ver(), _openmp())).encode()
    name = f"{source.stem}-{_hash(source.read_bytes() + machine)}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peralta_zmq"
    for library in folder.glob(f"{name}-*.so"):
        if library.stem == f"{name}-{_hash(library.read_bytes())}":
            return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        object_file, library = Path(temporary) / "kernel.o", Path(temporary) / "kernel.so"
        _run([*flags, "-c", str(source), "-o", str(object_file)])
        # Linked without FLAGS: with some of them, some compilers add start-up code that changes
        # the floating-point mode of the process.
        _run([cc, "-shared", str(object_file), str(_openmp()), "-lm", "-o", str(library)])
        with library.open("rb") as content:
            os.fsync(content.fileno())
            target = folder / f"{name}-{_hash(content.read())}.so"
        os.replace(library, target)
    return target


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
    if result.returncode:
        reason = (result.stderr.strip() or "no error message").splitlines()[-1]
        raise OSError(f"{command[0]} fails ({reason}); {REMEDY}")


def _openmp() -> Path:
    """torch's own OpenMP library: the threads of a second one would compete with torch's."""
    packages = Path(torch.__file__).parent
    for folder in (packages / "lib", packages.with_name("torch.libs")):
        for library in sorted(folder.glob("libgomp*")):
            return library
    raise FileNotFoundError("this build of torch has no libgomp")
