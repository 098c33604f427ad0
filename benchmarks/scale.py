"""How many generators one trainer can hear: scripted ones over real sockets, the real intake.

The trainer's side is a process of its own with the real receiver, ledger, journal, roster and
announcer; it takes batches and learns nothing. Generators are three sockets each, in four
processes: one pushes encoded groups of the embedded task, one hears the announcements (only one
of each process reads what it hears), one reports every two seconds. They make one group a second
each, and then as many as the real pace allows; a step takes one group of each. The most generators
go on to make more a second each, until the trainer no longer keeps up.
`--quick`: 10 and 100 of them, for three seconds.
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

from benchmarks.crowd import own_bytes
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
from peralta_zmq.trainer.session import Session, StatusPublisher, StopSignal

VOCAB_SIZE = 468
NUM_PROCESSES = 4
NUM_PARTS = 3  # of the time, each measured alone
RATE = 1.0  # groups per second of each generator, where it is set
COUNTS = (1, 10, 100, 1000)
FASTER, QUICK_FASTER = (1.5, 2.0, 2.5, 3.0, 4.0, 8.0), (4.0, 16.0, 64.0)  # of the most generators
KEPT = 0.95  # of what is made: below that it does not keep up
MANY = 10_000  # on paper: docs/scaling.md
MIN_GROUPS = 16  # of a step; with more generators one group of each
ARRIVAL_SECONDS = 60.0  # until the last one has been heard
DRAIN_SECONDS = 30.0  # at most, for what was made meanwhile


@dataclass(slots=True)
class Taken:
    """What the trainer's side saw while it was measured."""

    by_sender: Counter[str] = field(default_factory=Counter[str])
    stale: list[int] = field(default_factory=list[int])  # steps, of each group
    rates: list[float] = field(default_factory=list[float])  # groups/s, of each part of the time
    costs: list[float] = field(default_factory=list[float])  # CPU us per group, likewise
    steps: int = 0

    def add(self, groups: Sequence[RolloutGroup], *, step: int) -> None:
        """The groups of one step."""
        self.steps += 1
        self.by_sender.update(each.generator_id for each in groups)
        self.stale += [staleness(each, step=step) for each in groups]

    def summary(self, count: int) -> dict[str, Any]:
        """Rates, costs and shares; a generator of which nothing came has share 0."""
        num_groups = self.by_sender.total()
        poorest = min(self.by_sender.values()) if len(self.by_sender) == count else 0
        return {
            "rates": self.rates,
            "costs": self.costs,
            "staleness": statistics.fmean(self.stale),
            "smallest": poorest * count / num_groups,
            "steps": self.steps,
        }


def run(*, quick: bool) -> Iterable[Claim]:
    """Each number of generators in a fresh process, at a set rate and flat out."""
    seconds = 3.0 if quick else 20.0
    counts = COUNTS[1:-1] if quick else COUNTS
    tell = progress_of(2 * len(counts))
    sides: dict[float, dict[str, Any]] = {}  # by rate, of the newest number
    for count in counts:
        for rate in (RATE, 0.0):
            sides[rate] = measured(count, rate=rate, seconds=seconds)
            tell(f"{count} generators at {rate or 'full'} groups/s: {sides[rate]}")
        yield from claims(count, sides[RATE], sides[0.0])
    yield from on_paper(counts[-1], sides[0.0])
    rates = QUICK_FASTER if quick else FASTER
    yield from faster(counts[-1], sides[RATE], rates, seconds=seconds)


