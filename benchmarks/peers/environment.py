"""An environment for the peers beside ours: current releases from PyPI, torch shared with us."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.harness import REPO, progress

FOLDER = REPO / "runs" / "peers"
PACKAGES = ("trl", "ray", "accelerate", "datasets")


def python() -> Path:
    """The interpreter of the peers; makes their environment when it is not there yet.

    Our packages are seen through a .pth file, so that both sides compute with the same torch and
    transformers. Raises CalledProcessError when pip fails.
    """
    interpreter, done = FOLDER / "bin" / "python", FOLDER / "installed"
    if done.exists():
        return interpreter
    progress(f"installing {', '.join(PACKAGES)} into {FOLDER} (once; a few minutes)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    (FOLDER / _site() / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    constraints = REPO / ".ci" / "constraints.txt"
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--constraint", str(constraints), *PACKAGES], check=True, stdout=sys.stderr
    )
    done.touch()
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
