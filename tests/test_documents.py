"""Tests, files, links and settings that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peralta_zmq.config.schema import known_fields

REPO = Path(__file__).parents[1]
PAGES = [*REPO.glob("*.md"), *REPO.glob("docs/*.md")]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
PATH = re.compile(
    r"`((?:peralta_zmq|tests|docs|configs|tools|benchmarks|examples|deploy)/[\w./-]+)`"
)
SETTING = re.compile(r"(?:`|--(?:no-)?)([a-z_]+)\.([a-z][a-z0-9_-]+)")
EXAMPLES = {  # files that a reader makes
    "configs/hosts.toml",
    "peralta_zmq/environments/doubling.py",
    "tests/environments/test_doubling.py",
}
FILES = ("json", "jsonl", "md", "png", "py", "toml", "html", "yaml", "service", "plist", "public")


def anchors(page: Path) -> set[str]:
    """The anchors of a page: GitHub's names of its headings, and those that it sets itself."""
    text = page.read_text("utf-8")
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    names = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return names | set(re.findall(r'<a id="([\w-]+)">', text))


def test_tests_named_in_the_table_of_faults_exist() -> None:
    page = (REPO / "docs/reliability.md").read_text("utf-8")
    sources = "".join(path.read_text("utf-8") for path in REPO.glob("tests/**/*.py"))
    tests = set(re.findall(r"`(test_\w+)`", page))
    assert len(tests) > 50
    assert {name for name in tests if f"def {name}(" not in sources} == set()
    paths = set(re.findall(r"\btests/[\w/]+(?:\.py)?", page))
    assert {path for path in paths if not (REPO / path).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_of_a_page_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    missing: list[str] = []
    for target, anchor in LINK.findall(text):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(f"{target}#{anchor}")
    paths = set(PATH.findall(text)) - EXAMPLES
    missing += [path for path in paths if not (REPO / path).exists()]
    assert missing == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "python.md"], ids=lambda page: page.name
)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    known = known_fields()
    unknown = {
        f"{section}.{name}"
        for section, name in SETTING.findall(page.read_text("utf-8"))
        if section in known and name.replace("-", "_") not in known[section] and name not in FILES
    }
    assert unknown == set()


def test_reading_list_names_files_of_the_package() -> None:
    page = (REPO / "docs/code.md").read_text("utf-8")
    files = set(re.findall(r"`([\w/]+\.py|[\w/]+/)`", page))
    assert len(files) > 30
    roots = (REPO / "peralta_zmq", REPO)
    assert {file for file in files if not any((root / file).exists() for root in roots)} == set()