def measured(count: int, *, rate: float, seconds: float) -> dict[str, Any]:
    """One process as the trainer; what it says at its end."""
    asked = json.dumps({"count": count, "rate": rate, "seconds": seconds})
    command = [sys.executable, "-m", "benchmarks.scale", asked]
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)}, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def claims(count: int, paced: dict[str, Any], free: dict[str, Any]) -> Iterator[Claim]:
    """What is said of so many generators."""
    yield of_parts(f"groups_per_s_{count}_paced", paced["rates"], "groups/s", bound=count * RATE)
    yield of_parts(f"groups_per_s_{count}_free", free["rates"], "groups/s")
    yield of_parts(f"cpu_per_group_{count}_paced", paced["costs"], "CPU us, trainer's side")
    yield of_parts(f"cpu_per_group_{count}_free", free["costs"], "CPU us, trainer's side")
    yield Claim(f"memory_{count}", paced["memory"], "bytes of its own, trainer's side")
    yield Claim(f"announcement_{count}", paced["announcement"], "bytes, to each generator")
    yield Claim(f"staleness_{count}_paced", paced["staleness"], "steps, mean")
    yield Claim(
        f"smallest_share_{count}_free", free["smallest"], "groups of the poorest / mean",
        bound=1.0, share=free["smallest"],
    )  # fmt: skip


def faster(
    count: int, paced: dict[str, Any], rates: Sequence[float], *, seconds: float
) -> Iterator[Claim]:
    """What comes when each makes more a second, up to the first rate that is not kept up with."""
    sides, tell = [paced], progress_of(len(rates))
    for rate in rates:
        made, side = rate * count, measured(count, rate=rate, seconds=seconds)
        tell(f"{count} generators at {rate} groups/s: {side}")
        sides.append(side)
        reached = of_parts(f"groups_per_s_{count}_at_{made:g}", side["rates"], "groups/s", made)
        yield reached
        yield of_parts(
            f"cpu_per_group_{count}_at_{made:g}", side["costs"], "CPU us, trainer's side"
        )
        if reached.ours < KEPT * made:
            break
    most = max(sides, key=lambda side: statistics.median(side["rates"]))
    cores = [rate * cost / 1e6 for rate, cost in zip(most["rates"], most["costs"], strict=True)]
    yield of_parts(f"most_groups_per_s_{count}", most["rates"], "groups/s, at any rate")
    yield of_parts(f"cores_at_most_{count}", cores, "cores, trainer's side")


def on_paper(count: int, free: dict[str, Any]) -> Iterator[Claim]:
    """What the largest number that was measured would come to with MANY; nobody ran that."""
    own = MANY / count * free["announcement"]
    one_core = 1e6 / statistics.median(free["costs"])
    yield Claim(f"announcement_{MANY}_on_paper", own, "bytes, to each generator")
    yield Claim(f"announcing_{MANY}_on_paper", MANY * own, "bytes/s, once a second to all")
    yield Claim("groups_per_s_of_one_core_on_paper", one_core, "groups/s, trainer's side")
    yield Claim(f"seconds_per_group_{MANY}_on_paper", MANY / one_core,
                "s, between two groups of one generator")  # fmt: skip


def of_parts(name: str, values: Sequence[float], unit: str, bound: float | None = None) -> Claim:
    """A claim of what was measured in each part of the time."""
    median = statistics.median(values)
    return Claim(name, median, unit, bound=bound, share=median / bound if bound else None,
                 n=len(values), spread=spread(values))  # fmt: skip


# The trainer's side.


def trainer(asked: dict[str, Any]) -> None:
    """Take batches for so many seconds, once every generator was heard; print what was seen."""
    count = int(asked["count"])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scale-")))
        num_groups = max(MIN_GROUPS, count)
        intake, roster, speaker, address = open_intake(stack, folder, num_groups)
        for share in shares(count):
            each = stack.enter_context(generators(address, share, asked["rate"], num_groups))
            stack.callback(each.kill)
        step = arrive(intake, roster, count)
        if asked["rate"]:
            step = drain(intake, step, rate=count * asked["rate"])
        taken = Taken()
        for _ in range(NUM_PARTS):
            step = take(intake, taken, step, seconds=asked["seconds"] / NUM_PARTS)
        said = {
            **taken.summary(count),
            "memory": own_bytes(os.getpid()),
            "announcement": len(wire.encode_announcement(speaker.announcement)),
        }
    sys.stdout.write(json.dumps(said) + "\n")


