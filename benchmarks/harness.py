"""`bin/bench NAME [--json] [--quick]`: what every bench shares. Nothing in the package needs it.

A bench is a module with `run(quick: bool) -> Iterable[Claim]`. It measures us and the peer
interleaved in one run, so that a shared machine's mood falls on both alike. One that has peers of
its own also has `peers() -> dict[str, str]`, their versions. Those ON_DEVICE also take a device.
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

from benchmarks.report import REPO, Claim, document, place_of, report_of, table
from peralta_zmq.observe.run_state import format_duration

__all__ = [
    "REPO", "Claim", "bounded", "compared", "interleaved", "main", "progress", "progress_of",
    "seconds", "spread",
]  # fmt: skip
BENCHES = ("generation", "training", "weights", "wire", "endtoend", "original_size", "scale")
ON_DEVICE = ("generation", "training", "weights")


class Bench(Protocol):
    """What a bench module offers."""

    def run(self, *, quick: bool) -> Iterable[Claim]:
        """Measure; `quick` answers roughly in under a minute."""
        ...


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call, until a GPU has done it too."""
    settle()
    started = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - started


def settle() -> None:
    """Wait until a GPU has done what it was asked for."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def interleaved(
    variants: Mapping[str, Callable[[], float]], *, repeats: int
) -> dict[str, list[float]]:
    """`repeats` rounds through all variants; each call returns its own measurement."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    tell = progress_of(repeats * len(variants))
    for _ in range(repeats):
        for name, measure in variants.items():
            taken[name].append(measure())
            tell(f"{name}: {taken[name][-1]:.4g}")
    return taken


def spread(values: Sequence[float]) -> float:
    """(max - min) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def compared(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    *,
    less_is_better: bool = False,
) -> Claim:
    """Two interleaved series; the ratio is the median of those of the same round."""
    ratios = [b / a if less_is_better else a / b for a, b in zip(ours, peer, strict=True)]
    return Claim(
        name, statistics.median(ours), unit, peer=statistics.median(peer),
        ratio=statistics.median(ratios), n=len(ours), spread=spread(ours),
    )  # fmt: skip


def bounded(name: str, ours: Sequence[float], bounds: Sequence[float], unit: str) -> Claim:
    """Rates, of those that the machine allowed in the same round."""
    return Claim(
        name, statistics.median(ours), unit, bound=statistics.median(bounds),
        share=statistics.median(a / b for a, b in zip(ours, bounds, strict=True)),
        n=len(ours), spread=spread(ours),
    )  # fmt: skip


def progress(text: str) -> None:
    """A line for whoever waits; the result alone goes to standard output."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def progress_of(
    total: int, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """What tells of each of `total` parts when it is done, and how long the others still take."""
    started, done = clock(), 0

    def tell(text: str) -> None:
        nonlocal done
        done += 1
        left = format_duration((clock() - started) / done * (total - done))
        progress(f"{done} of {total} {text}, {left} left")

    return tell


def main() -> int:
    """Run one bench, or all, and print a table or JSON; 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="bin/bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=[*available(), "all"])
    parser.add_argument(
        "--json", action="store_true",
        help="one JSON object as the last line; with all, one line for each claim",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    parser.add_argument(
        "--device", default="cpu",
        help=f"where the model lies, as cuda: {', '.join(ON_DEVICE)}, or all of these",
    )  # fmt: skip
    parser.add_argument(
        "--document", type=Path, nargs="+",
        help="Markdown pages whose tables are replaced; so is what README.md and docs/ quote",
    )  # fmt: skip
    arguments = parser.parse_args()
    names = available() if arguments.device == "cpu" else ON_DEVICE
    if arguments.name not in (*names, "all"):
        parser.error(f"{arguments.name} has no --device; choose one of {', '.join(names)}, or all")
    chosen = names if arguments.name == "all" else [arguments.name]
    for name in chosen if arguments.document else ():
        place_of(name, arguments.document)
    if arguments.name == "all":
        return run_all(names, arguments)
    report, claims = measured(arguments.name, quick=arguments.quick, device=arguments.device)
    sys.stdout.write(f"{json.dumps(report)}\n" if arguments.json else table(claims))
    return int(not _documented(report, arguments))


def available() -> list[str]:
    """The benches that are there."""
    return [name for name in BENCHES if (Path(__file__).parent / f"{name}.py").exists()]


def measured(name: str, *, quick: bool, device: str) -> tuple[dict[str, Any], list[Claim]]:
    """Run one bench. On a GPU it goes by another name, so that no page takes one for the other."""
    module = importlib.import_module(f"benchmarks.{name}")
    peers = cast("Callable[[], dict[str, str]]", getattr(module, "peers", dict))
    required = cast("dict[str, float]", getattr(module, "REQUIRED", {}))
    if device == "cpu":
        made, card = cast("Bench", module).run(quick=quick), ""
    else:
        chosen, card = _reached(device)
        made, name = module.run(quick=quick, device=chosen), f"{name}_{chosen.type}"
    claims = [replace(each, required=required.get(each.name)) for each in made]
    return report_of(name, claims, quick=quick, peers=peers(), card=card), claims


def _reached(device: str) -> tuple[Any, str]:
    """The device and the name of its card. Ends the program when it cannot be used."""
    from peralta_zmq import models
    from peralta_zmq.errors import ConfigError

    try:
        chosen = models.choose_device(device)
    except ConfigError as error:
        raise SystemExit(f"bin/bench: {error}") from None
    return chosen, models.device_name(chosen)


def run_all(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Each bench in a process of its own, one after another; a failed one does not stop the rest.

    What one measured is printed, and put into the pages, before the next begins.
    """
    failed = [name for name in names if not _told(name, arguments)]
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def _told(name: str, arguments: argparse.Namespace) -> bool:
    """Run one bench and tell what it measured: as JSON one line for each claim."""
    report = _alone(name, arguments)
    if report is None:
        return False
    claims = [Claim(**each) for each in report["claims"]]
    lines = claim_lines(report) if arguments.json else [f"{name}\n{table(claims)}"]
    sys.stdout.writelines(lines)
    sys.stdout.flush()
    return _documented(report, arguments)


def _documented(report: Mapping[str, Any], arguments: argparse.Namespace) -> bool:
    """Put it into the pages, if they are asked for; whether all that they quote was measured."""
    missing = document(arguments.document, report) if arguments.document else []
    for each in missing:
        progress(f"not measured, but quoted in {each}")
    return not missing


def claim_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Every claim as one JSON object a line, with its bench, machine and versions."""
    facts = {name: value for name, value in report.items() if name != "claims"}
    for claim in report["claims"]:
        yield json.dumps({**claim, **facts}) + "\n"


def _alone(name: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The report of one bench; None when it failed, having said why on standard error."""
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
