"""The doors of the benches: help, JSON, the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness, report
from benchmarks.harness import REPO, Claim

CLAIMS = [
    Claim("fast", 2.0, "s", peer=6.0, ratio=3.0, n=5, spread=0.25),
    Claim("small", 123456.0, "bytes"),
]
REPORT = report.report_of("wire", CLAIMS, quick=True, peers={"ray": "2.60.0"})


def test_help_names_every_bench() -> None:
    done = subprocess.run(
        [sys.executable, "bin/bench", "--help"], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in [*harness.available(), "all", "--document"])


def test_all_prints_one_object_for_each_claim() -> None:
    first, second = map(json.loads, harness.claim_lines(REPORT))
    assert {"name", "ours", "peer", "ratio", "bound", "share", "unit", "n", "spread"} <= set(first)
    assert (first["name"], first["ratio"], first["bench"]) == ("fast", 3.0, "wire")
    assert (second["ours"], second["peer"], second["n"]) == (123456.0, None, 1)


def test_each_part_that_is_done_tells_how_long_the_others_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter([0.0, 50.0, 60.0, 90.0])
    tell = harness.progress_of(3, clock=lambda: next(clock))
    for name in ("ours", "trl", "ray"):
        tell(name)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    # 2 parts at 50 s, 1 at the mean of 30 s, none
    assert lines == ["1 of 3 ours, 1m40s left", "2 of 3 trl, 30s left", "3 of 3 ray, 0s left"]


def test_a_report_says_where_it_was_measured() -> None:
    assert REPORT["versions"]["ray"] == "2.60.0"
    assert REPORT["machine"]["cores"] >= 1
    assert json.loads(json.dumps(REPORT)) == REPORT


def test_a_page_has_the_new_table_and_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("above\n<!-- bench wire -->\nold\n<!-- end -->\nbelow\n", "utf-8")
    report.document([file], REPORT)
    text = file.read_text("utf-8")
    assert text.startswith("above\n<!-- bench wire -->\n| claim |")
    assert text.endswith("<!-- end -->\nbelow\n")
    assert "| fast | 2 | 6 | 3 |  |  | s | 5 | 0.25 |" in text
    assert "| small | 123,456 |" in text
    assert "old" not in text and "`--quick`" in text and "ray 2.60.0" in text


def test_a_page_without_the_mark_is_refused_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("nothing\n", "utf-8")
    with pytest.raises(SystemExit, match="lacks the lines <!-- bench wire -->"):
        report.document([file], REPORT)


def test_the_shipped_pages_have_a_place_for_every_bench() -> None:
    pages = [REPO / "docs" / "benchmarks.md", REPO / "docs" / "scaling.md"]
    text = "".join(page.read_text("utf-8") for page in pages)
    assert [each for each in harness.available() if f"<!-- bench {each} -->" not in text] == []
