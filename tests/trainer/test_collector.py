"""Collecting a batch: admission, acknowledgements and journal commits."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from bad_network import proxy_to
from sample_data import RUN, group_of
from sockets import ANYWHERE, DEADLINE, eventually, receiver_at, sender_to

from peralta_zmq import wire
from peralta_zmq.config import load_config
from peralta_zmq.environments.curriculum import DifficultyPools
from peralta_zmq.errors import OutageError
from peralta_zmq.learning.optimizer import UpdateSettings
from peralta_zmq.observe.metrics import read_rows
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import journal as journals
from peralta_zmq.trainer.collector import BatchCollector, CollectorLimits
from peralta_zmq.trainer.generator_registry import GeneratorRegistry
from peralta_zmq.trainer.journal import DroppedGroup, Journal
from peralta_zmq.trainer.recovery import load_journaled_batch
from peralta_zmq.trainer.session import ProgressAnnouncer, Session, StopSignal

UPDATE = UpdateSettings(1e-3, weight_decay=0.0, max_grad_norm=1.0)
NUM_SENDERS = 300
MAX_ENTRIES_PER_SECOND = 500_000  # of 100 bytes, over all receivers of the announcements


class RecordingPublisher:
    """Keeps the announcements instead of sending them."""

    def __init__(self) -> None:
        self.announcements: list[wire.Announcement] = []

    def publish(self, announcement: wire.Announcement) -> None:
        self.announcements.append(announcement)


class CountingJournal(Journal):
    """Counts the commits that wrote something."""

    num_commits = 0

    def commit(self) -> bool:
        written = super().commit()
        self.num_commits += written
        return written


class SlowReceiver:
    """Yields a group only to a call with a long timeout; `now` is the simulated time."""

    GAP = CollectorLimits().commit_seconds / 5  # seconds between two groups
    address = ANYWHERE

    def __init__(self, num: int) -> None:
        self.now = 100.0
        self._groups = list[RolloutGroup]()
        self.refused: dict[str, int] = {}
        self.send(*range(num))

    def send(self, *numbers: int) -> None:
        self._groups += [group_of([1.0, 0.0], group_number=number) for number in numbers]

    def receive(self, *, timeout: float) -> tuple[RolloutGroup, bytes] | None:
        self.now += min(timeout, self.GAP)
        if timeout < self.GAP or not self._groups:
            return None
        group = self._groups.pop(0)
        return group, wire.encode_group(group)


class Opened(NamedTuple):
    """A collector with its session, published announcements, senders and addresses."""

    collector: BatchCollector
    published: list[wire.Announcement]
    session: Session
    generators: GeneratorRegistry
    address: str
    status_address: str

    def collect(
        self, step: int = 1, meanwhile: Callable[[], None] = lambda: None
    ) -> list[RolloutGroup]:
        """Collect and commit the batch of a step; calls `meanwhile` whenever no group waits."""
        batch = list[RolloutGroup]()
        for groups in self.collector.groups(step, UPDATE):
            batch += groups
            meanwhile()
        self.collector.commit()
        return batch


def opened(
    stack: ExitStack,
    folder: Path,
    *,
    groups: int,
    receiver: SlowReceiver | None = None,
    easy_threshold: float | None = None,
    settings: Sequence[str] = (),
) -> Opened:
    """A collector whose steps take `groups` groups of two rollouts."""
    arguments = ["--run.dir", str(folder), "--run.name", "demo", "--sampling.num-generations=2",
                 f"--train.batch-size={2 * groups}", *settings]  # fmt: skip
    real_receiver = stack.enter_context(closing(receiver_at()))
    statuses = stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)))
    run_log = stack.enter_context(RunLog(folder, run="demo", max_steps=1))
    publisher = RecordingPublisher()
    session = Session(
        load_config("bin/trainer", arguments), RUN, run_log,
        ProgressAnnouncer(cast(Any, publisher), wire.Announcement(RUN)),
        wire.AddressFile(None, "localhost", 1, RUN), StopSignal(),
    )  # fmt: skip
    generators = GeneratorRegistry(statuses, run_log, {})
    collector = BatchCollector(
        session,
        cast(Any, receiver or real_receiver),
        stack.enter_context(closing(CountingJournal(folder / "journal"))),
        generators,
        DifficultyPools(["math_1k/7"], easy_threshold=easy_threshold, hard_threshold=None),
        cast(Any, None),
    )
    return Opened(
        collector, publisher.announcements, session, generators,
        address=real_receiver.address, status_address=statuses.address,
    )  # fmt: skip


@pytest.fixture
def send_from_many(stack: ExitStack) -> Callable[[str], None]:
    """Send one group of each of NUM_SENDERS generators from another thread."""

    def push(address: str) -> None:
        sender = sender_to(address, stack)
        group = group_of([1.0, 0.0])
        frames = [wire.encode_group(dataclasses.replace(group, generator_id=f"g{number}"))
                  for number in range(NUM_SENDERS)]  # fmt: skip
        thread = threading.Thread(
            target=lambda: [sender.send(frame, timeout=DEADLINE) for frame in frames]
        )
        thread.start()
        stack.callback(thread.join)

    return push


def test_groups_delayed_by_a_dead_link_are_stale_only_above_the_bound(
    stack: ExitStack, tmp_path: Path
) -> None:
    scene = opened(stack, tmp_path, groups=4)
    bound = scene.collector.admission.max_off_policy_steps
    proxy = stack.enter_context(proxy_to(scene.address))
    late, near = sender_to(proxy.address, stack), sender_to(scene.address, stack)

    def collected(step: int, meanwhile: Callable[[], None] = lambda: None) -> set[tuple[str, int]]:
        return {(each.generator_id, each.group_number) for each in scene.collect(step, meanwhile)}

    def send(to: wire.RolloutSender, name: str, numbers: range, policy_step: int) -> None:
        for number in numbers:
            group = group_of(
                [1.0, 0.0], generator_id=name, group_number=number, policy_step=policy_step
            )
            assert to.send(wire.encode_group(group), timeout=DEADLINE)

    send(late, "late", range(4), 0)
    assert collected(1) == {("late", number) for number in range(4)}
    proxy.cut(half_open=True)
    send(late, "late", range(4, 12), 0)
    proxy.restore()
    assert collected(1 + bound) == {("late", number) for number in range(4, 8)}

    fresh = iter([range(4)])

    def send_fresh() -> None:
        if scene.collector.admission.ledger.total == 12:  # all late groups are received
            for numbers in fresh:
                send(near, "near", numbers, 1 + bound)

    assert collected(2 + bound, send_fresh) == {("near", number) for number in range(4)}
    assert scene.collector.admission.ledger.outcomes == {"trained": 12, "stale": 4}
    stack.close()  # writes the count of the events without a line
    dropped = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "drop"]
    assert [(row["group_number"], row.get("count")) for row in dropped] == [(8, None), (11, 3)]
    assert {(row["outcome"], row["staleness"]) for row in dropped} == {("stale", bound + 1)}


@pytest.mark.parametrize("outcome", ["stale", "invalid", "evaluated"])
def test_flood_of_dropped_groups_leaves_only_their_numbers_on_disk(
    stack: ExitStack, tmp_path: Path, outcome: str
) -> None:
    scene = opened(stack, tmp_path, groups=1)
    ignored: list[RolloutGroup] = []
    scene.collector.evaluations = cast(Any, SimpleNamespace(receive=ignored.append))
    group = group_of([1.0, 0.0], problem_id="x" * 1024, task="y" * 1024)
    if outcome == "invalid":
        group = dataclasses.replace(group, rollouts=())
    if outcome == "evaluated":
        group = dataclasses.replace(group, evaluation_step=1)
    groups = [dataclasses.replace(group, group_number=number) for number in range(500)]
    scene.generators.add_group(group.sender, step=100)
    for each in groups:
        assert scene.collector.add(each, b"", step=100) == outcome
    scene.collector.commit()
    (file,) = (tmp_path / "journal").iterdir()
    assert file.stat().st_size < 500 * 150
    events = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "drop"]
    assert len(events) == (outcome != "evaluated")
    again = opened(stack, tmp_path, groups=1)
    assert not load_journaled_batch(again.collector, 100, wire.GroupLimits(64)).is_complete
    assert again.collector.admission.ledger.outcomes == {outcome: 500}
    assert again.collector.add(groups[7], b"", step=100) == "duplicate"


def test_journal_of_a_step_has_a_limit_of_dropped_groups(stack: ExitStack, tmp_path: Path) -> None:
    scene = opened(stack, tmp_path, groups=1)
    scene.collector.limits = CollectorLimits(max_dropped=3)
    for number in range(5):
        group = group_of([1.0, 0.0], group_number=number)
        assert scene.collector.add(group, b"", step=100) == "stale"
    scene.collector.commit()
    assert len(scene.collector.journal.read(100)) == 3
    again = opened(stack, tmp_path, groups=1).collector
    load_journaled_batch(again, 100, wire.GroupLimits(64))
    again.add(group_of([1.0, 0.0], group_number=5, min_group_number=5), b"", step=100)
    assert again.admission.ledger.outcomes == {"stale": 4, "lost": 2}
    scene.collector.take_batch()  # the next step has a journal file of its own
    scene.collector.add(group_of([1.0, 0.0], group_number=5), b"", step=101)
    scene.collector.commit()
    assert len(scene.collector.journal.read(101)) == 1


def test_filtered_group_is_journaled_with_its_known_problem(
    stack: ExitStack, tmp_path: Path
) -> None:
    settings = ("--curriculum.online-difficulty-filtering",)
    scene = opened(stack, tmp_path, groups=1, settings=settings)
    for group_number, problem_id in enumerate(["x" * 1024, "math_1k/7"]):
        group = group_of([1.0, 1.0], problem_id=problem_id, group_number=group_number)
        assert scene.collector.add(group, b"", step=1) == "filtered"
    scene.collector.commit()
    dropped = [DroppedGroup.decode(record.content) for record in scene.collector.journal.read(1)]
    read = [(each.group_number, each.problem_id, each.mean_reward) for each in dropped]
    assert read == [(0, "", 0.0), (1, "math_1k/7", 1.0)]


def test_pools_without_a_normal_problem_are_refilled_with_an_event(
    stack: ExitStack, tmp_path: Path
) -> None:
    scene = opened(stack, tmp_path, groups=1, easy_threshold=0.5)
    frame = wire.encode_group(group_of([1.0, 0.0], problem_id="math_1k/7"))
    assert sender_to(scene.address, stack).send(frame, timeout=DEADLINE)
    scene.collect()
    rows = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "pool_refilled"]
    assert [row["problems"] for row in rows] == [1]


def test_suppliers_have_groups_in_the_newest_steps(stack: ExitStack, tmp_path: Path) -> None:
    scene = opened(stack, tmp_path, groups=1)
    collector = scene.collector

    def suppliers(step: int, name: str) -> dict[str, int]:
        """As announced when a step begins with a group of this generator."""
        for generator_id, policy_step in ((name, step - 1), ("stale", 0)):
            group = group_of(
                [1.0, 0.0], generator_id=generator_id, group_number=step, policy_step=policy_step
            )
            collector.add(group, wire.encode_group(group), step=step)
        collector.commit()
        collector.take_batch()
        collector.acknowledgements.publish(step - 1, started_step=step)
        return scene.published[-1].suppliers

    assert suppliers(100, "ann") == {"ann": 1}
    assert suppliers(101, "bob") == {"ann": 1, "bob": 1}
    for step in (102, 103):
        suppliers(step, "bob")
    assert suppliers(104, "bob") == {"bob": 4}
    names = {sender.partition("/")[0] for sender in scene.published[-1].senders}
    assert names == {"ann", "bob", "stale"}


# Sample ranges.

ANN = wire.GeneratorStatus(RUN, "ann", b"bootboot", needs_range=True)
BOB = dataclasses.replace(ANN, generator_id="bob")


def range_of(
    scene: Opened, stack: ExitStack, status: wire.GeneratorStatus, step: int = 1
) -> range | None:
    """The sample range that is announced after this status arrived; None without one."""
    sender = stack.enter_context(closing(wire.GeneratorStatusSender(scene.status_address)))

    def arrived() -> bool:
        sender.send(status)  # again and again: it is dropped until the connection stands
        scene.collector.grant_ranges(step)
        return any(sender.status == status for sender in scene.generators.live)

    eventually(arrived)
    scene.collector.acknowledgements.publish(0, started_step=0)
    progress = scene.published[-1].senders[status.sender]
    return range(progress.range_start, progress.range_stop) or None


def granted_ends(folder: Path, step: int) -> list[int]:
    """The first sample index that is not granted, in each record of the journal."""
    records, _ = journals.read_records(folder / "journal", step)
    return [journals.decode_number(record.content) for record in records]


def test_restarted_trainer_grants_no_sample_again(stack: ExitStack, tmp_path: Path) -> None:
    scene = opened(stack, tmp_path, groups=1)
    assert range_of(scene, stack, ANN) == range(16)
    repeated = dataclasses.replace(ANN, made=1)
    assert range_of(scene, stack, repeated) == range(16)  # the announcement was lost
    confirmed = dataclasses.replace(ANN, next_sample_index=16)
    assert range_of(scene, stack, confirmed) == range(16, 32)
    assert granted_ends(tmp_path, 1) == [16, 32]
    satisfied = dataclasses.replace(ANN, next_sample_index=32, needs_range=False)
    assert range_of(scene, stack, satisfied) is None
    assert range_of(scene, stack, BOB) == range(32, 48)

    again = opened(stack, tmp_path, groups=1)
    assert not load_journaled_batch(again.collector, 1, wire.GroupLimits(64)).is_complete
    assert range_of(again, stack, BOB, step=2) == range(48, 64)
    assert granted_ends(tmp_path, 2) == [64]


def test_ranges_are_granted_between_two_micro_batches(stack: ExitStack, tmp_path: Path) -> None:
    scene = opened(stack, tmp_path, groups=2)
    sender = stack.enter_context(closing(wire.GeneratorStatusSender(scene.status_address)))

    def is_announced() -> bool:
        sender.send(ANN)
        scene.collector.serve(1)
        senders = scene.published[-1].senders.values() if scene.published else ()
        return any(progress.range_stop for progress in senders)

    eventually(is_announced)
    assert not scene.published[-1].waiting
    assert granted_ends(tmp_path, 1) == [16]


def test_range_that_cannot_be_journaled_is_not_announced(stack: ExitStack, tmp_path: Path) -> None:
    scene = opened(stack, tmp_path, groups=1)
    shutil.rmtree(tmp_path / "journal")
    scene.session.stop.requested = True
    with pytest.raises(OutageError, match="cannot write"):
        range_of(scene, stack, ANN)
    assert scene.published == []


def test_range_is_the_share_of_a_generator_until_the_next_step(
    stack: ExitStack, tmp_path: Path
) -> None:
    scene = opened(stack, tmp_path, groups=60, settings=["--train.max-async-level=2"])
    assert range_of(scene, stack, ANN) == range(3 * 60)
    for name in ("ann", "bob", "cid"):  # they supply the steps
        group = group_of([1.0, 0.0], generator_id=name)
        scene.collector.add(group, wire.encode_group(group), step=1)
    scene.collector.commit()
    scene.collector.take_batch()
    confirmed = dataclasses.replace(ANN, next_sample_index=180)
    assert range_of(scene, stack, confirmed, step=2) == range(180, 180 + 3 * 20)


def test_range_is_longer_while_problems_are_excluded(stack: ExitStack, tmp_path: Path) -> None:
    scene = opened(stack, tmp_path, groups=1)
    pools = scene.collector.curriculum.pools = DifficultyPools(
        "abcdefgh", easy_threshold=0.5, hard_threshold=None
    )
    for problem_id in "bcdefgh":
        pools.update(problem_id, 1.0)
    assert range_of(scene, stack, ANN) == range(8 * 16)


def test_group_number_jump_is_an_invalid_message(stack: ExitStack, tmp_path: Path) -> None:
    scene = opened(stack, tmp_path, groups=2)
    sender, far = sender_to(scene.address, stack), 2**63
    for group_number, min_group_number in ((0, 0), (far, far), (far - 1, 0), (1, 1)):
        group = group_of([1.0, 0.0], group_number=group_number, min_group_number=min_group_number)
        assert sender.send(wire.encode_group(group), timeout=DEADLINE)
    assert [group.group_number for group in scene.collect()] == [0, 1]
    metrics, accounting = scene.collector.metrics(), scene.collector.accounting()
    assert (metrics["dropped/lost"], metrics["dropped/invalid"]) == (0, 2)
    assert (accounting["made"], accounting["in_flight"]) == (2, 0)


def test_invalid_groups_of_unknown_senders_are_only_counted(
    stack: ExitStack, tmp_path: Path
) -> None:
    scene, num = opened(stack, tmp_path, groups=2), 500
    sender = sender_to(scene.address, stack)
    invalid = group_of([1.0, 0.0])
    invalid.rollouts[0].token_ids[0] = 10_000  # not in the vocabulary

    def send(group: RolloutGroup) -> None:
        assert sender.send(wire.encode_group(group), timeout=DEADLINE)

    def flood() -> None:
        for number in range(num):
            incarnation = number.to_bytes(8, "big")
            send(dataclasses.replace(invalid, generator_id="bob", incarnation=incarnation))
        send(group_of([1.0, 0.0], group_number=0))
        send(dataclasses.replace(invalid, group_number=1))  # of a known sender: it is settled
        send(group_of([1.0, 0.0], group_number=2))

    thread = threading.Thread(target=flood)
    thread.start()
    stack.callback(thread.join)
    assert [group.group_number for group in scene.collect()] == [0, 2]
    ledger = scene.collector.admission.ledger
    assert ledger.outcomes == {"trained": 2, "invalid": 1}
    assert list(ledger.settled_by_sender) == [invalid.sender]
    assert list(scene.published[-1].senders) == [invalid.sender]
    rows = read_rows(tmp_path / "events.jsonl")
    assert [row["event"] for row in rows] == ["join", "drop"]
    assert [record.kind for record in scene.collector.journal.read(1)] == [
        journals.GROUP, journals.DROPPED, journals.GROUP, journals.BEGUN
    ]  # fmt: skip
    assert scene.collector.metrics()["dropped/invalid"] == num + 1


def durable(scene: Opened) -> list[int]:
    """By sender in the newest announcement: the number of durable groups."""
    return [progress.durable for progress in scene.published[-1].senders.values()]


def test_acknowledgement_volume_is_bounded_for_many_senders(
    stack: ExitStack, tmp_path: Path, send_from_many: Callable[[str], None]
) -> None:
    scene = opened(stack, tmp_path, groups=NUM_SENDERS)
    send_from_many(scene.address)
    started = monotonic()
    assert len(scene.collect()) == NUM_SENDERS
    seconds = monotonic() - started
    *acknowledgements, begin = scene.published
    assert (begin.started_step, len(begin.senders)) == (1, NUM_SENDERS)
    # Each announcement goes to every sender that it lists.
    entries = sum(len(announcement.senders) ** 2 for announcement in acknowledgements)
    assert 0 < entries <= MAX_ENTRIES_PER_SECOND * seconds + NUM_SENDERS**2


def test_all_groups_are_acknowledged_when_the_queue_is_empty(
    stack: ExitStack, tmp_path: Path, send_from_many: Callable[[str], None]
) -> None:
    scene = opened(stack, tmp_path, groups=NUM_SENDERS + 1)
    send_from_many(scene.address)
    deadline = monotonic() + DEADLINE

    def until_durable() -> None:
        is_durable = bool(scene.published) and durable(scene) == [1] * NUM_SENDERS
        scene.session.stop.requested = is_durable or monotonic() > deadline

    scene.collect(meanwhile=until_durable)
    newest = scene.published[-1]
    assert newest.waiting and durable(scene) == [1] * NUM_SENDERS
    assert [progress.settled for progress in newest.senders.values()] == [1] * NUM_SENDERS


def test_groups_are_yielded_when_no_further_group_waits(stack: ExitStack, tmp_path: Path) -> None:
    receiver = SlowReceiver(2)
    scene = opened(stack, tmp_path, groups=2, receiver=receiver)

    def yielded(step: int) -> list[list[int]]:
        lists = [*scene.collector.groups(step, UPDATE)]
        scene.collector.commit()
        return [[group.group_number for group in groups] for groups in lists]

    assert yielded(1) == [[0], [1]]
    receiver.GAP = 0.0  # all groups of the next step are there
    receiver.send(2, 3)
    assert yielded(2) == [[2, 3]]


def test_trainer_that_may_compute_is_not_announced_as_waiting(
    stack: ExitStack, tmp_path: Path
) -> None:
    scene = opened(stack, tmp_path, groups=3, receiver=SlowReceiver(3))
    is_waiting = [scene.published[-1].waiting for _ in scene.collector.groups(1, UPDATE)]
    scene.collector.commit()
    assert is_waiting == [False] * 3
    assert any(announcement.waiting for announcement in scene.published)


def test_warning_without_rollouts_counts_no_seconds_of_computing(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, warned = SlowReceiver(2), list[tuple[float, str]]()
    monkeypatch.setattr(journals.time, "monotonic", lambda: receiver.now)
    scene = opened(stack, tmp_path, groups=3, receiver=receiver)
    computing, started = [100.0, 50.0], receiver.now

    def wait(text: str) -> None:
        warned.append((receiver.now - started, text.partition(" s on ")[0]))

    monkeypatch.setattr(scene.session.run_log, "wait", wait)
    for groups in scene.collector.groups(1, UPDATE):
        receiver.now += computing.pop(0) if groups else 0.0
        scene.session.stop.requested = len(warned) == 2
    assert [seconds for seconds, _ in warned] == pytest.approx([170, 190], abs=0.5)
    assert [text for _, text in warned] == ["no rollouts for 20", "no rollouts for 40"]


def test_commits_of_single_groups_are_batched_and_end_before_the_step(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = CollectorLimits()
    num = limits.commit_groups - 1  # commit_groups are reason enough for a commit
    receiver = SlowReceiver(num)
    monkeypatch.setattr(journals.time, "monotonic", lambda: receiver.now)
    scene = opened(stack, tmp_path, groups=num, receiver=receiver)
    journal = cast(CountingJournal, scene.collector.journal)
    waited: list[float] = []
    started = receiver.now
    groups = scene.collect(meanwhile=lambda: waited.append(journal.waited))
    seconds = receiver.now - started
    assert len(groups) == num and seconds > 3 * limits.commit_seconds
    assert 3 <= journal.num_commits <= seconds / limits.commit_seconds + 1
    assert max(waited) < limits.commit_seconds + 2 * SlowReceiver.GAP
    kinds = [record.kind for record in journal.read(1)]
    assert journal.num_waiting == 0 and kinds == [journals.GROUP] * num + [journals.BEGUN]
    assert durable(scene) < [num]  # announced before the commit
    scene.collector.acknowledgements.publish(1, started_step=1)
    assert durable(scene) == [num]


def test_commit_follows_the_end_of_an_outage_within_10_seconds(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = opened(stack, tmp_path, groups=1)
    collector, sync = scene.collector, os.fsync
    now, outage_end = 0.0, 0.0
    waited: list[float] = []  # simulated seconds from the end of an outage to the commit

    def sync_or_fail(descriptor: int) -> None:
        if now < outage_end:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    def pause(stop: StopSignal, seconds: float) -> None:
        nonlocal now
        now += seconds
        assert not scene.published[-1].waiting, "groups are not read: their senders must wait"

    monkeypatch.setattr(os, "fsync", sync_or_fail)
    monkeypatch.setattr(StopSignal, "pause", pause)
    for step in range(1, 100):
        now, outage_end = 0.0, 3.0 * step
        collector.journal.append(step, b"record")
        collector.acknowledgements.publish(step - 1, started_step=step - 1, waiting=True)
        collector.commit()
        waited.append(now - outage_end)
    assert max(waited) <= 10 and sum(waited) / len(waited) <= 5


def test_journaled_groups_above_the_limits_are_dropped(stack: ExitStack, tmp_path: Path) -> None:
    scene = opened(stack, tmp_path, groups=2)
    sender, long = sender_to(scene.address, stack), {1: [30, 30], 4: [30, 30]}
    for number in range(6):
        group = group_of([1.0, 0.0], group_number=number, lengths=long.get(number, [2, 2]))
        assert sender.send(wire.encode_group(group), timeout=DEADLINE)
    for step in (1, 2, 3):
        scene.collect(step)
    again, limits = opened(stack, tmp_path, groups=2), wire.GroupLimits(64, max_tokens=20)
    batches = list[list[int]]()
    for step in (1, 2):  # of step 1, one group is left; a later step shows that it was complete
        assert load_journaled_batch(again.collector, step, limits).is_complete
        batches.append([group.group_number for group in again.collector.take_batch()])
    assert batches == [[0], [2, 3]]
    assert not load_journaled_batch(
        again.collector, 3, limits
    ).is_complete  # continues with new groups
    assert [group.group_number for group in again.collector.batch] == [5]
    assert again.collector.admission.ledger.outcomes == {"trained": 4, "invalid": 2}


def test_sample_index_far_above_all_others_is_ignored(stack: ExitStack, tmp_path: Path) -> None:
    scene = opened(stack, tmp_path, groups=3)
    sender = sender_to(scene.address, stack)
    for group_number, index in enumerate([5, 2**53, 9]):
        group = dataclasses.replace(
            group_of([1.0, 0.0], group_number=group_number), sample_index=index
        )
        assert sender.send(wire.encode_group(group), timeout=DEADLINE)
    scene.collect()
    assert scene.collector.curriculum.ranges.next_index == 10
