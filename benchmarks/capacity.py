"""Number of generators that one trainer, one NAS and one link carry, on paper.

    python -m benchmarks.capacity --document docs/scaling.md

writes the tables from the recorded results of the benches scale, weights and wire. Weights have the
Qwen3-0.6B shape and a learning rate of 2e-6. Each constant is the worst of the measured machines.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages import worst_of, write_between
from benchmarks.scale import COUNTS as MEASURED_COUNTS
from benchmarks.scale import RATE
from benchmarks.wire import group_of
from peralta_zmq import wire
from peralta_zmq.config.programs import OPEN_FILES
from peralta_zmq.config.sections import WeightsSection
from peralta_zmq.trainer.generator_registry import MAX_LIVE

BEGIN = "<!-- written by python -m benchmarks.capacity: begin -->"
END = "<!-- written by python -m benchmarks.capacity: end -->"
COUNTS = (10, 100, 1_000, 10_000)
LINK = 125_000_000  # bytes/s of 1 Gbit/s
SLOW_LINK = 12_500_000  # bytes/s of 100 Mbit/s
STEP_SECONDS = 60.0  # between two versions
CONNECTIONS = 4  # of a generator to the trainer, that of bin/doctor included
GROUP = (16, 200, 180)  # rollouts, prompt tokens and generated tokens of a group
KEYFRAME_INTERVAL = int(WeightsSection().keyframe_interval)
RARE_KEYFRAMES = 100  # a keyframe_interval for many generators


@dataclass(frozen=True, slots=True)
class Constants:
    """Measured sizes and times."""

    announcement: float  # bytes for each listed generator
    group: int  # bytes
    core_seconds: float  # CPU time of the trainer per group
    delta: float  # bytes
    keyframe: float  # bytes
    checkpoint: float  # bytes of the original's update
    memory: float  # bytes of the trainer without generators
    memory_per_generator: float  # bytes

    def version(self, keyframe_interval: int) -> float:
        """Mean bytes of a version for a generator that reads all of them."""
        return self.delta + (self.keyframe - self.delta) / keyframe_interval


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource that generators share, and what to do when it is exhausted."""

    name: str
    measured: str
    share: Callable[[float], float]  # used share of the resource with n generators
    most: float  # number of generators that use all of it
    remedy: str


def constants() -> Constants:
    """The constants from benchmarks/results."""
    most = MEASURED_COUNTS[-1]
    memory = {count: worst_of("scale", f"memory_{count}") for count in (1, most)}
    per_generator = (memory[most] - memory[1]) / (most - 1)
    return Constants(
        announcement=worst_of("scale", f"announcement_{most}") / most,
        group=len(wire.encode_group(group_of(*GROUP))),
        core_seconds=worst_of("scale", f"cpu_per_group_{most}_at_4000") / 1e6,
        delta=worst_of("weights", "delta_vs_full_bf16_lr2e-6"),
        keyframe=worst_of("weights", "keyframe_bytes"),
        checkpoint=worst_of("weights", "keyframe_bytes", "peer"),
        memory=memory[1] - per_generator,
        memory_per_generator=per_generator,
    )


def limits(known: Constants, *, keyframe_interval: int = KEYFRAME_INTERVAL) -> list[Limit]:
    """The limits, in the order in which a growing number of generators reaches them."""
    version = known.version(keyframe_interval)
    rare = math.floor(STEP_SECONDS * LINK / known.version(RARE_KEYFRAMES))
    found = [
        _linear(
            "link of the NAS",
            f"{version / 1e6:.0f} MB per version and generator",
            STEP_SECONDS * LINK / version,
            f"`weights.keyframe_interval = {RARE_KEYFRAMES}` ({rare:,} generators), a larger "
            "`weights.interval`, adapters ([lora.md](lora.md)), an object store",
        ),
        Limit(
            "link of the trainer: announcements",
            f"{known.announcement:.0f} bytes per second for each pair of generators",
            lambda n: n * n * known.announcement / LINK,
            math.sqrt(LINK / known.announcement),
            f"10 Gbit/s ({math.sqrt(10 * LINK / known.announcement):,.0f} generators); a topic "
            "per generator is not implemented",
        ),
        _linear("senders", "`MAX_LIVE`", MAX_LIVE, "raise it: memory per generator is below"),
        _linear(
            "core of the trainer",
            f"{known.core_seconds * 1e6:.0f} us per group",
            1 / (RATE * known.core_seconds),
            "larger groups or models, with fewer groups/s; several receivers are not implemented",
        ),
        _linear(
            "link of the trainer: groups",
            f"{known.group:,} bytes per group",
            LINK / (RATE * known.group),
            "10 Gbit/s",
        ),
        _linear(
            "open files",
            f"{CONNECTIONS} per generator, {OPEN_FILES[0]:,} in all",
            OPEN_FILES[0] / CONNECTIONS,
            "a larger limit in `config/programs.py`",
        ),
    ]
    return sorted(found, key=lambda each: each.most)


def _linear(name: str, measured: str, most: float, remedy: str) -> Limit:
    return Limit(name, measured, lambda n: n / most, most, remedy)


def tables() -> str:
    """Three Markdown tables: the limits, their use, and the transfer of weights."""
    known = constants()
    found = limits(known)
    rows = [[each.name, each.measured, f"{each.most:,.0f}", each.remedy] for each in found]
    used = {each.name: [_cell(each.share(count)) for count in COUNTS] for each in found} | {
        "first limit that is exceeded": [exceeded(found, count) for count in COUNTS],
        "memory of the trainer, GB": [
            _cell((known.memory + count * known.memory_per_generator) / 1e9) for count in COUNTS
        ],
    }
    counts = [f"{count:,}" for count in COUNTS]
    return "\n".join([
        *_table(["limit", "measured", "carries", "what to do then"], rows),
        *_table(["share of each limit, with generators:", *counts], _rows(used)),
        *_table(["seconds per version, with generators:", *counts], _rows(transfer(known))),
    ])  # fmt: skip


def exceeded(found: Sequence[Limit], count: int) -> str:
    """The name of the limit that `count` generators exceed most."""
    most = max(found, key=lambda each: each.share(count))
    return most.name if most.share(count) > 1 else "none"


def transfer(known: Constants) -> Mapping[str, list[str]]:
    """Seconds until all generators have read a version, for each way of distribution."""
    from_one = {
        "the original's checkpoint": known.checkpoint,
        "all weights (`keyframe_interval = 1`)": known.keyframe,
        f"`keyframe_interval = {KEYFRAME_INTERVAL}`": known.version(KEYFRAME_INTERVAL),
        f"`keyframe_interval = {RARE_KEYFRAMES}`": known.version(RARE_KEYFRAMES),
        "a delta only": known.delta,
    }
    rows = {
        f"one link of 1 Gbit/s, {name}": [_cell(count * size / LINK) for count in COUNTS]
        for name, size in from_one.items()
    }
    own = known.version(KEYFRAME_INTERVAL) / SLOW_LINK
    name = "an object store, each generator with 100 Mbit/s of its own"
    return rows | {f"{name}, `keyframe_interval = {KEYFRAME_INTERVAL}`": [_cell(own)] * len(COUNTS)}


def _cell(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _rows(cells: Mapping[str, list[str]]) -> list[list[str]]:
    return [[name, *row] for name, row in cells.items()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def main() -> None:
    """Print the tables; with --document, also write them into the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--document", type=Path, help="Markdown file with the markers")
    document, text = parser.parse_args().document, tables()
    sys.stdout.write(text)
    if document:
        write_between(document, BEGIN, END, text)


if __name__ == "__main__":
    main()
