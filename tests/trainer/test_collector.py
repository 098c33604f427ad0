"""What becomes of the groups that come, what is said of them, and how often they are written."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest
from fakes import RUN, group_of
from proxy import Proxy
from sockets import ANYWHERE, DEADLINE, receiver_at, sender_to

from peralta_zmq import wire
from peralta_zmq.config import load_config
from peralta_zmq.environments.curriculum import DifficultyPools
from peralta_zmq.observe.metrics import read_rows
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import journal as journals
from peralta_zmq.trainer.collector import COMMIT_GROUPS, COMMIT_SECONDS, BatchCollector
from peralta_zmq.trainer.generator_registry import GeneratorRegistry
from peralta_zmq.trainer.journal import Journal
from peralta_zmq.trainer.status import StatusPublisher
from peralta_zmq.trainer.stop_signal import StopSignal

MANY = 300
ENTRIES_PER_SECOND = 500_000  # a hundred bytes each, over all who hear


class Heard:
    """An announcer that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[wire.Announcement] = []

    def publish(self, announcement: wire.Announcement) -> None:
        self.said.append(announcement)


class CountingJournal(Journal):
    """One that counts how often it has written."""

    num_commits = 0

    def commit(self) -> bool:
        written = super().commit()
        self.num_commits += written
        return written


class Trickle:
    """A receiver that gives a group only to who waits long for it; `now` is the time there."""

    GAP = COMMIT_SECONDS / 5  # seconds between two groups
    address = ANYWHERE

    def __init__(self, num: int) -> None:
        self.now = 100.0
        self._groups = [group_of([1.0, 0.0], sequence=number) for number in range(num)]
        self.refused: dict[str, int] = {}

    def receive(self, *, timeout: float) -> tuple[RolloutGroup, bytes] | None:
        self.now += min(timeout, self.GAP)
        if timeout < self.GAP or not self._groups:
            return None
        group = self._groups.pop(0)
        return group, wire.encode_group(group)


def opened(
    stack: ExitStack,
    folder: Path,
    stop: StopSignal,
    *,
    groups: int,
    trickle: Trickle | None = None,
    easy_threshold: float | None = None,
    settings: Sequence[str] = (),
) -> tuple[BatchCollector, Heard, str]:
    """An intake whose steps take so many groups of two rollouts."""
    arguments = ["--run.dir", str(folder), "--run.name", "demo", "--sampling.num-generations=2",
                 f"--train.batch-size={2 * groups}", *settings]  # fmt: skip
    receiver = stack.enter_context(closing(receiver_at()))
    counters = stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)))
    books = stack.enter_context(RunLog(folder, run="demo", max_steps=1))
    heard, nobody = Heard(), cast(Any, None)
    intake = BatchCollector(
        load_config("bin/trainer", arguments), receiver=cast(Any, trickle or receiver),
        run_id=RUN, vocab_size=64,
        journal=stack.enter_context(closing(CountingJournal(folder / "journal"))),
        roster=GeneratorRegistry(counters, books, {}), evaluations=nobody, books=books, stop=stop,
        pools=DifficultyPools(["math_1k/7"], easy_threshold=easy_threshold, hard_threshold=None),
        speaker=StatusPublisher(cast(Any, heard), wire.Announcement(RUN)),
    )  # fmt: skip
    return intake, heard, receiver.address


@pytest.fixture
def from_many(stack: ExitStack) -> Callable[[str], None]:
    """One group of each of many generators, pushed from another thread."""

    def push(address: str) -> None:
        sender = sender_to(address, stack)
        group = group_of([1.0, 0.0])
        frames = [wire.encode_group(dataclasses.replace(group, generator_id=f"g{number}"))
                  for number in range(MANY)]  # fmt: skip
        thread = threading.Thread(
            target=lambda: [sender.send(frame, timeout=DEADLINE) for frame in frames]
        )
        thread.start()
        stack.callback(thread.join)

    return push


def test_what_comes_late_through_a_dead_link_is_trained_up_to_the_bound_and_stale_beyond_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    intake, _, address = opened(stack, tmp_path, StopSignal(), groups=4)
    bound = intake.admission.max_off_policy_steps
    proxy = stack.enter_context(Proxy(int(address.rpartition(":")[2])))
    late, near = sender_to(proxy.address, stack), sender_to(address, stack)

    def collected(
        step: int, meanwhile: Callable[[bool], None] = lambda idle: None
    ) -> set[tuple[str, int]]:
        groups, _ = intake.collect(step, meanwhile)
        intake.commit()
        return {(each.generator_id, each.sequence) for each in groups}

    def send(to: wire.RolloutSender, name: str, numbers: range, policy_step: int) -> None:
        for number in numbers:
            group = group_of(
                [1.0, 0.0], generator_id=name, sequence=number, policy_step=policy_step
            )
            assert to.send(wire.encode_group(group), timeout=DEADLINE)

    send(late, "late", range(4), 0)
    assert collected(1) == {("late", number) for number in range(4)}
    proxy.half_open.set()
    send(late, "late", range(4, 12), 0)
    proxy.half_open.clear()
    assert collected(1 + bound) == {("late", number) for number in range(4, 8)}

    fresh = iter([range(4)])

    def nearby(idle: bool) -> None:
        if intake.admission.ledger.total == 12:  # all that was late has come
            for numbers in fresh:
                send(near, "near", numbers, 1 + bound)

    assert collected(2 + bound, nearby) == {("near", number) for number in range(4)}
    assert intake.admission.ledger.outcomes == {"trained": 12, "stale": 4}
    dropped = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "drop"]
    assert [row["sequence"] for row in dropped] == [*range(8, 12)]
    assert {(row["outcome"], row["staleness"]) for row in dropped} == {("stale", bound + 1)}


