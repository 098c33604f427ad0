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
from peralta_zmq.config.training_sections import TrainSection
from peralta_zmq.trainer.collector import (
    ACKNOWLEDGE_FACTOR,
    MAX_ACKNOWLEDGE_SECONDS,
    RECEIVE_SECONDS,
)
from peralta_zmq.trainer.generator_registry import MAX_LIVE

BEGIN = "<!-- written by python -m benchmarks.capacity: begin -->"
END = "<!-- written by python -m benchmarks.capacity: end -->"
COUNTS = (10, 100, 1_000, 10_000)
LINK = 125_000_000  # bytes/s of 1 Gbit/s
SLOW_LINK = 12_500_000  # bytes/s of 100 Mbit/s
DISK = 100_000_000  # bytes/s that a disk writes
STEP_SECONDS = 60.0  # between two versions
CONNECTIONS = 4  # of a generator to the trainer, that of bin/doctor included
GROUP = (16, 200, 180)  # rollouts, prompt tokens and generated tokens of a group
KEYFRAME_INTERVAL = int(WeightsSection().keyframe_interval)
MAX_OFF_POLICY_STEPS = TrainSection().max_off_policy_steps


@dataclass(frozen=True, slots=True)
class Constants:
    """Measured sizes and times."""

    announcement: float  # bytes for each listed generator
    group: int  # bytes
    core_seconds: Mapping[int, float]  # CPU time of the trainer per group, by number of generators
    delta: float  # bytes
    keyframe: float  # bytes
    checkpoint: float  # bytes of the original's update
    memory: float  # bytes of the trainer without generators
    memory_per_generator: float  # bytes

    @property
    def version(self) -> float:
        """Mean bytes of a version for a generator that reads all of them."""
        return self.delta + (self.keyframe - self.delta) / KEYFRAME_INTERVAL


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource that generators share, and what to do when it is exhausted."""

    name: str
    measured: str
    share: Callable[[float], float]  # used share of the resource with n generators
    capacity: float  # number of generators that use all of it
    remedy: str


def measured_constants() -> Constants:
    """The constants from benchmarks/results."""
    most = MEASURED_COUNTS[-1]
    memory = {count: worst_of("scale", f"memory_{count}") for count in (1, most)}
    per_generator = (memory[most] - memory[1]) / (most - 1)
    return Constants(
        announcement=worst_of("scale", f"announcement_{most}") / most,
        group=len(wire.encode_group(group_of(*GROUP))),
        core_seconds={
            count: worst_of("scale", f"cpu_per_group_{count}_paced") / 1e6
            for count in MEASURED_COUNTS
        },
        delta=worst_of("weights", "delta_vs_full_bf16_lr2e-6"),
        keyframe=worst_of("weights", "keyframe_bytes"),
        checkpoint=worst_of("weights", "keyframe_bytes", "peer"),
        memory=memory[1] - per_generator,
        memory_per_generator=per_generator,
    )


def limits(constants: Constants) -> list[Limit]:
    """The limits, in the order in which a growing number of generators reaches them."""
    weights = min(
        STEP_SECONDS * LINK / constants.version,
        # All generators read a keyframe at once. Groups sampled meanwhile are from older weights.
        MAX_OFF_POLICY_STEPS * STEP_SECONDS * LINK / constants.keyframe,
    )
    most = max(constants.core_seconds)
    found = [
        _linear(
            "link of the NAS",
            f"{constants.version / 1e6:,.0f} MB per version and generator on average, "
            f"{constants.keyframe / 1e6:,.0f} MB of a keyframe",
            weights,
            f"10 Gbit/s ({10 * weights:,.0f} generators), adapters ([lora.md](lora.md)), "
            "an object store",
        ),
        Limit(
            "link of the trainer: announcements, while it collects",
            f"{constants.announcement:.0f} bytes for each pair of generators",
            lambda n: n * n * constants.announcement / LINK / _announcement_seconds(n),
            math.sqrt(MAX_ACKNOWLEDGE_SECONDS * LINK / constants.announcement),
            f"10 Gbit/s ({math.sqrt(10 * LINK / constants.announcement):,.0f} generators); a topic "
            "per generator is not implemented",
        ),
        _linear("senders", "`MAX_LIVE`", MAX_LIVE, "raise it: memory per generator is below"),
        Limit(
            "core of the trainer",
            f"{constants.core_seconds[most] * 1e6:.0f} us per group of short completions",
            lambda n: n * RATE * _core_seconds(constants, n),
            1 / (RATE * constants.core_seconds[most]),
            "larger groups or models, with fewer groups/s; several receivers are not implemented",
        ),
        _linear(
            "disk of the trainer: journal",
            f"{constants.group:,} bytes per group",
            DISK / (RATE * constants.group),
            "a faster disk",
        ),
        _linear(
            "link of the trainer: groups",
            f"{constants.group:,} bytes per group",
            LINK / (RATE * constants.group),
            "10 Gbit/s",
        ),
        _linear(
            "open files",
            f"{CONNECTIONS} per generator, {OPEN_FILES[0]:,} in all",
            OPEN_FILES[0] / CONNECTIONS,
            "a larger limit in `config/programs.py`",
        ),
    ]
    return sorted(found, key=lambda each: each.capacity)


def _linear(name: str, measured: str, capacity: float, remedy: str) -> Limit:
    return Limit(name, measured, lambda n: n / capacity, capacity, remedy)


def _announcement_seconds(count: float) -> float:
    """Time between two announcements while groups arrive."""
    return min(MAX_ACKNOWLEDGE_SECONDS, max(RECEIVE_SECONDS, ACKNOWLEDGE_FACTOR * count**2))


def _core_seconds(constants: Constants, count: float) -> float:
    """CPU time per group: that of the next lower measured number of generators."""
    lower = [measured for measured in constants.core_seconds if measured <= count]
    return constants.core_seconds[max(lower)]


def tables() -> str:
    """Three Markdown tables: the limits, their use, and the transfer of weights."""
    constants = measured_constants()
    found = limits(constants)
    rows = [[each.name, each.measured, f"{each.capacity:,.0f}", each.remedy] for each in found]
    used = {each.name: [_cell(each.share(count)) for count in COUNTS] for each in found} | {
        "memory for receiving, GB, without model and optimizer": [
            _cell((constants.memory + count * constants.memory_per_generator) / 1e9)
            for count in COUNTS
        ],
    }
    counts = [f"{count:,}" for count in COUNTS]
    return "\n".join([
        *_table(["limit", "measured", "generators it carries", "what to do then"], rows),
        *_table(["share of each limit, with generators:", *counts], _rows(used)),
        *_table(["seconds per version, with generators:", *counts], _rows(transfer(constants))),
    ])  # fmt: skip


def transfer(constants: Constants) -> Mapping[str, list[str]]:
    """Seconds until all generators have read a version, for each way of distribution."""
    from_one = {
        "the original's checkpoint": constants.checkpoint,
        "a keyframe": constants.keyframe,
        "a delta": constants.delta,
        f"mean, `keyframe_interval = {KEYFRAME_INTERVAL}`": constants.version,
    }
    rows = {
        f"one link of 1 Gbit/s, {name}": [_cell(count * size / LINK) for count in COUNTS]
        for name, size in from_one.items()
    }
    own = {"a keyframe": constants.keyframe, "a delta": constants.delta}
    return rows | {
        f"an object store, each generator with 100 Mbit/s of its own, {name}": (
            [_cell(size / SLOW_LINK)] * len(COUNTS)
        )
        for name, size in own.items()
    }


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
