"""Virtual environment of the peers: releases from PyPI, with our torch and transformers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.harness import REPO, progress

CACHE = Path.home() / ".cache" / "peralta-peers"
PACKAGES = ("trl", "ray", "accelerate", "datasets")


def python() -> Path:
    """The interpreter of the peers; creates their environment at the first call.

    A .pth file makes our packages visible, so that both sides use the same torch and transformers.
    pip does not install what it finds there. Therefore the environment is cached by Python version,
    our packages with their versions, and the constraints. Raises CalledProcessError if pip fails.
    """
    ours, constraints = Path(sysconfig.get_path("purelib")).resolve(), REPO / ".ci/constraints.txt"
    installed = sorted(f"{found.name} {found.version}" for found in distributions(path=[str(ours)]))
    contents = f"{sys.version} {ours} {installed} {PACKAGES} {constraints.read_text('utf-8')}"
    folder = CACHE / hashlib.sha256(contents.encode()).hexdigest()[:12]
    interpreter, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return interpreter
    progress(f"installing {', '.join(PACKAGES)} into {folder} (once; a few minutes)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    (folder / _site() / "shared.pth").write_text(f"{ours}\n", "utf-8")
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--constraint", str(constraints), *PACKAGES], check=True, stdout=sys.stderr
    )
    complete.touch()
    return interpreter


def versions() -> dict[str, str]:
    """Versions of the peers' packages."""
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    command = [str(python()), "-c", code, *PACKAGES]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(result.stdout))


def _site() -> str:
    """Folder of the packages, relative to the environment."""
    return f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
