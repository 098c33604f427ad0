"""An environment for the peers beside ours: current releases from PyPI, torch shared with us."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.harness import REPO, progress

CACHE = Path.home() / ".cache" / "peralta-peers"
PACKAGES = ("trl", "ray", "accelerate", "datasets")


def python() -> Path:
    """The interpreter of the peers; makes their environment when there is no whole one yet.

    Our packages are seen through a .pth file, so that both sides compute with the same torch and
    transformers. All checkouts that share our packages share it; after a change of the
    constraints it is made anew. Raises CalledProcessError when pip fails.
    """
    ours, constraints = Path(sysconfig.get_path("purelib")).resolve(), REPO / ".ci/constraints.txt"
    made_of = f"{sys.version} {ours} {PACKAGES} {constraints.read_text('utf-8')}"
    folder = CACHE / hashlib.sha256(made_of.encode()).hexdigest()[:12]
    interpreter, whole = folder / "bin" / "python", folder / "whole"
    if whole.exists():
        return interpreter
    progress(f"installing {', '.join(PACKAGES)} into {folder} (once; a few minutes)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    (folder / _site() / "shared.pth").write_text(f"{ours}\n", "utf-8")
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--constraint", str(constraints), *PACKAGES], check=True, stdout=sys.stderr
    )
    whole.touch()
    return interpreter


def versions() -> dict[str, str]:
    """Of what was installed for the peers."""
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({each: version(each) for each in sys.argv[1:]}))"
    )
    command = [str(python()), "-c", code, *PACKAGES]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _site() -> str:
    """Where packages lie below the folder of an environment."""
    return f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
