"""Half a minute of the long run, a row of the fault table in docs/reliability.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from real_programs import REPO, processes_that_name, skip_without_mounting

from tools.small_disk import MOUNTING


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_soak_keeps_all_promises_and_prints_its_report(tmp_path: Path) -> None:
    skip_without_mounting()
    command = [*MOUNTING, sys.executable, "-m", "tools.soak", "--minutes", "0.5",
               "--run", str(tmp_path / "soak")]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    assert ended.returncode == 0, ended.stdout
    text = ended.stdout
    kills = re.search(r"^ok    faults (\d+) SIGKILLs", text, re.MULTILINE)
    assert kills and int(kills[1]) >= 1
    assert text.count("\nok    P") == 6
    assert "\nok    hostile " in text
    assert "\nok    ended by themselves 0, after a kill " in text
    assert processes_that_name(str(tmp_path)) == []
