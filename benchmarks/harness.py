"""`bin/bench NAME [--json] [--quick]`: command line and measurement helpers of all benches.

A bench is a module with `run(quick: bool) -> Iterable[Claim]`. It measures this program and its
peer interleaved in one run, so that changes of a shared machine's speed affect both. A bench with
separately installed peers also has `peers() -> dict[str, str]`, their versions; these run on a CPU
only. The `run` of those in ON_DEVICE also takes a device.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from benchmarks import pages
from benchmarks.report import REPO, Claim, report_of, table
from peralta_zmq.observe.run_state import format_duration

__all__ = [
    "REPO", "Claim", "bounded", "compared", "interleaved", "main", "progress", "progress_of",
    "seconds", "spread",
]  # fmt: skip
BENCHES = (
    "generation", "training", "streaming", "head", "memory", "memory_lora", "weights", "wire",
    "endtoend", "original_size", "scale", "scoring",
)  # fmt: skip
ON_DEVICE = ("generation", "training", "head", "weights")


class Bench(Protocol):
    """Interface of a bench module."""

    def run(self, *, quick: bool) -> Iterable[Claim]:
        """Measure; `quick` gives a rough answer in under a minute."""
        ...


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call in seconds, including its GPU work."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    """Wait until the GPU, if one is used, is idle."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def interleaved(
    variants: Mapping[str, Callable[[], float]], *, repeats: int
) -> dict[str, list[float]]:
    """Run all variants in `repeats` rounds; each call returns one measurement."""
    measurements: dict[str, list[float]] = {name: [] for name in variants}
    report_progress = progress_of(repeats * len(variants))
    for _ in range(repeats):
        for name, measure in variants.items():
            measurements[name].append(measure())
            report_progress(f"{name}: {measurements[name][-1]:.4g}")
    return measurements


def spread(values: Sequence[float]) -> float:
    """Return (max - min) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def compared(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    *,
    less_is_better: bool = False,
) -> Claim:
    """Compare two interleaved series; the ratio is the median of the ratios per round."""
    ratios = [b / a if less_is_better else a / b for a, b in zip(ours, peer, strict=True)]
    return Claim(
        name, statistics.median(ours), unit, peer=statistics.median(peer),
        ratio=statistics.median(ratios), n=len(ours), spread=spread(ours),
    )  # fmt: skip


def bounded(name: str, ours: Sequence[float], bounds: Sequence[float], unit: str) -> Claim:
    """Compare rates with the bounds measured in the same rounds."""
    return Claim(
        name, statistics.median(ours), unit, bound=statistics.median(bounds),
        share=statistics.median(a / b for a, b in zip(ours, bounds, strict=True)),
        n=len(ours), spread=spread(ours),
    )  # fmt: skip


def progress(text: str) -> None:
    """Write a progress line to stderr; stdout has only the result."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def progress_of(
    total: int, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """Return a function that reports each of `total` parts, with the remaining time."""
    started, done = clock(), 0

    def report(text: str) -> None:
        nonlocal done
        done += 1
        left = format_duration((clock() - started) / done * (total - done))
        progress(f"{done} of {total} {text}, {left} left")

    return report


def main() -> int:
    """Run one bench, or all, and print a table or JSON; 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="bin/bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=[*available(), "all"])
    parser.add_argument(
        "--json", action="store_true",
        help="one JSON object as the last line; with all, one line per claim",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    parser.add_argument(
        "--device", default="cpu",
        help=f"device of the model, such as cuda, for {', '.join(ON_DEVICE)} or all",
    )  # fmt: skip
    parser.add_argument(
        "--record", action="store_true",
        help="save the claims in benchmarks/results/, and write them into README.md and docs/",
    )  # fmt: skip
    arguments = parser.parse_args()
    names = available() if arguments.device == "cpu" else ON_DEVICE
    if arguments.name not in (*names, "all"):
        parser.error(f"{arguments.name} has no --device; choose one of {', '.join(names)}, or all")
    chosen = names if arguments.name == "all" else [arguments.name]
    if arguments.record and arguments.quick:
        parser.error("--record needs a whole measurement, without --quick")
    suffix = "" if arguments.device == "cpu" else f"_{arguments.device.partition(':')[0]}"
    for name in chosen if arguments.record else ():
        pages.page_of(name + suffix)
    if arguments.name == "all":
        return run_all(names, arguments)
    report, claims = measured(arguments.name, quick=arguments.quick, device=arguments.device)
    sys.stdout.write(f"{json.dumps(report)}\n" if arguments.json else table(claims))
    return int(not _recorded(report, arguments))


def available() -> list[str]:
    """Return the benches of this checkout."""
    return [name for name in BENCHES if (Path(__file__).parent / f"{name}.py").exists()]


def measured(name: str, *, quick: bool, device: str) -> tuple[dict[str, Any], list[Claim]]:
    """Run one bench. On a GPU its name has a suffix, so that its table is a different one."""
    module = importlib.import_module(f"benchmarks.{name}")
    installed = getattr(module, "peers", dict) if device == "cpu" else dict
    peers = cast("Callable[[], dict[str, str]]", installed)
    required = cast("dict[str, float]", getattr(module, "REQUIRED", {}))
    if device == "cpu":
        made, card = cast("Bench", module).run(quick=quick), ""
    else:
        chosen, card = _find_device(device)
        made, name = module.run(quick=quick, device=chosen), f"{name}_{chosen.type}"
    claims = [replace(each, required=required.get(each.name)) for each in made]
    return report_of(name, claims, quick=quick, peers=peers(), card=card), claims


def _find_device(device: str) -> tuple[Any, str]:
    """Return the device and the name of the card. Exits if it cannot be used."""
    from peralta_zmq import models
    from peralta_zmq.errors import ConfigError

    try:
        chosen = models.choose_device(device)
    except ConfigError as error:
        raise SystemExit(f"bin/bench: {error}") from None
    return chosen, models.device_name(chosen)


def run_all(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Run each bench in a separate process; a failed one does not stop the others.

    The claims of one bench are printed and recorded before the next one starts.
    """
    failed = [name for name in names if not _run_and_print(name, arguments)]
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def _run_and_print(name: str, arguments: argparse.Namespace) -> bool:
    """Run one bench in a process and print its claims; returns False if it failed."""
    report = _run_in_process(name, arguments)
    if report is None:
        return False
    claims = [Claim(**each) for each in report["claims"]]
    lines = claim_lines(report) if arguments.json else [f"{name}\n{table(claims)}"]
    sys.stdout.writelines(lines)
    sys.stdout.flush()
    return _recorded(report, arguments)


def _recorded(report: Mapping[str, Any], arguments: argparse.Namespace) -> bool:
    """Record the claims if asked to; return whether all quoted claims were measured."""
    missing = pages.record(report) if arguments.record else []
    for each in missing:
        progress(f"not measured, but quoted in {each}")
    return not missing


def claim_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield each claim as one line of JSON, with bench, machine and versions."""
    facts = {name: value for name, value in report.items() if name != "claims"}
    for claim in report["claims"]:
        yield json.dumps({**claim, **facts}) + "\n"


def _run_in_process(name: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the report of one bench; None if it failed, with the reason on stderr."""
    command = [sys.executable, str(REPO / "bin" / "bench"), name, "--json"]
    command += ["--device", arguments.device]
    progress(f"bench {name}")
    done = subprocess.run(
        [*command, *(["--quick"] if arguments.quick else [])], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        progress(f"{name} failed, exit status {done.returncode}")
        return None
    return cast("dict[str, Any]", json.loads(done.stdout.splitlines()[-1]))
