"""Measured claims by kind of machine, and their tables and quotes in Markdown pages.

benchmarks/results/ has a JSON file for each kind of machine: the last recorded report of each
bench. A page has a table per kind of machine between `<!-- bench BENCH -->` and `<!-- end -->`.
README.md and docs/ quote figures as `<!-- BENCH CLAIM FIELD -->value<!-- / -->`, where FIELD is
ours, ratio or share: the worst value of all machines, so that figures of one sentence may come from
different ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import figure_cell, number_cell

END = "<!-- end -->"
RATE = re.compile(r"\w+/(s|h)\b")  # a unit for which higher is better
Report = Mapping[str, Any]


def record(measured: Report) -> list[str]:
    """Save the report of one bench, and write it into the pages.

    Returns the quotes for which no report has a figure, as `PAGE: BENCH CLAIM FIELD`. Exits if no
    page has the markers of this bench.
    """
    bench = measured["bench"]
    table_page = page_of(bench)
    file = _results_folder() / f"{kind_of(measured)}.json"
    by_bench = json.loads(file.read_text("utf-8")) if file.exists() else {}
    by_bench[bench] = measured
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{json.dumps(by_bench, indent=1)}\n", "utf-8")
    reports = reports_of(bench)
    write_between(table_page, _begin(bench), END, "\n".join(map(table, reports)))
    missing = list[str]()
    for page in _pages():
        text = page.read_text("utf-8")
        quoted = quoting(text, bench, reports)
        if quoted != text:
            page.write_text(quoted, "utf-8")
        missing += [f"{page.name}: {quote}" for quote in _unfilled(quoted, bench)]
    return missing


def kind_of(measured: Report) -> str:
    """Stem of the file for this kind of machine."""
    return re.sub(r"[^a-z0-9]+", "-", _machine(measured).lower()).strip("-")


def reports_of(bench: str) -> list[Report]:
    """The recorded reports of one bench, by kind of machine."""
    files = sorted(_results_folder().glob("*.json"))
    by_bench = (json.loads(file.read_text("utf-8")) for file in files)
    return [each[bench] for each in by_bench if bench in each]


def worst_of(bench: str, claim: str, field: str = "ours") -> float:
    """The worst recorded value of a field of a claim. Raises KeyError if none is recorded."""
    claims = [each for made in reports_of(bench) for each in made["claims"]]
    worst = _worst([each for each in claims if each["name"] == claim], field)
    if worst is None:
        raise KeyError(f"no recorded report has {bench} {claim} {field}")
    return worst


def table(measured: Report) -> str:
    """A report as a Markdown table, with the machine above and the versions below."""
    rows = [
        f"**{_machine(measured)}**",
        "",
        "| claim | ours | peer | ratio | bound | share | unit | n | spread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for claim in measured["claims"]:
        ours, peer, bound = (number_cell(claim[field]) for field in ("ours", "peer", "bound"))
        last = [claim["unit"], str(claim["n"]), number_cell(claim["spread"])]
        ratio, share = (figure_cell(claim, figure) for figure in ("ratio", "share"))
        rows.append(f"| {' | '.join([claim['name'], ours, peer, ratio, bound, share, *last])} |")
    return "\n".join([*rows, "", _where(measured)]) + "\n"


def quoting(text: str, bench: str, reports: Sequence[Report]) -> str:
    """Fill in the quotes of one bench, with ? for figures that no report has."""
    claims: dict[str, list[Mapping[str, Any]]] = {}
    for each in reports:
        for claim in each["claims"]:
            claims.setdefault(claim["name"], []).append(claim)

    def filled(found: re.Match[str]) -> str:
        begin, name, field, end = found.groups()
        return begin + (number_cell(_worst(claims.get(name, ()), field)) or "?") + end

    return re.sub(rf"(<!-- {bench} (\w\S*) (\w+) -->).*?(<!-- / -->)", filled, text)


def page_of(bench: str) -> Path:
    """The page with the markers of this bench's tables. Exits if there is none."""
    for page in _pages():
        _, found, rest = page.read_text("utf-8").partition(_begin(bench))
        if found and END in rest:
            return page
    raise SystemExit(
        f"neither README.md nor docs/ has the lines {_begin(bench)} and {END}; add them to one"
    )


def write_between(document: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between two markers of the document. Exits if one is missing."""
    before, found, rest = document.read_text("utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{document} lacks the lines {begin} and {end}; add them")
    document.write_text(f"{before}{begin}\n{text}{end}{after}", "utf-8")


def _worst(claims: Iterable[Mapping[str, Any]], field: str) -> float | None:
    """The worst value of a field in the claims of several machines; None if none has one."""
    measured = [claim for claim in claims if claim.get(field) is not None]
    if not measured:
        return None
    higher_is_better = field != "ours" or RATE.match(measured[0]["unit"])
    return (min if higher_is_better else max)(claim[field] for claim in measured)


def _unfilled(text: str, bench: str) -> list[str]:
    return re.findall(rf"<!-- ({bench} \S+ \w+) -->\?<!-- / -->", text)


def _begin(bench: str) -> str:
    return f"<!-- bench {bench} -->"


def _pages() -> list[Path]:
    return [report.REPO / "README.md", *sorted((report.REPO / "docs").glob("*.md"))]


def _results_folder() -> Path:
    return report.REPO / "benchmarks" / "results"


def _machine(measured: Report) -> str:
    hardware = measured["machine"]
    return f"{hardware['card'] or hardware['cpu']}, {hardware['cores']} cores"


def _where(measured: Report) -> str:
    hardware, libraries = measured["machine"], measured["versions"]
    library_list = ", ".join(f"{name} {number}" for name, number in libraries.items())
    return (
        f"{hardware['cpu']}, {hardware['memory_gib']} GiB; {library_list}; "
        f"commit {measured['commit'] or 'unknown'}, {measured['date']}. Medians of n; "
        "spread = (max - min) / median of ours."
    )