def take(intake: BatchCollector, taken: Taken, step: int, *, seconds: float) -> int:
    """Take steps for so many seconds, at least one; the step that comes next."""
    began, used, before = time.perf_counter(), cpu_seconds(), taken.by_sender.total()
    while (lasted := time.perf_counter() - began) < seconds:
        taken.add(one_step(intake, step), step=step)
        step += 1
    num_groups = taken.by_sender.total() - before
    taken.rates.append(num_groups / lasted)
    taken.costs.append(1e6 * (cpu_seconds() - used) / num_groups)
    return step


def drain(
    intake: BatchCollector, step: int, *, rate: float, clock: Callable[[], float] = time.monotonic
) -> int:
    """Take steps until one brings no more than `rate` groups a second; the step that comes next."""
    began = clock()
    ends = began + DRAIN_SECONDS
    while began < ends:
        num_groups, ended = len(one_step(intake, step)), clock()
        step += 1
        if num_groups <= 1.01 * rate * (ended - began):
            break
        began = ended
    return step


def one_step(intake: BatchCollector, step: int) -> list[RolloutGroup]:
    """The groups of a step in which nothing is learned."""
    groups, _ = intake.collect(step, lambda idle: None)
    intake.commit()
    intake.acknowledgements.publish(step, started_step=step)
    return groups


def open_intake(
    stack: ExitStack, folder: Path, num_groups: int
) -> tuple[BatchCollector, GeneratorRegistry, StatusPublisher, str]:
    """The real thing without a model; nobody evaluates here."""
    config = load_config(
        "bin/trainer",
        ["--run.dir", str(folder), "--run.name", "scale",
         "--train.batch-size", str(8 * num_groups)],
    )  # fmt: skip
    port = 20000 + os.getpid() % 20000
    address = f"tcp://127.0.0.1:{port}"
    receiver = wire.RolloutReceiver(address, run_id=RUN, vocab_size=VOCAB_SIZE)
    stack.enter_context(closing(receiver))
    announcer = wire.AnnouncementPublisher(wire.next_port(address))
    stack.enter_context(closing(announcer))
    counters = wire.GeneratorStatusReceiver(wire.next_port(address, 2), run_id=RUN)
    stack.enter_context(closing(counters))
    (folder / "books").mkdir()
    books = stack.enter_context(RunLog(folder / "books", run="scale", max_steps=1))
    speaker = StatusPublisher(announcer, wire.Announcement(RUN, incarnation=os.urandom(8)))
    roster, nobody = GeneratorRegistry(counters, books, {}), cast(Any, None)
    session = Session(config, RUN, books, speaker, StopSignal())
    evaluations = EvaluationCoordinator(session, nobody, nobody)
    journal = stack.enter_context(closing(Journal(folder / "journal")))
    pools = DifficultyPools(["math_1k/7"], easy_threshold=None, hard_threshold=None)
    intake = BatchCollector(session, receiver, journal, roster, pools, evaluations)
    return intake, roster, speaker, address


def shares(count: int) -> list[range]:
    """Which generators each process plays."""
    size = -(-count // NUM_PROCESSES)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def generators(
    address: str, share: range, rate: float, groups_per_step: int
) -> subprocess.Popen[bytes]:
    """A process that plays some."""
    asked = {"address": address, "first": share.start, "end": share.stop, "rate": rate,
             "groups_per_step": groups_per_step}  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.scale_crowd", json.dumps(asked)]
    return subprocess.Popen(command, cwd=REPO)


def arrive(intake: BatchCollector, roster: GeneratorRegistry, count: int) -> int:
    """Take batches until every generator was heard; the step that comes next."""
    step, ends = 1, time.monotonic() + ARRIVAL_SECONDS
    while len(roster.live()) < count:
        if time.monotonic() > ends:
            raise TimeoutError(f"{len(roster.live())} of {count} generators were heard")
        one_step(intake, step)
        step += 1
    return step


def cpu_seconds() -> float:
    """Of all threads of this process, those of ZeroMQ too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    trainer(json.loads(sys.argv[1]))
