"""Command line of the benchmarks, and their reports as JSON and as a table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.harness import REPO, Claim

CLAIMS = [
    Claim("wall", 2.0, "s", peer=8.0, ratio=4.0, bound=4.0, share=0.5, n=5, spread=0.25),
    Claim("rate", 2.0, "1/s", bound=4.0, share=0.5),
    Claim("small", 123456.0, "bytes"),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a bench that yields CLAIMS, or on a device one claim with its name."""

    def run(*, quick: bool, device: Any = None) -> Iterator[Claim]:
        yield from CLAIMS if device is None else [Claim(f"on_{device}", float(quick), "s")]

    made_up = SimpleNamespace(
        run=run, peers=lambda: {"ray": "2.60.0"}, REQUIRED={"wall": 3.0, "rate": 0.4}
    )
    monkeypatch.setitem(sys.modules, "benchmarks.made_up", made_up)
    return "made_up"


def test_help_names_every_benchmark() -> None:
    done = subprocess.run(
        [sys.executable, "bin/bench", "--help"], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in [*harness.BENCHES, "all"])


def test_report_has_claims_machine_and_versions(bench: str) -> None:
    report = json.loads(json.dumps(harness.measured(bench, quick=True, device="cpu")))
    assert report["versions"]["ray"] == "2.60.0" and report["machine"]["cores"] >= 1
    wall, _, small = report["claims"]
    assert (wall["name"], wall["ratio"], wall["n"]) == ("wall", 4.0, 5)
    assert (small["ours"], small["peer"]) == (123456.0, None)


def test_table_shows_required_ratios_and_shares(bench: str) -> None:
    report = harness.measured(bench, quick=True, device="cpu")
    lines = [line.split() for line in harness.table(report).splitlines()[2:]]
    assert lines == [
        ["wall", "2", "8", "4", "(>=", "3)", "4", "0.5", "s"],
        ["rate", "2", "4", "0.5", "(>=", "0.4)", "1/s"],
        ["small", "123,456", "bytes"],
    ]


def test_report_of_a_device_has_the_card_and_no_peers(bench: str) -> None:
    report = harness.measured(bench, quick=True, device="meta")
    assert report["machine"]["card"] == "meta" and "ray" not in report["versions"]
    assert [claim["name"] for claim in report["claims"]] == ["on_meta"]


def test_device_is_refused_where_unsupported_or_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bench: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bin/bench", "wire", "--device", "cuda"])
    with pytest.raises(SystemExit):
        harness.main()
    assert "choose one of generation, training, weights, or all" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="bin/bench: device 'abacus' cannot be used here"):
        harness.measured(bench, quick=True, device="abacus")