def test_when_no_problem_is_left_all_are_drawn_again_and_an_event_says_so(
    stack: ExitStack, tmp_path: Path
) -> None:
    intake, _, address = opened(stack, tmp_path, StopSignal(), groups=1, easy_threshold=0.5)
    frame = wire.encode_group(group_of([1.0, 0.0], problem_id="math_1k/7"))
    assert sender_to(address, stack).send(frame, timeout=DEADLINE)
    intake.collect(1, lambda idle: None)
    rows = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "pool_refilled"]
    assert [row["problems"] for row in rows] == [1]


def test_a_draw_that_nobody_can_have_come_to_sends_no_newcomer_there(
    stack: ExitStack, tmp_path: Path
) -> None:
    intake, _, address = opened(stack, tmp_path, StopSignal(), groups=3)
    sender = sender_to(address, stack)
    for sequence, draw in enumerate([5, 2**53, 9]):
        group = dataclasses.replace(group_of([1.0, 0.0], sequence=sequence), sample_index=draw)
        assert sender.send(wire.encode_group(group), timeout=DEADLINE)
    intake.collect(1, lambda idle: None)
    assert intake.saved()["next_sample_index"] == 10


def test_what_is_announced_while_groups_come_does_not_grow_with_the_square_of_the_senders(
    stack: ExitStack, tmp_path: Path, from_many: Callable[[str], None]
) -> None:
    intake, heard, address = opened(stack, tmp_path, StopSignal(), groups=MANY)
    from_many(address)
    started = monotonic()
    groups, _ = intake.collect(1, lambda idle: None)
    lasted = monotonic() - started
    assert len(groups) == MANY
    *news, step_begins = heard.said
    assert (step_begins.started_step, len(step_begins.consumed)) == (1, MANY)
    entries = sum(len(each.received) ** 2 for each in news)  # each goes to all who are in it
    assert 0 < entries <= ENTRIES_PER_SECOND * lasted + MANY**2


def test_all_that_came_is_announced_when_nothing_more_comes(
    stack: ExitStack, tmp_path: Path, from_many: Callable[[str], None]
) -> None:
    stop = StopSignal()
    intake, heard, address = opened(stack, tmp_path, stop, groups=MANY + 1)
    from_many(address)
    ends = monotonic() + DEADLINE

    def until_said(idle: bool) -> None:
        safe = heard.said[-1].durable.values() if heard.said else ()
        stop.asked = list(safe) == [0] * MANY or monotonic() > ends

    intake.collect(1, until_said)
    newest = heard.said[-1]
    assert newest.waiting
    assert list(newest.received.values()) == list(newest.durable.values()) == [0] * MANY


def test_groups_that_come_one_by_one_are_written_together_and_all_before_the_step(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = COMMIT_GROUPS - 1  # else so many are reason enough
    trickle = Trickle(num)
    monkeypatch.setattr(journals.time, "monotonic", lambda: trickle.now)
    intake, heard, _ = opened(stack, tmp_path, StopSignal(), groups=num, trickle=trickle)
    waited: list[float] = []
    begun = trickle.now
    groups, _ = intake.collect(1, lambda idle: waited.append(intake.journal.waited))
    intake.commit()
    lasted = trickle.now - begun
    assert len(groups) == num and lasted > 3 * COMMIT_SECONDS
    assert 3 <= cast(CountingJournal, intake.journal).num_commits <= lasted / COMMIT_SECONDS + 1
    assert max(waited) < COMMIT_SECONDS + 2 * Trickle.GAP
    assert intake.journal.num_waiting == 0 and len(intake.journal.read(1)) == num
    assert list(heard.said[-1].durable.values()) < [num - 1]  # the step begins meanwhile
    intake.announce(1, started_step=1)
    assert list(heard.said[-1].durable.values()) == [num - 1]


def test_what_came_is_written_when_nothing_more_comes(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, trickle = StopSignal(), Trickle(1)
    monkeypatch.setattr(journals.time, "monotonic", lambda: trickle.now)
    intake, heard, _ = opened(stack, tmp_path, stop, groups=2, trickle=trickle)
    begun = trickle.now

    def until_safe(idle: bool) -> None:
        safe = bool(heard.said) and list(heard.said[-1].durable.values()) == [0]
        stop.asked = safe or trickle.now > begun + 1

    intake.collect(1, until_safe)
    assert trickle.now < begun + COMMIT_SECONDS  # sooner than while more comes
    assert intake.journal.num_waiting == 0


def test_batch_counted_in_tokens_is_full_with_the_first_group_that_reaches_them_at_every_step(
    stack: ExitStack, tmp_path: Path
) -> None:
    tokens = ("--train.token-batch-size=40",)
    intake, _, address = opened(stack, tmp_path, StopSignal(), groups=100, settings=tokens)
    sender = sender_to(address, stack)
    lengths = [[4, 1], [9, 8], [2, 1], [20, 20], [17, 17]]  # and 3 of the prompt in each rollout
    for number, each in enumerate(lengths):  # 11, 23 and 9 tokens; 46; 40
        frame = wire.encode_group(group_of([1.0, 0.0], sequence=number, lengths=each))
        assert sender.send(frame, timeout=DEADLINE)
    for step, expected in ((1, [0, 1, 2]), (2, [3]), (3, [4])):
        groups, _ = intake.collect(step, lambda idle: None)
        intake.commit()
        assert [each.sequence for each in groups] == expected
        assert not intake.has_batch
    again, _, _ = opened(stack, tmp_path, StopSignal(), groups=100, settings=tokens)
    for step, expected in ((1, 3), (2, 1), (3, 1)):
        assert again.replay(step) and len(again.take()) == expected
    assert not again.replay(4)
