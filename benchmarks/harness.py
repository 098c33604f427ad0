"""`bin/bench NAME [--json] [--quick]`: what every bench shares. Nothing in the package needs it.

A bench is a module with `run(quick: bool) -> Iterable[Claim]`. It measures us and the peer
interleaved in one process, so that a shared machine's mood falls on both alike.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, cast

from peralta_zmq.observe.progress import duration

BENCHES = ("generation", "training", "weights", "wire", "endtoend")
LIBRARIES = ("torch", "transformers", "pyzmq", "msgpack", "safetensors")


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


class Bench(Protocol):
    """What a bench module offers."""

    def run(self, *, quick: bool) -> Iterable[Claim]:
        """Measure; `quick` answers roughly in under a minute."""
        ...


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(
    variants: Mapping[str, Callable[[], float]], *, repeats: int
) -> dict[str, list[float]]:
    """`repeats` rounds through all variants; each call returns its own measurement."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    started, total = time.monotonic(), repeats * len(variants)
    for number in range(repeats):
        for name, measure in variants.items():
            taken[name].append(measure())
            done = sum(map(len, taken.values()))
            left = duration((time.monotonic() - started) / done * (total - done))
            progress(f"round {number + 1}/{repeats} {name}: {taken[name][-1]:.4g}, {left} left")
    return taken


def spread(values: Sequence[float]) -> float:
    """(max - min) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def progress(text: str) -> None:
    """A line for whoever waits; the result alone goes to standard output."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


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


def main() -> int:
    """Run one bench, or all, and print a table or (as the last line) one JSON object."""
    parser = argparse.ArgumentParser(prog="bin/bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=[*available(), "all"])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    arguments = parser.parse_args()
    names = available() if arguments.name == "all" else [arguments.name]
    for name in names:
        bench = cast("Bench", importlib.import_module(f"benchmarks.{name}"))
        claims = list(bench.run(quick=arguments.quick))
        sys.stdout.write(_table(claims) if not arguments.json else _json(name, claims, arguments))
        sys.stdout.flush()
    return 0


def available() -> list[str]:
    """The benches that are there."""
    return [name for name in BENCHES if (Path(__file__).parent / f"{name}.py").exists()]


def _json(name: str, claims: Sequence[Claim], arguments: argparse.Namespace) -> str:
    report = {
        "bench": name,
        "quick": arguments.quick,
        "machine": machine(),
        "versions": versions(),
        "claims": [asdict(claim) for claim in claims],
    }
    return json.dumps(report) + "\n"


def _table(claims: Sequence[Claim]) -> str:
    head = f"{'claim':<34} {'ours':>12} {'peer':>12} {'ratio':>8} {'bound':>12} {'share':>7}  unit"
    lines = [
        f"{each.name:<34} {_cell(each.ours):>12} {_cell(each.peer):>12} {_cell(each.ratio):>8} "
        f"{_cell(each.bound):>12} {_cell(each.share):>7}  {each.unit}"
        for each in claims
    ]
    return "\n".join([head, *lines]) + "\n"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8").splitlines()
    except OSError:
        return []
