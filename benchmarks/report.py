"""Claims as JSON and as a table for the terminal; machine and versions."""

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
        f"{each.name:<34} {number_cell(each.ours):>12} {number_cell(each.peer):>12} "
        f"{figure_cell(asdict(each), 'ratio'):>15} {number_cell(each.bound):>12} "
        f"{figure_cell(asdict(each), 'share'):>15}  {each.unit}"
        for each in claims
    ]
    return "\n".join([head, *lines]) + "\n"


def machine() -> dict[str, object]:
    """Return processor, usable cores and memory."""
    lines = _lines("/proc/cpuinfo")
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    has_amx = any("amx_bf16" in line for line in lines if line.startswith("flags"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_name(names[0] if names else platform.processor()) + " with AMX" * has_amx,
        "cores": cores,
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
    }


def cpu_name(text: str) -> str:
    """Return the name of a processor without trademark signs and the word Processor."""
    return " ".join(re.sub(r"\((R|TM)\)|\bProcessor\b", " ", text).split())


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


def figure_cell(claim: Mapping[str, Any], figure: str) -> str:
    """Return ratio or share, with the required value if there is one."""
    required_figure = "share" if claim["ratio"] is None else "ratio"
    required = claim["required"] if figure == required_figure else None
    return number_cell(claim[figure]) + (f" (>= {number_cell(required)})" if required else "")


def number_cell(value: float | None) -> str:
    """Format with four significant digits, without exponent where that is readable."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e13 else f"{value:.4g}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8").splitlines()
    except OSError:
        return []
