"""The doors of the benches: help, JSON, the page."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import harness, report
from benchmarks import wire as bench_of_wire
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
    assert second["machine"]["cores"] >= 1 and second["versions"]["ray"] == "2.60.0"


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


def test_what_a_gpu_did_names_its_card_and_goes_by_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*, quick: bool, device: Any) -> Iterator[Claim]:
        yield Claim(f"on_{device}", float(quick), "s")

    monkeypatch.setitem(sys.modules, "benchmarks.made_up", SimpleNamespace(run=run))
    told, claims = harness.measured("made_up", quick=True, device="meta")
    assert (told["bench"], told["machine"]["card"]) == ("made_up_meta", "meta")
    assert [each.name for each in claims] == ["on_meta"]
    page, plain = report.page(told), report.page(REPORT)
    assert f"\nmeta; {told['machine']['cpu']}, " in page and "meta" not in plain


def test_a_device_is_for_three_benches_and_must_be_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bin/bench", "wire", "--device", "cuda"])
    with pytest.raises(SystemExit):
        harness.main()
    assert "choose one of generation, training, weights" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "benchmarks.made_up", SimpleNamespace())
    with pytest.raises(SystemExit, match="bin/bench: device 'abacus' cannot be used here"):
        harness.measured("made_up", quick=True, device="abacus")


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
    with pytest.raises(SystemExit, match="none has the lines <!-- bench wire -->"):
        report.document([file], REPORT)


def test_the_places_are_looked_for_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "page.md"
    file.write_text("<!-- bench generation -->\n<!-- end -->\n", "utf-8")
    monkeypatch.setattr(sys, "argv", ["bench", "all", "--document", str(file)])
    monkeypatch.setattr(harness, "_run_in_process", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(SystemExit, match="none has the lines <!-- bench training -->"):
        harness.main()


def test_a_full_run_that_leaves_a_quote_open_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    file = tmp_path / "README.md"
    quotes = "".join(
        f"<!-- {each} -->?<!-- / -->"
        for each in ("wire fast ratio", "wire gone ours", "wire small ratio", "weights x ours")
    )
    file.write_text(f"<!-- bench wire -->\n<!-- end -->\n{quotes}", "utf-8")
    monkeypatch.setattr(report, "REPO", tmp_path)
    monkeypatch.setattr(harness, "_run_in_process", lambda *_: {**REPORT, "quick": False})
    arguments = argparse.Namespace(json=True, quick=False, document=[file])
    assert harness.run_all(["wire"], arguments) == 1
    said = capsys.readouterr().err
    assert [line.partition("README.md: ")[2] for line in said.splitlines()] == [
        "wire gone ours", "wire small ratio", ""
    ]  # fmt: skip
    assert "<!-- wire fast ratio -->3<!-- / -->" in file.read_text("utf-8")


def test_a_ratio_or_without_one_a_share_says_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall = Claim("wall", 2.0, "s", peer=8.0, ratio=4.0, bound=4.0, share=0.5)
    rate = Claim("rate", 2.0, "1/s", bound=4.0, share=0.5)
    claims = [wall, rate, Claim("other", 1.0, "s")]
    monkeypatch.setattr(bench_of_wire, "run", lambda *, quick: claims)
    monkeypatch.setattr(bench_of_wire, "REQUIRED", {"wall": 3.0, "rate": 0.4})
    made, _ = harness.measured("wire", quick=True, device="cpu")
    page = report.page(made)
    assert "| wall | 2 | 8 | 4 (>= 3) | 4 | 0.5 | s |" in page
    assert "| rate | 2 |  |  | 4 | 0.5 (>= 0.4) | 1/s |" in page
    assert "| other | 1 |  |  |  |  | s |" in page


@pytest.mark.parametrize("name", ["generation", "training", "weights", "wire", "endtoend"])
def test_what_is_asked_for_is_of_claims_that_are_there(name: str) -> None:
    """Their names stand in the page, which the bench itself wrote."""
    asked = importlib.import_module(f"benchmarks.{name}").REQUIRED
    page = (REPO / "docs" / "benchmarks.md").read_text("utf-8")
    assert asked and all(f"| {each} |" in page for each in asked)


def test_a_quoted_figure_is_that_of_its_bench_alone() -> None:
    text = (
        "<!-- wire fast ratio -->1<!-- / --> times, <!-- weights fast ratio -->9<!-- / -->,\n"
        "<!-- wire small ours --><!-- / -->, <!-- wire gone ours -->5<!-- / -->"
    )
    assert report.quoting(text, REPORT) == (
        "<!-- wire fast ratio -->3<!-- / --> times, <!-- weights fast ratio -->9<!-- / -->,\n"
        "<!-- wire small ours -->123,456<!-- / -->, <!-- wire gone ours -->?<!-- / -->"
    )


def test_what_the_shipped_pages_quote_is_of_a_bench_and_a_field() -> None:
    pages = [REPO / "README.md", *(REPO / "docs").glob("*.md")]
    quotes = re.findall(r"<!-- (\w+) \S+ (\w+) -->.*?<!-- / -->", "".join(
        page.read_text("utf-8") for page in pages
    ))  # fmt: skip
    assert quotes
    assert {bench for bench, _ in quotes} <= set(harness.available())
    assert {figure for _, figure in quotes} <= {"ours", "peer", "ratio", "bound", "share"}


def test_a_failed_bench_is_named_and_the_others_are_on_their_pages_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.md"
    file.write_text("<!-- bench wire -->\nold\n<!-- end -->\n", "utf-8")

    def alone(name: str, _: argparse.Namespace) -> dict[str, object] | None:
        if name == "wire":
            return REPORT
        assert "| fast | 2 |" in file.read_text("utf-8")
        return None

    monkeypatch.setattr(harness, "_run_in_process", alone)
    arguments = argparse.Namespace(json=True, quick=True, document=[file])
    assert harness.run_all(["wire", "weights"], arguments) == 1
    said = capsys.readouterr()
    assert [json.loads(line)["name"] for line in said.out.splitlines()] == ["fast", "small"]
    assert said.err.splitlines()[-1].endswith("failed: weights")


def test_the_shipped_pages_have_a_place_for_every_bench() -> None:
    pages = [REPO / "docs" / "benchmarks.md", REPO / "docs" / "scaling.md"]
    text = "".join(page.read_text("utf-8") for page in pages)
    names = [*harness.available(), *(f"{each}_cuda" for each in harness.ON_DEVICE)]
    assert [each for each in names if f"<!-- bench {each} -->" not in text] == []
