"""Workers with different versions of Python, torch and transformers train together.

`make test-skew PYTHON=python3.13` creates a second environment and runs this test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_programs import REPO, RealRun

OTHER = os.environ.get("PERALTA_OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.lan,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not OTHER, reason="make test-skew PYTHON=python3.13 sets another Python"),
]
STEPS = 6
PROBE = """
import importlib.metadata as about, json, platform, sys, torch
json.dump({"package": about.version("peralta_zmq"), "python": platform.python_version(),
           "torch": torch.__version__, "transformers": about.version("transformers")}, sys.stdout)
"""


def versions_of(python: str) -> dict[str, str]:
    words = [str(Path(python).absolute()), "-c", PROBE]
    return json.loads(subprocess.run(words, capture_output=True, check=True, cwd="/").stdout)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RealRun]:
    opened = RealRun(tmp_path, "--train.max-steps", str(STEPS), "--train.learning-rate", "1e-5")
    yield opened
    opened.close()


@pytest.mark.parametrize("elsewhere", ["generator", "trainer"])
def test_workers_with_other_versions_train_and_are_logged(
    run: RealRun, tmp_path: Path, elsewhere: str
) -> None:
    copy = tmp_path / "elsewhere"  # outside of the checkout, whose .venv would start the programs
    for part in ("bin", "peralta_zmq"):
        shutil.copytree(REPO / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    shell = (
        f'program={copy}/bin/$(basename "$2"); shift 2; '
        f'exec {Path(OTHER).absolute()} "$program" "$@"'
    )
    trainer = run.trainer(**{"shell": shell} if elsewhere == "trainer" else {})
    generator = run.generator("skewed", **{"shell": shell} if elsewhere == "generator" else {})
    assert trainer.wait(timeout=150) == 0, trainer.printed + generator.printed
    local, other = versions_of(sys.executable), versions_of(OTHER)
    assert local != other, "rm -r .venv-other, make test-skew PYTHON=python3.13"
    (logged,) = re.findall(r"generator skewed: .*?; (.*)$", trainer.printed, re.MULTILINE)
    at_generator = other if elsewhere == "generator" else local
    for name, version in at_generator.items():
        assert (version in logged) == (local[name] != other[name])
    joins = [row["worker_info"] for row in run.events if row.get("worker_info")]
    assert all(at_generator.items() <= join.items() for join in joins if isinstance(join, dict))

    assert run.step == STEPS
    trained = [float(str(row["gen/skewed/groups"])) for row in run.rows if row["step"]]
    assert sum(trained) * 4 >= STEPS * 16  # a group has 4 rollouts
    key = "gen/skewed/mismatch_kl"  # absent in a step without signal
    assert max(float(str(row[key])) for row in run.rows if key in row) < 1e-3
    assert run.broken(max_steps=STEPS) == {}
