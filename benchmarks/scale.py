"""Number of generators that one trainer can serve: scripted generators, the real collector.

The trainer side is one process with the real receiver, ledger, journal, generator registry and
announcement publisher; it collects batches without learning. A generator is three sockets in one of
four processes: one pushes encoded groups of the embedded task, one subscribes to announcements
(one per process reads them), one sends a status every two seconds. Each generator sends one group a
second, and then as many as the sampling pacer allows; a step takes one group of each. The largest
number of generators continues with higher rates until the trainer falls behind.
`--quick`: 10 and 100 generators for three seconds.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil

from benchmarks.harness import REPO, Claim, progress_of, spread
from benchmarks.wire import RUN
from peralta_zmq import wire
from peralta_zmq.config import load_config
from peralta_zmq.environments.curriculum import DifficultyPools
from peralta_zmq.learning.admission import staleness
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.evaluation import EvaluationCoordinator
from peralta_zmq.trainer.generator_registry import GeneratorRegistry
from peralta_zmq.trainer.journal import Journal
from peralta_zmq.trainer.session import ProgressAnnouncer, Session, StopSignal
from peralta_zmq.wire.message_fields import encode_fields
from tools.link_proxy import free_ports

VOCAB_SIZE = 468
NUM_PROCESSES = 4
NUM_PARTS = 3  # of the time, measured separately
RATE = 1.0  # groups per second of each generator in the paced case
COUNTS = (1, 10, 100, 1000)
FASTER, QUICK_FASTER = (1.5, 2.0, 2.5, 3.0, 4.0, 8.0), (4.0, 16.0, 64.0)  # with the most generators
KEPT = 0.95  # of the groups that are sent; below that the trainer falls behind
MANY = 10_000  # extrapolated: docs/scaling.md
MIN_GROUPS = 16  # in a step; with more generators one group of each
ARRIVAL_SECONDS = 60.0  # until every generator has connected
DRAIN_SECONDS = 30.0  # limit for the groups queued until then


@dataclass(slots=True)
class Measurement:
    """Groups, rates and costs of the trainer side during the measurement."""

    by_sender: Counter[str] = field(default_factory=Counter[str])
    stale: list[int] = field(default_factory=list[int])  # staleness in steps of each group
    rates: list[float] = field(default_factory=list[float])  # groups/s of each part
    costs: list[float] = field(default_factory=list[float])  # CPU us per group of each part
    steps: int = 0

    def add(self, groups: Sequence[RolloutGroup], *, step: int) -> None:
        """Add the groups of one step."""
        self.steps += 1
        self.by_sender.update(each.generator_id for each in groups)
        self.stale += [staleness(each, step=step) for each in groups]

    def summary(self, count: int) -> dict[str, Any]:
        """Rates, costs and shares; the smallest share is 0 if a generator sent nothing."""
        num_groups = self.by_sender.total()
        smallest = min(self.by_sender.values()) if len(self.by_sender) == count else 0
        return {
            "rates": self.rates,
            "costs": self.costs,
            "staleness": statistics.fmean(self.stale),
            "smallest": smallest * count / num_groups,
            "steps": self.steps,
        }


def run(*, quick: bool) -> Iterable[Claim]:
    """Measure each number of generators in a new process, paced and at full rate."""
    seconds = 3.0 if quick else 20.0
    counts = COUNTS[1:-1] if quick else COUNTS
    report = progress_of(2 * len(counts))
    sides: dict[float, dict[str, Any]] = {}  # by rate, for the latest number
    for count in counts:
        for rate in (RATE, 0.0):
            sides[rate] = measured(count, rate=rate, seconds=seconds)
            report(f"{count} generators at {rate or 'full'} groups/s: {sides[rate]}")
        yield from claims(count, sides[RATE], sides[0.0])
    yield from on_paper(counts[-1], sides[0.0])
    rates = QUICK_FASTER if quick else FASTER
    yield from faster(counts[-1], sides[RATE], rates, seconds=seconds)


def measured(count: int, *, rate: float, seconds: float) -> dict[str, Any]:
    """The result of one trainer process."""
    settings = json.dumps({"count": count, "rate": rate, "seconds": seconds})
    command = [sys.executable, "-m", "benchmarks.scale", settings]
    finished = subprocess.run(
        command, cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)}, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(finished.stdout.splitlines()[-1])


def claims(count: int, paced: dict[str, Any], free: dict[str, Any]) -> Iterator[Claim]:
    """The claims for one number of generators."""
    yield of_parts(f"groups_per_s_{count}_paced", paced["rates"], "groups/s", bound=count * RATE)
    yield of_parts(f"groups_per_s_{count}_free", free["rates"], "groups/s")
    yield of_parts(f"cpu_per_group_{count}_paced", paced["costs"], "us of CPU time, trainer side")
    yield of_parts(f"cpu_per_group_{count}_free", free["costs"], "us of CPU time, trainer side")
    yield Claim(f"memory_{count}", paced["memory"], "private bytes, trainer side")
    yield Claim(f"announcement_{count}", paced["announcement"], "bytes, to each generator")
    yield Claim(f"staleness_{count}_paced", paced["staleness"], "steps, mean")
    yield Claim(
        f"smallest_share_{count}_free", free["smallest"], "fewest groups of a generator / mean",
        bound=1.0, share=free["smallest"],
    )  # fmt: skip


def faster(
    count: int, paced: dict[str, Any], rates: Sequence[float], *, seconds: float
) -> Iterator[Claim]:
    """Claims for higher rates, up to the first at which the trainer falls behind."""
    sides, report = [paced], progress_of(len(rates))
    for rate in rates:
        offered, side = rate * count, measured(count, rate=rate, seconds=seconds)
        report(f"{count} generators at {rate} groups/s: {side}")
        sides.append(side)
        reached = of_parts(
            f"groups_per_s_{count}_at_{offered:g}", side["rates"], "groups/s", offered
        )
        yield reached
        yield of_parts(
            f"cpu_per_group_{count}_at_{offered:g}", side["costs"], "us of CPU time, trainer side"
        )
        if reached.ours < KEPT * offered:
            break
    most = max(sides, key=lambda side: statistics.median(side["rates"]))
    cores = [rate * cost / 1e6 for rate, cost in zip(most["rates"], most["costs"], strict=True)]
    yield of_parts(f"most_groups_per_s_{count}", most["rates"], "groups/s, at any rate")
    yield of_parts(f"cores_at_most_{count}", cores, "cores, trainer side")


def on_paper(count: int, free: dict[str, Any]) -> Iterator[Claim]:
    """Claims for MANY generators, extrapolated from the largest number measured."""
    own = MANY / count * free["announcement"]
    one_core = 1e6 / statistics.median(free["costs"])
    yield Claim(f"announcement_{MANY}_on_paper", own, "bytes, to each generator")
    yield Claim(f"announcing_{MANY}_on_paper", MANY * own, "bytes/s, once a second to all")
    yield Claim("groups_per_s_of_one_core_on_paper", one_core, "groups/s, trainer side")
    yield Claim(f"seconds_per_group_{MANY}_on_paper", MANY / one_core,
                "s, between two groups of one generator")  # fmt: skip


def of_parts(name: str, values: Sequence[float], unit: str, bound: float | None = None) -> Claim:
    """A claim from one value for each part of the time."""
    median = statistics.median(values)
    return Claim(name, median, unit, bound=bound, share=median / bound if bound else None,
                 n=len(values), spread=spread(values))  # fmt: skip


# The trainer side.


def trainer(settings: dict[str, Any]) -> None:
    """Collect batches after every generator has connected; print the measurement as JSON."""
    count = int(settings["count"])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scale-")))
        num_groups = max(MIN_GROUPS, count)
        collector, registry, announcer, address = open_collector(stack, folder, num_groups)
        for share in shares(count):
            each = stack.enter_context(generators(address, share, settings["rate"], num_groups))
            stack.callback(each.kill)
        step = arrive(collector, registry, count)
        if settings["rate"]:
            step = drain(collector, step, rate=count * settings["rate"])
        measurement = Measurement()
        for _ in range(NUM_PARTS):
            step = take(collector, measurement, step, seconds=settings["seconds"] / NUM_PARTS)
        result = {
            **measurement.summary(count),
            "memory": own_bytes(),
            "announcement": len(encode_fields(announcer.announcement)),
        }
    sys.stdout.write(json.dumps(result) + "\n")


def take(collector: BatchCollector, measurement: Measurement, step: int, *, seconds: float) -> int:
    """Take steps for `seconds`, at least one; returns the next step."""
    started, used, before = time.perf_counter(), cpu_seconds(), measurement.by_sender.total()
    while (elapsed := time.perf_counter() - started) < seconds:
        measurement.add(one_step(collector, step), step=step)
        step += 1
    num_groups = measurement.by_sender.total() - before
    measurement.rates.append(num_groups / elapsed)
    measurement.costs.append(1e6 * (cpu_seconds() - used) / num_groups)
    return step


def drain(
    collector: BatchCollector,
    step: int,
    *,
    rate: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Take steps until one has at most `rate` groups per second; returns the next step."""
    started = clock()
    ends = started + DRAIN_SECONDS
    while started < ends:
        num_groups, ended = len(one_step(collector, step)), clock()
        step += 1
        if num_groups <= 1.01 * rate * (ended - started):
            break
        started = ended
    return step


