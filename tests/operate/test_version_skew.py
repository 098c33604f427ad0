"""Machines with other versions of Python, torch or transformers work together, and say so.

make test-skew PYTHON=python3.13 makes another environment and runs this with it; or by hand:
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
from field import REPO, Field

pytestmark = [pytest.mark.lan, pytest.mark.timeout(200)]
OTHER = "PERALTA_OTHER_PYTHON"
STEPS = 6
VERSIONS = ("package", "python", "torch", "transformers")
NEEDED = ("torch", "transformers", "zmq", "msgpack", "pydantic_config", "watchdog", "safetensors")
PROBE = f"""
import importlib.metadata as about, importlib.util as import_, json, platform, sys
missing = [name for name in {NEEDED} if import_.find_spec(name) is None]
said = {{"python": platform.python_version(), "missing": missing}}
if not missing:
    import torch  # of a CUDA build only it knows that it is one
    said["torch"], said["transformers"] = torch.__version__, about.version("transformers")
    try:
        said["package"] = about.version("peralta_zmq")
    except about.PackageNotFoundError:
        said["package"] = "not installed"
json.dump(said, sys.stdout)
"""


@dataclass(frozen=True)
class Other:
    """A machine with a Python of its own, and a copy of the code."""

    python: Path
    folder: Path
    versions: dict[str, str]

    def starts(self) -> str:
        """Shell that starts a door of the copy where ours would be started."""
        door = f'{self.folder}/bin/$(basename "$2")'
        return f'door={door}; shift 2; exec {self.python} "$door" "$@"'


def versions_of(python: Path) -> dict[str, str]:
    """What an interpreter has; `missing` names what a worker would miss. Empty: does not run."""
    asked = subprocess.run(
        [str(python), "-c", PROBE], capture_output=True, text=True, check=False, timeout=60, cwd="/"
    )  # fmt: skip
    return json.loads(asked.stdout) if asked.returncode == 0 else {}


def candidates() -> Iterator[Path]:
    """The one that is named, else any other Python 3.10 or later that this machine has."""
    if named := os.environ.get(OTHER):
        yield Path(named).absolute()
        return
    yield REPO / ".venv-other/bin/python"
    for minor in range(10, 16):
        if minor != sys.version_info.minor:
            yield from sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
            if found := shutil.which(f"python3.{minor}"):
                yield Path(found)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Other:
    """Skips where nobody has one; one that is named and does not do fails."""
    looked: list[str] = []
    for python in candidates():
        versions = versions_of(python) if python.exists() else {"missing": "it is not there"}
        if versions and not versions["missing"]:
            folder = tmp_path_factory.mktemp("elsewhere")
            for part in ("bin", "peralta_zmq"):
                shutil.copytree(REPO / part, folder / part,
                                ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
            return Other(python, folder, versions)
        looked.append(f"{python} (misses {versions.get('missing', 'all')})")
    assert OTHER not in os.environ, looked
    pytest.skip(
        "no other Python with torch and transformers: make test-skew PYTHON=python3.13 makes one, "
        f"or name one with {OTHER}; looked at {'; '.join(looked)}"
    )


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    opened = Field(tmp_path, "--train.max-steps", str(STEPS), "--train.learning-rate", "1e-5")
    yield opened
    opened.close()


def here() -> dict[str, str]:
    return versions_of(Path(sys.executable))


def differences(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """What a trainer with `ours` says of a generator with `theirs`."""
    labels = {"package": "peralta_zmq", "python": "Python", "torch": "torch",
              "transformers": "transformers"}  # fmt: skip
    return ", ".join(
        f"{label} {theirs[name]} (here {ours[name]})"
        for name, label in labels.items() if theirs[name] != ours[name]
    )  # fmt: skip


def said_at_join(trainer_log: str) -> str:
    """The versions in the trainer's line about its one generator."""
    (said,) = re.findall(r"generator skewed: .*?; (.*)$", trainer_log, re.MULTILINE)
    return said


@pytest.mark.parametrize("elsewhere", ["generator", "trainer"])
def test_workers_with_other_versions_train_together_and_the_trainer_tells_them(
    field: Field, other: Other, elsewhere: str
) -> None:
    how = {"shell": other.starts()}
    trainer = field.trainer(**how if elsewhere == "trainer" else {})
    generator = field.generator("skewed", **how if elsewhere == "generator" else {})
    assert trainer.ends(timeout=150) == 0, trainer.printed + generator.printed
    ours, theirs = here(), other.versions
    mine, others = (ours, theirs) if elsewhere == "generator" else (theirs, ours)
    assert differences(theirs, ours), (
        "the same versions prove nothing: rm -r .venv-other, make test-skew PYTHON=python3.13"
    )
    assert said_at_join(trainer.printed) == differences(others, mine)
    print(elsewhere, "elsewhere:", said_at_join(trainer.printed))
    (join,) = [row["hello"] for row in field.events if row["event"] in ("join", "hello")
               and row.get("hello")]  # fmt: skip
    assert isinstance(join, dict)
    assert {name: join[name] for name in VERSIONS} == {name: others[name] for name in VERSIONS}

    assert field.step == STEPS
    trained = [float(str(row["gen/skewed/groups"])) for row in field.rows if row["step"]]
    assert sum(trained) * 4 >= STEPS * 16  # all groups are its own, of 4 rollouts each
    key = "gen/skewed/mismatch_kl"  # a step without signal computes none
    mismatch = [float(str(row[key])) for row in field.rows if key in row]
    print("mismatch_kl at most", max(mismatch))
    assert max(mismatch) < 1e-3  # the bound that a generator is reported at is 0.1
    assert field.broken(max_steps=STEPS) == {}
