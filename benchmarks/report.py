"""Claims as JSON, as a table for the terminal and as tables in Markdown pages."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "transformers", "pyzmq", "msgpack", "safetensors")
END = "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Claim:
    """One measured claim; None where a field does not apply."""

    name: str
    ours: float
    unit: str
    peer: float | None = None
    ratio: float | None = None  # above 1 = better than the peer
    bound: float | None = None  # hardware limit, measured in the same run
    share: float | None = None  # ours / bound
    n: int = 1  # repetitions
    spread: float | None = None  # (max - min) / median of ours
    required: float | None = None  # required ratio, or required share if there is no peer


def report_of(
    bench: str, claims: Sequence[Claim], *, quick: bool, peers: Mapping[str, str], card: str = ""
) -> dict[str, Any]:
    """Return the claims of one bench with machine and versions; `card` names the GPU."""
    return {
        "bench": bench,
        "quick": quick,
        "date": date(),
        "commit": commit(),
        "machine": {**machine(), "card": card},
        "versions": {**versions(), **peers},
        "claims": [asdict(claim) for claim in claims],
    }


def table(claims: Sequence[Claim]) -> str:
    """Return the claims as a table for the terminal."""
    head = (
        f"{'claim':<34} {'ours':>12} {'peer':>12} {'ratio':>15} {'bound':>12} {'share':>15}  unit"
    )
    lines = [
        f"{each.name:<34} {_cell(each.ours):>12} {_cell(each.peer):>12} "
        f"{_figure_cell(asdict(each), 'ratio'):>15} {_cell(each.bound):>12} "
        f"{_figure_cell(asdict(each), 'share'):>15}  {each.unit}"
        for each in claims
    ]
    return "\n".join([head, *lines]) + "\n"


def page(report: Mapping[str, Any]) -> str:
    """Return the claims as a Markdown table, followed by machine and versions."""
    rows = [
        "| claim | ours | peer | ratio | bound | share | unit | n | spread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for claim in report["claims"]:
        ours, peer, bound = (_cell(claim[of]) for of in ("ours", "peer", "bound"))
        last = [claim["unit"], str(claim["n"]), _cell(claim["spread"])]
        ratio, share = (_figure_cell(claim, figure) for figure in ("ratio", "share"))
        rows.append(f"| {' | '.join([claim['name'], ours, peer, ratio, bound, share, *last])} |")
    return "\n".join([*rows, "", _where(report)]) + "\n"


def write_between(document: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between two markers of the document. Exits if one is missing."""
    before, found, rest = document.read_text("utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{document} lacks the lines {begin} and {end}; add them")
    document.write_text(f"{before}{begin}\n{text}{end}{after}", "utf-8")


def place_of(bench: str, files: Sequence[Path]) -> Path:
    """Return the page with the markers of this bench's table. Exits if there is none."""
    mark = f"<!-- bench {bench} -->"
    for file in files:
        _, found, rest = (file.read_text("utf-8") if file.exists() else "").partition(mark)
        if found and END in rest:
            return file
    names = ", ".join(map(str, files))
    raise SystemExit(f"{names}: none has the lines {mark} and {END}; add them to one")


def document(files: Sequence[Path], report: Mapping[str, Any]) -> list[str]:
    """Write the table of one bench into the page that has `<!-- bench NAME -->`, and its figures
    where README and docs/ quote them. A quick measurement is not quoted.

    Returns the quoted claims that were not measured.
    """
    mark = f"<!-- bench {report['bench']} -->"
    write_between(place_of(report["bench"], files), mark, END, page(report))
    missing = list[str]()
    if not report["quick"]:
        for file in (REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))):
            text = file.read_text("utf-8")
            if (quoted := quoting(text, report)) != text:
                file.write_text(quoted, "utf-8")
            missing += [f"{file.name}: {each}" for each in unfilled(quoted, report["bench"])]
    return missing


def unfilled(text: str, bench: str) -> list[str]:
    """Return the claims of one bench that the text quotes with ? as their value."""
    return re.findall(rf"<!-- ({bench} \S+ \w+) -->\?<!-- / -->", text)


def quoting(text: str, report: Mapping[str, Any]) -> str:
    """Fill in `<!-- BENCH CLAIM FIELD -->...<!-- / -->` for the bench of this report, with ? for
    claims and figures that it does not have.
    """
    claims = {each["name"]: each for each in report["claims"]}

    def filled(found: re.Match[str]) -> str:
        begin, name, figure, end = found.groups()
        return begin + (_cell(claims.get(name, {}).get(figure)) or "?") + end

    return re.sub(rf"(<!-- {report['bench']} (\w\S*) (\w+) -->).*?(<!-- / -->)", filled, text)


def machine() -> dict[str, object]:
    """Return processor, usable cores and memory."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo")
             if line.startswith("model name")]  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": cores,
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and the libraries that determine speed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def date() -> str:
    """Return today's local date."""
    return time.strftime("%Y-%m-%d")


def when() -> str:
    """Return commit and date for a page."""
    return f"Commit {commit() or 'unknown'}, {date()}."


def commit() -> str:
    """Return the commit of this checkout, with + for uncommitted changes except in pages; empty
    outside of git.
    """
    git = ["git", "-C", str(REPO)]
    try:
        done = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!*.md"])
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip() + "+" * bool(changed.returncode)


def _where(report: Mapping[str, Any]) -> str:
    hardware, libraries = report["machine"], report["versions"]
    library_list = ", ".join(f"{name} {number}" for name, number in libraries.items())
    rough = " `--quick`: smaller, shorter, rough." if report["quick"] else ""
    card = f"{hardware['card']}; " if hardware["card"] else ""
    return (
        f"{card}{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB; "
        f"{library_list}; "
        f"commit {report['commit'] or 'unknown'}, {report['date']}. Medians of n; "
        f"spread = (max - min) / median of ours.{rough}"
    )


def _figure_cell(claim: Mapping[str, Any], figure: str) -> str:
    """Return ratio or share, with the required value if there is one."""
    required_figure = "share" if claim["ratio"] is None else "ratio"
    required = claim["required"] if figure == required_figure else None
    return _cell(claim[figure]) + (f" (>= {_cell(required)})" if required else "")


def _cell(value: float | None) -> str:
    """Format with four significant digits, without exponent where that is readable."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e13 else f"{value:.4g}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8").splitlines()
    except OSError:
        return []