def one_step(collector: BatchCollector, step: int) -> list[RolloutGroup]:
    """The groups of a step without learning."""
    groups, _ = collector.collect(step, lambda idle: None)
    collector.commit()
    collector.acknowledgements.publish(step, started_step=step)
    return groups


def open_collector(
    stack: ExitStack, folder: Path, num_groups: int
) -> tuple[BatchCollector, GeneratorRegistry, ProgressAnnouncer, str]:
    """The trainer's collector with its receiver, journal and registry, without a model."""
    config = load_config(
        "bin/trainer",
        ["--run.dir", str(folder), "--run.name", "scale",
         "--train.batch-size", str(8 * num_groups)],
    )  # fmt: skip
    address = f"tcp://127.0.0.1:{free_ports()}"
    receiver = wire.RolloutReceiver(address, run_id=RUN, limits=wire.GroupLimits(VOCAB_SIZE))
    stack.enter_context(closing(receiver))
    announcements = wire.AnnouncementPublisher(wire.next_port(address))
    stack.enter_context(closing(announcements))
    statuses = wire.GeneratorStatusReceiver(wire.next_port(address, 2), run_id=RUN)
    stack.enter_context(closing(statuses))
    (folder / "run_log").mkdir()
    run_log = stack.enter_context(RunLog(folder / "run_log", run="scale", max_steps=1))
    announcer = ProgressAnnouncer(announcements, wire.Announcement(RUN, incarnation=os.urandom(8)))
    registry, unused = GeneratorRegistry(statuses, run_log, {}), cast(Any, None)
    session = Session(config, RUN, run_log, announcer, unused, StopSignal())
    evaluations = EvaluationCoordinator(session, unused, unused)
    journal = stack.enter_context(closing(Journal(folder / "journal")))
    pools = DifficultyPools(["math_1k/7"], easy_threshold=None, hard_threshold=None)
    collector = BatchCollector(session, receiver, journal, registry, pools, evaluations)
    return collector, registry, announcer, address


def shares(count: int) -> list[range]:
    """The generators of each process."""
    size = -(-count // NUM_PROCESSES)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def generators(
    address: str, share: range, rate: float, groups_per_step: int
) -> subprocess.Popen[bytes]:
    """A process with some of the generators."""
    settings = {"address": address, "first": share.start, "end": share.stop, "rate": rate,
             "groups_per_step": groups_per_step}  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.scale_generators", json.dumps(settings)]
    return subprocess.Popen(command, cwd=REPO)


def arrive(collector: BatchCollector, registry: GeneratorRegistry, count: int) -> int:
    """Collect batches until every generator has connected; returns the next step."""
    step, ends = 1, time.monotonic() + ARRIVAL_SECONDS
    while len(registry.live()) < count:
        if time.monotonic() > ends:
            raise TimeoutError(f"{len(registry.live())} of {count} generators connected")
        one_step(collector, step)
        step += 1
    return step


def cpu_seconds() -> float:
    """CPU seconds of all threads of this process, including those of ZeroMQ."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def own_bytes() -> int:
    """Memory of this process in bytes, without mapped files."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


if __name__ == "__main__":
    trainer(json.loads(sys.argv[1]))
