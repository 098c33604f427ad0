"""Sizes of a small checkout, and a check against a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import sizes

MODULE = '''"""A module of four words."""

from os import sep  # not a comment line

# a comment line
LIMIT = 3
BYTES, NAME = 4 << 20, "x"
SIZES: tuple[int, ...] = (1, 2)
IS_ON = True
half = LIMIT / 2


def swap(a, b):
    """Two words."""
    a, b = b, a
    return """no docstring""", a, b
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "peralta_zmq/deep/module.py": MODULE,
        "docs/config.md": "| setting |\n|---|\n| `rank` | 1 |\n| `alpha` | 2 |\n",
        "docs/more/page.md": "Three more words\n",
        "tests/test_it.py": "\n\n",
        "tools/a.py": "x = 1\n",
        "benchmarks/b.py": "y = 2\n\n",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return tmp_path


def test_sizes_of_a_checkout(checkout: Path) -> None:
    assert sizes.sizes(checkout) == {
        "package_lines": 16,
        "package_code_lines": 9,
        "settings": 2,
        "numeric_constants": 3,  # LIMIT, BYTES and SIZES
        "docs_words": 17,
        "docstring_words_per_100_lines": 43.8,
        "tests_lines": 2,
        "benchmarks_and_tools_lines": 3,
        "parallel_assignments_per_1000_lines": 125.0,
    }


def test_budget_names_each_exceeded_size(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = checkout / "budget.toml"
    budget.write_text("package_lines = 15\nsettings = 1\ndocs_words = 17\n")
    assert sizes.main([str(checkout), "--check", str(budget)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "package_lines is 16, the budget 15", "settings is 2, the budget 1"
    ]  # fmt: skip
    budget.write_text("package_lines = 16\n")
    assert sizes.main([str(checkout), "--check", str(budget)]) == 0


def test_budget_of_the_repository_names_known_sizes() -> None:
    assert (
        sizes.read_budget(sizes.REPO / ".ci/budget.toml").keys() <= sizes.sizes(sizes.REPO).keys()
    )
