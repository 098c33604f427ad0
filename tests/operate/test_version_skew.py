"""Workers with different versions of Python, torch and transformers train together.

`make test-skew PYTHON=python3.13` creates a second environment and runs this test; by hand:
PERALTA_OTHER_PYTHON=.venv-other/bin/python .venv/bin/python -m pytest -m lan \
    tests/operate/test_version_skew.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_programs import REPO, RealRun

pytestmark = [pytest.mark.lan, pytest.mark.timeout(200)]
OTHER = "PERALTA_OTHER_PYTHON"
STEPS = 6
VERSIONS = ("package", "python", "torch", "transformers")
NEEDED = ("torch", "transformers", "zmq", "msgpack", "pydantic_config", "watchdog", "safetensors")
PROBE = f"""
import importlib.metadata as about, importlib.util as import_, json, platform, sys
missing = [name for name in {NEEDED} if import_.find_spec(name) is None]
facts = {{"python": platform.python_version(), "missing": missing}}
if not missing:
    import torch  # the metadata of a CUDA build lacks its suffix, as in 2.6.0+cu124
    facts["torch"], facts["transformers"] = torch.__version__, about.version("transformers")
    try:
        facts["package"] = about.version("peralta_zmq")
    except about.PackageNotFoundError:
        facts["package"] = "not installed"
json.dump(facts, sys.stdout)
"""


@dataclass(frozen=True)
class OtherPython:
    """Another Python interpreter, with a copy of the code in `folder`."""

    python: Path
    folder: Path
    versions: dict[str, str]

    def shell(self) -> str:
        """Shell script that starts the copy of a program of bin/ with this interpreter."""
        program = f'{self.folder}/bin/$(basename "$2")'
        return f'program={program}; shift 2; exec {self.python} "$program" "$@"'


def versions_of(python: Path) -> dict[str, str]:
    """Versions of an interpreter, and its `missing` libraries; empty if it does not run."""
    result = subprocess.run(
        [str(python), "-c", PROBE], capture_output=True, text=True, check=False, timeout=60, cwd="/"
    )  # fmt: skip
    return json.loads(result.stdout) if result.returncode == 0 else {}


def candidates() -> Iterator[Path]:
    """The interpreter in the variable OTHER, else other Pythons from 3.10 on of this machine."""
    if path := os.environ.get(OTHER):
        yield Path(path).absolute()
        return
    yield REPO / ".venv-other/bin/python"
    for minor in range(10, 16):
        if minor != sys.version_info.minor:
            yield from sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
            if program := shutil.which(f"python3.{minor}"):
                yield Path(program)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> OtherPython:
    """Skip the test without another interpreter; fail if the one in OTHER is not usable."""
    rejected: list[str] = []
    for python in candidates():
        versions = versions_of(python) if python.exists() else {"missing": "it does not exist"}
        if versions and not versions["missing"]:
            folder = tmp_path_factory.mktemp("elsewhere")
            for part in ("bin", "peralta_zmq"):
                shutil.copytree(REPO / part, folder / part,
                                ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
            return OtherPython(python, folder, versions)
        rejected.append(f"{python} (missing: {versions.get('missing', 'all')})")
    assert OTHER not in os.environ, rejected
    pytest.skip(
        "no other Python with torch and transformers: make test-skew PYTHON=python3.13 makes one, "
        f"or set {OTHER} to one; rejected: {'; '.join(rejected)}"
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RealRun]:
    opened = RealRun(tmp_path, "--train.max-steps", str(STEPS), "--train.learning-rate", "1e-5")
    yield opened
    opened.close()


def local_versions() -> dict[str, str]:
    return versions_of(Path(sys.executable))


def differences(generator: dict[str, str], trainer: dict[str, str]) -> str:
    """The text that a trainer logs about a generator with other versions."""
    labels = {"package": "peralta_zmq", "python": "Python", "torch": "torch",
              "transformers": "transformers"}  # fmt: skip
    return ", ".join(
        f"{label} {generator[name]} (here {trainer[name]})"
        for name, label in labels.items() if generator[name] != trainer[name]
    )  # fmt: skip


def logged_versions(trainer_log: str) -> str:
    """The versions in the trainer's log line about its only generator."""
    (versions,) = re.findall(r"generator skewed: .*?; (.*)$", trainer_log, re.MULTILINE)
    return versions


@pytest.mark.parametrize("elsewhere", ["generator", "trainer"])
def test_workers_with_other_versions_train_and_are_logged(
    run: RealRun, other: OtherPython, elsewhere: str
) -> None:
    options = {"shell": other.shell()}
    trainer = run.trainer(**options if elsewhere == "trainer" else {})
    generator = run.generator("skewed", **options if elsewhere == "generator" else {})
    assert trainer.wait(timeout=150) == 0, trainer.printed + generator.printed
    local, remote = local_versions(), other.versions
    at_trainer, at_generator = (local, remote) if elsewhere == "generator" else (remote, local)
    assert differences(remote, local), (
        "the versions are equal: rm -r .venv-other, make test-skew PYTHON=python3.13"
    )
    assert logged_versions(trainer.printed) == differences(at_generator, at_trainer)
    print(elsewhere, "elsewhere:", logged_versions(trainer.printed))
    (join,) = [row["worker_info"] for row in run.events if row["event"] in ("join", "worker_info")
               and row.get("worker_info")]  # fmt: skip
    assert isinstance(join, dict)
    assert {name: join[name] for name in VERSIONS} == {
        name: at_generator[name] for name in VERSIONS
    }

    assert run.step == STEPS
    trained = [float(str(row["gen/skewed/groups"])) for row in run.rows if row["step"]]
    assert sum(trained) * 4 >= STEPS * 16  # a group has 4 rollouts
    key = "gen/skewed/mismatch_kl"  # absent in a step without signal
    mismatch = [float(str(row[key])) for row in run.rows if key in row]
    print("mismatch_kl at most", max(mismatch))
    assert max(mismatch) < 1e-3  # a generator is flagged from 0.1 on
    assert run.broken(max_steps=STEPS) == {}
