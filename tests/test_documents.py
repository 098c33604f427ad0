"""Tests and files that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).parents[1]


def test_tests_named_in_the_table_of_faults_exist() -> None:
    page = (REPO / "docs/reliability.md").read_text("utf-8")
    sources = "".join(path.read_text("utf-8") for path in REPO.glob("tests/**/*.py"))
    tests = set(re.findall(r"`(test_\w+)`", page))
    assert len(tests) > 50
    assert {name for name in tests if f"def {name}(" not in sources} == set()
    paths = set(re.findall(r"\btests/[\w/]+(?:\.py)?", page))
    assert {path for path in paths if not (REPO / path).exists()} == set()
