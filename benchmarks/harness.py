"""`bin/bench NAME [--json] [--quick]`: command line and measurement functions of all benches.

A bench is a module with `run(quick: bool) -> Iterable[Claim]`. It measures this program and its
peer interleaved in one run, so that changes of a shared machine's speed affect both. A bench with
separately installed peers also has `peers() -> dict[str, str]`, their versions; these run on a CPU
only. The `run` of those in ON_DEVICE also takes a device.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peralta_zmq.config.programs import package_version
from peralta_zmq.observe.run_state import format_duration

REPO = Path(__file__).resolve().parent.parent
TOY = ("@", str(REPO / "configs/demo.toml"))  # settings for the embedded model
BENCHES = ("generation", "training", "memory", "weights", "wire", "endtoend", "real")
ON_DEVICE = ("generation", "training", "weights")
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


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call in seconds, including its GPU work."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
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
    """Run one bench and print a table or JSON, or all in processes; 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="bin/bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=[*BENCHES, "all"])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
    parser.add_argument(
        "--device", default="cpu",
        help=f"device of the model, such as cuda, for {', '.join(ON_DEVICE)} or all",
    )  # fmt: skip
    arguments = parser.parse_args()
    names = BENCHES if arguments.device == "cpu" else ON_DEVICE
    if arguments.name == "all":
        return run_all(names)
    if arguments.name not in names:
        parser.error(f"{arguments.name} has no --device; choose one of {', '.join(names)}, or all")
    report = measured(arguments.name, quick=arguments.quick, device=arguments.device)
    sys.stdout.write(f"{json.dumps(report)}\n" if arguments.json else table(report))
    return 0


def run_all(names: Sequence[str]) -> int:
    """Run each bench with these arguments in a process of its own; 1 if one of them failed."""
    options = [argument for argument in sys.argv[1:] if argument != "all"]
    failed = list[str]()
    for name in names:
        progress(f"bench {name}")
        if subprocess.run([sys.executable, str(REPO / "bin" / "bench"), name, *options]).returncode:
            failed.append(name)
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def measured(name: str, *, quick: bool, device: str) -> dict[str, Any]:
    module: Any = importlib.import_module(f"benchmarks.{name}")
    required: dict[str, float] = module.REQUIRED
    if device == "cpu":
        made, card = module.run(quick=quick), ""
    else:
        chosen, card = _find_device(device)
        made = module.run(quick=quick, device=chosen)
    claims = [asdict(replace(claim, required=required.get(claim.name))) for claim in made]
    peers = module.peers() if device == "cpu" and hasattr(module, "peers") else {}
    return {
        "bench": name,
        "quick": quick,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": {**machine(), "card": card},
        "versions": {
            "python": platform.python_version(),
            **{library: version(library) for library in LIBRARIES},
            **peers,
        },
        "claims": claims,
    }


def _find_device(device: str) -> tuple[Any, str]:
    """Return the device and the name of the card. Exits if it cannot be used."""
    from peralta_zmq import models
    from peralta_zmq.errors import ConfigError

    try:
        chosen = models.choose_device(device)
    except ConfigError as error:
        raise SystemExit(f"bin/bench: {error}") from None
    return chosen, models.device_name(chosen)


def table(report: Mapping[str, Any]) -> str:
    hardware = report["machine"]
    lines = [
        f"{hardware['card'] or hardware['cpu']}, {hardware['cores']} cores, commit "
        f"{report['commit'] or 'unknown'}, {report['date']}",
        f"{'claim':<34} {'ours':>12} {'peer':>12} {'ratio':>15} {'bound':>12} {'share':>15}  unit",
    ]
    for claim in report["claims"]:
        ours, peer, ratio, bound, share = (
            number_cell(claim[field]) for field in ("ours", "peer", "ratio", "bound", "share")
        )
        required = f" (>= {number_cell(claim['required'])})" if claim["required"] else ""
        if ratio:
            ratio += required
        elif share:
            share += required
        lines.append(
            f"{claim['name']:<34} {ours:>12} {peer:>12} {ratio:>15} {bound:>12} {share:>15}  "
            f"{claim['unit']}"
        )
    return "\n".join(lines) + "\n"


def number_cell(value: float | None) -> str:
    """Format with four significant digits, without exponent where that is readable."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e13 else f"{value:.4g}"


def machine() -> dict[str, object]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    cpu = re.sub(r"\((R|TM)\)|\bProcessor\b", " ", names[0] if names else platform.processor())
    has_amx = any("amx_bf16" in line for line in lines if line.startswith("flags"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": " ".join(cpu.split()) + " with AMX" * has_amx,
        "cores": cores,
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
    }


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
