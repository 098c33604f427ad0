"""Command line of the benchmarks, JSON output, documented tables."""

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

from benchmarks import harness, pages, report
from benchmarks import wire as bench_of_wire
from benchmarks.harness import REPO, Claim

CLAIMS = [
    Claim("fast", 2.0, "s", peer=6.0, ratio=3.0, n=5, spread=0.25),
    Claim("small", 123456.0, "bytes"),
]
REPORT = report.report_of("wire", CLAIMS, quick=False, peers={"ray": "2.60.0"})


def test_help_names_every_benchmark() -> None:
    done = subprocess.run(
        [sys.executable, "bin/bench", "--help"], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in [*harness.available(), "all", "--record"])


def test_claim_lines_have_one_object_per_claim() -> None:
    first, second = map(json.loads, harness.claim_lines(REPORT))
    assert {"name", "ours", "peer", "ratio", "bound", "share", "unit", "n", "spread"} <= set(first)
    assert (first["name"], first["ratio"], first["bench"]) == ("fast", 3.0, "wire")
    assert (second["ours"], second["peer"], second["n"]) == (123456.0, None, 1)
    assert second["machine"]["cores"] >= 1 and second["versions"]["ray"] == "2.60.0"


def test_progress_estimates_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter([0.0, 50.0, 60.0, 90.0])
    report_progress = harness.progress_of(3, clock=lambda: next(clock))
    for name in ("ours", "trl", "ray"):
        report_progress(name)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    # 2 parts at 50 s, 1 at the mean of 30 s, none
    assert lines == ["1 of 3 ours, 1m40s left", "2 of 3 trl, 30s left", "3 of 3 ray, 0s left"]


def test_report_has_machine_and_versions() -> None:
    assert REPORT["versions"]["ray"] == "2.60.0"
    assert REPORT["machine"]["cores"] >= 1
    assert json.loads(json.dumps(REPORT)) == REPORT


def test_device_result_has_the_device_in_its_name_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*, quick: bool, device: Any) -> Iterator[Claim]:
        yield Claim(f"on_{device}", float(quick), "s")

    def peers() -> dict[str, str]:
        raise AssertionError("peers run on a CPU only")

    made_up = SimpleNamespace(run=run, peers=peers)
    monkeypatch.setitem(sys.modules, "benchmarks.made_up", made_up)
    device_report, claims = harness.measured("made_up", quick=True, device="meta")
    assert (device_report["bench"], device_report["machine"]["card"]) == ("made_up_meta", "meta")
    assert [claim.name for claim in claims] == ["on_meta"]
    page, plain = pages.table(device_report), pages.table(REPORT)
    assert page.startswith("**meta, ") and "meta" not in plain
    assert f"\n{device_report['machine']['cpu']}, " in page


def test_device_is_refused_where_unsupported_or_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bin/bench", "wire", "--device", "cuda"])
    with pytest.raises(SystemExit):
        harness.main()
    assert "choose one of generation, training, head, weights, or all" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "benchmarks.made_up", SimpleNamespace())
    with pytest.raises(SystemExit, match="bin/bench: device 'abacus' cannot be used here"):
        harness.measured("made_up", quick=True, device="abacus")


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with empty pages."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text("<!-- wire fast ratio -->?<!-- / -->\n")
    page = "above\n<!-- bench wire -->\nold\n<!-- end -->\nbelow\n"
    (tmp_path / "docs" / "benchmarks.md").write_text(page)
    monkeypatch.setattr(report, "REPO", tmp_path)
    return tmp_path


def on_machine(cpu: str, *claims: Claim, bench: str = "wire") -> dict[str, Any]:
    made = report.report_of(bench, claims, quick=False, peers={"ray": "2.60.0"})
    return {**made, "machine": {**made["machine"], "cpu": cpu, "cores": 2}}


