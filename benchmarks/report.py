"""What was measured, as JSON, as a table and as a page. Knows claims; runs nothing."""

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
    """One sentence of the README as numbers; None where a field does not apply."""

    name: str
    ours: float
    unit: str
    peer: float | None = None
    ratio: float | None = None  # how many times better than the peer
    bound: float | None = None  # what the machine allows, measured in the same run
    share: float | None = None  # of the bound
    n: int = 1  # repetitions
    spread: float | None = None  # (max - min) / median of ours
    required: float | None = None  # the ratio that was asked for, or without one the share


def report_of(
    bench: str, claims: Sequence[Claim], *, quick: bool, peers: Mapping[str, str], card: str = ""
) -> dict[str, Any]:
    """Everything that is needed to read the claims of one bench later; `card` names the GPU."""
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
    """For a terminal."""
    head = (
        f"{'claim':<34} {'ours':>12} {'peer':>12} {'ratio':>15} {'bound':>12} {'share':>15}  unit"
    )
    lines = [
        f"{each.name:<34} {_cell(each.ours):>12} {_cell(each.peer):>12} "
        f"{_asked(asdict(each), 'ratio'):>15} {_cell(each.bound):>12} "
        f"{_asked(asdict(each), 'share'):>15}  {each.unit}"
        for each in claims
    ]
    return "\n".join([head, *lines]) + "\n"


def page(report: Mapping[str, Any]) -> str:
    """For a document: a table of the claims and where they were measured."""
    rows = [
        "| claim | ours | peer | ratio | bound | share | unit | n | spread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for claim in report["claims"]:
        ours, peer, bound = (_cell(claim[of]) for of in ("ours", "peer", "bound"))
        last = [claim["unit"], str(claim["n"]), _cell(claim["spread"])]
        ratio, share = (_asked(claim, figure) for figure in ("ratio", "share"))
        rows.append(f"| {' | '.join([claim['name'], ours, peer, ratio, bound, share, *last])} |")
    return "\n".join([*rows, "", _where(report)]) + "\n"


def write_between(document: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks of the document. Ends the program without them."""
    before, found, rest = document.read_text("utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{document} lacks the lines {begin} and {end}; add them")
    document.write_text(f"{before}{begin}\n{text}{end}{after}", "utf-8")


def place_of(bench: str, files: Sequence[Path]) -> Path:
    """The page with the marks of this bench's table. Ends the program when there is none."""
    mark = f"<!-- bench {bench} -->"
    for file in files:
        _, found, rest = (file.read_text("utf-8") if file.exists() else "").partition(mark)
        if found and END in rest:
            return file
    names = ", ".join(map(str, files))
    raise SystemExit(f"{names}: none has the lines {mark} and {END}; add them to one")


def document(files: Sequence[Path], report: Mapping[str, Any]) -> list[str]:
    """Put the table of one bench into the page that has `<!-- bench NAME -->` for it, and its
    figures where the README and other pages quote them; a rough measurement is not quoted.

    Returns what is quoted and was not measured.
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
    """The claims of one bench where the text has ? for a figure of theirs."""
    return re.findall(rf"<!-- ({bench} \S+ \w+) -->\?<!-- / -->", text)


def quoting(text: str, report: Mapping[str, Any]) -> str:
    """The text with `<!-- BENCH CLAIM FIELD -->...<!-- / -->` filled where the bench is this one,
    with ? where it has no such claim or figure.
    """
    claims = {each["name"]: each for each in report["claims"]}

    def filled(found: re.Match[str]) -> str:
        begin, name, figure, end = found.groups()
        return begin + (_cell(claims.get(name, {}).get(figure)) or "?") + end

    return re.sub(rf"(<!-- {report['bench']} (\w\S*) (\w+) -->).*?(<!-- / -->)", filled, text)


def machine() -> dict[str, object]:
    """Processor, cores and memory that this process may use."""
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
    """Python and the libraries that matter to speed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def date() -> str:
    """Of today, here."""
    return time.strftime("%Y-%m-%d")


def when() -> str:
    """For a page: of what, and on which day."""
    return f"Commit {commit() or 'unknown'}, {date()}."


def commit() -> str:
    """Of this checkout, with a + when files of it other than pages, which benches write, have
    changed since; empty outside of git.
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
    its, libraries = report["machine"], report["versions"]
    with_what = ", ".join(f"{name} {number}" for name, number in libraries.items())
    rough = " `--quick`: smaller, shorter, rough." if report["quick"] else ""
    card = f"{its['card']}; " if its["card"] else ""
    return (
        f"{card}{its['cpu']}, {its['cores']} cores, {its['memory_gib']} GiB; {with_what}; "
        f"commit {report['commit'] or 'unknown'}, {report['date']}. Medians of n; "
        f"spread = (max - min) / median of ours.{rough}"
    )


def _asked(claim: Mapping[str, Any], figure: str) -> str:
    """The ratio or the share, with what was asked for where something was."""
    judged = "share" if claim["ratio"] is None else "ratio"
    asked = claim["required"] if figure == judged else None
    return _cell(claim[figure]) + (f" (>= {_cell(asked)})" if asked else "")


def _cell(value: float | None) -> str:
    """Four digits, without an exponent where that is readable."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e13 else f"{value:.4g}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8").splitlines()
    except OSError:
        return []