def test_record_replaces_the_tables_only(repo: Path) -> None:
    assert pages.record(on_machine("AMD EPYC", *CLAIMS)) == []
    text = (repo / "docs" / "benchmarks.md").read_text()
    assert text.startswith("above\n<!-- bench wire -->\n**AMD EPYC, 2 cores**\n\n| claim |")
    assert text.endswith("<!-- end -->\nbelow\n")
    assert "| fast | 2 | 6 | 3 |  |  | s | 5 | 0.25 |" in text
    assert "| small | 123,456 |" in text
    assert "old" not in text and "ray 2.60.0" in text


def test_each_kind_of_machine_has_a_table_and_the_worse_figure_is_quoted(repo: Path) -> None:
    fast, slow = (Claim("fast", 2.0, "s", peer=9.0, ratio=ratio) for ratio in (4.5, 3.5))
    for claim in (fast, slow):  # the second measurement of the first machine replaces the first
        pages.record(on_machine("AMD EPYC", claim))
    pages.record(on_machine("Intel Xeon with AMX", fast))
    assert {file.name for file in (repo / "benchmarks" / "results").iterdir()} == {
        "amd-epyc-2-cores.json", "intel-xeon-with-amx-2-cores.json"
    }  # fmt: skip
    text = (repo / "docs" / "benchmarks.md").read_text()
    assert [line for line in text.splitlines() if line.startswith(("**", "| fast"))] == [
        "**AMD EPYC, 2 cores**", "| fast | 2 | 9 | 3.5 |  |  | s | 1 |  |",
        "**Intel Xeon with AMX, 2 cores**", "| fast | 2 | 9 | 4.5 |  |  | s | 1 |  |",
    ]  # fmt: skip
    assert (repo / "README.md").read_text() == "<!-- wire fast ratio -->3.5<!-- / -->\n"


@pytest.mark.parametrize(
    ("unit", "worst"),
    [("s", "5"), ("bytes, all processes", "5"), ("groups/s", "2"), ("steps/h", "2")],
)
def test_quote_of_a_measurement_is_the_worst_for_its_unit(unit: str, worst: str) -> None:
    reports = [on_machine(cpu, Claim("x", ours, unit)) for cpu, ours in (("a", 2.0), ("b", 5.0))]
    assert pages.quoting("<!-- wire x ours --><!-- / -->", "wire", reports) == (
        f"<!-- wire x ours -->{worst}<!-- / -->"
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model name : Intel(R) Xeon(R) Processor\nflags : avx amx_bf16\n", "Intel Xeon with AMX"),
        ("model name : AMD EPYC\nflags : avx\n", "AMD EPYC"),
    ],
)
def test_machine_names_processor_and_amx(
    monkeypatch: pytest.MonkeyPatch, text: str, name: str
) -> None:
    monkeypatch.setattr(report, "_lines", lambda path: text.splitlines())
    assert report.machine()["cpu"] == name


def test_bench_without_a_marker_is_refused(repo: Path) -> None:
    with pytest.raises(SystemExit, match=r"has the lines <!-- bench scale -->"):
        pages.record(on_machine("AMD EPYC", *CLAIMS, bench="scale"))
    assert not (repo / "benchmarks" / "results").exists()


def test_markers_are_checked_before_measuring(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "all", "--record"])
    monkeypatch.setattr(harness, "_run_in_process", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit, match="has the lines <!-- bench generation -->"):
        harness.main()


def test_quick_measurement_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "wire", "--record", "--quick"])
    with pytest.raises(SystemExit):
        harness.main()
    assert "--record needs a whole measurement" in capsys.readouterr().err


def test_full_run_fails_if_a_quoted_value_is_missing(
    repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = repo / "README.md"
    file.write_text("".join(
        f"<!-- {each} -->?<!-- / -->"
        for each in ("wire fast ratio", "wire gone ours", "wire small ratio", "weights x ours")
    ))  # fmt: skip
    monkeypatch.setattr(harness, "_run_in_process", lambda *_: REPORT)
    arguments = argparse.Namespace(json=True, quick=False, record=True)
    assert harness.run_all(["wire"], arguments) == 1
    errors = capsys.readouterr().err
    assert [line.partition("README.md: ")[2] for line in errors.splitlines()] == [
        "wire gone ours", "wire small ratio", ""
    ]  # fmt: skip
    assert "<!-- wire fast ratio -->3<!-- / -->" in file.read_text()


def test_page_shows_required_ratios_and_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall = Claim("wall", 2.0, "s", peer=8.0, ratio=4.0, bound=4.0, share=0.5)
    rate = Claim("rate", 2.0, "1/s", bound=4.0, share=0.5)
    claims = [wall, rate, Claim("other", 1.0, "s")]
    monkeypatch.setattr(bench_of_wire, "run", lambda *, quick: claims)
    monkeypatch.setattr(bench_of_wire, "REQUIRED", {"wall": 3.0, "rate": 0.4})
    measured, _ = harness.measured("wire", quick=True, device="cpu")
    page = pages.table(measured)
    assert "| wall | 2 | 8 | 4 (>= 3) | 4 | 0.5 | s |" in page
    assert "| rate | 2 |  |  | 4 | 0.5 (>= 0.4) | 1/s |" in page
    assert "| other | 1 |  |  |  |  | s |" in page


@pytest.mark.parametrize("name", ["generation", "training", "weights", "wire", "endtoend"])
def test_required_claims_are_on_the_page(name: str) -> None:
    """The benchmarks write the page."""
    required = importlib.import_module(f"benchmarks.{name}").REQUIRED
    page = (REPO / "docs" / "benchmarks.md").read_text("utf-8")
    assert required and all(f"| {name} |" in page for name in required)


def test_quoted_values_come_from_their_benchmark_only() -> None:
    text = (
        "<!-- wire fast ratio -->1<!-- / --> times, <!-- weights fast ratio -->9<!-- / -->,\n"
        "<!-- wire small ours --><!-- / -->, <!-- wire gone ours -->5<!-- / -->"
    )
    assert pages.quoting(text, "wire", [REPORT]) == (
        "<!-- wire fast ratio -->3<!-- / --> times, <!-- weights fast ratio -->9<!-- / -->,\n"
        "<!-- wire small ours -->123,456<!-- / -->, <!-- wire gone ours -->?<!-- / -->"
    )


def test_shipped_quotes_name_a_benchmark_and_a_field() -> None:
    files = [REPO / "README.md", *(REPO / "docs").glob("*.md")]
    quotes = re.findall(r"<!-- (\w+) \S+ (\w+) -->.*?<!-- / -->", "".join(
        file.read_text("utf-8") for file in files
    ))  # fmt: skip
    assert quotes
    assert {bench for bench, _ in quotes} <= set(harness.available())
    assert {figure for _, figure in quotes} <= {"ours", "ratio", "share"}


def test_run_all_records_others_and_names_a_failed_one(
    repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, _: argparse.Namespace) -> dict[str, object] | None:
        if name == "wire":
            return REPORT
        assert "| fast | 2 |" in (repo / "docs" / "benchmarks.md").read_text()
        return None

    monkeypatch.setattr(harness, "_run_in_process", run)
    arguments = argparse.Namespace(json=True, quick=False, record=True)
    assert harness.run_all(["wire", "weights"], arguments) == 1
    printed = capsys.readouterr()
    assert [json.loads(line)["name"] for line in printed.out.splitlines()] == ["fast", "small"]
    assert printed.err.splitlines()[-1].endswith("failed: weights")


def test_shipped_pages_have_markers_and_the_recorded_tables() -> None:
    text = "".join(file.read_text("utf-8") for file in (REPO / "docs").glob("*.md"))
    names = [*harness.available(), *(f"{each}_cuda" for each in harness.ON_DEVICE)]
    assert [each for each in names if f"<!-- bench {each} -->" not in text] == []
    recorded = [each for name in names for each in pages.reports_of(name)]
    assert recorded and all(pages.table(each) in text for each in recorded)


def test_shipped_quotes_are_those_of_the_recorded_reports() -> None:
    for file in (REPO / "README.md", *(REPO / "docs").glob("*.md")):
        text = file.read_text("utf-8")
        for name in harness.available():
            assert pages.quoting(text, name, pages.reports_of(name)) == text, file
