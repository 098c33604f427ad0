"""Registered generators: join, leave, worker info, statistics, silence, mismatch, final status."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
from sample_data import INCARNATION, RUN
from sockets import ANYWHERE, eventually

from peralta_zmq import wire
from peralta_zmq.config import load_config
from peralta_zmq.learning.step_metrics import Mismatch, MismatchStatistics
from peralta_zmq.observe.event_log import LIMITS
from peralta_zmq.observe.metrics import EVENTS, read_rows
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.trainer import generator_registry
from peralta_zmq.trainer.generator_registry import (
    GeneratorRegistry,
    RegistryLimits,
    report_mismatches,
)
from peralta_zmq.trainer.session import ProgressAnnouncer, Session, StopSignal
from peralta_zmq.wire.rollout_sockets import ready

pytestmark = pytest.mark.timeout(20)
STATUS = wire.GeneratorStatus(
    RUN,
    "ann",
    INCARNATION,
    step=4,
    tokens_per_s=100.0,
    blocked_frac=0.5,
    queue_frac=0.25,
    reload_s=1.0,
)
MAX_STARTS = RegistryLimits().max_starts
TRAINER_INFO = {"python": "3.11.7", "torch": "2.13.0"}
INFO = {"python": "3.10.12", "torch": "2.13.0", "device": "cpu", "mood": "good"}


def opened(
    stack: ExitStack, folder: Path, receiver: wire.GeneratorStatusReceiver | None = None
) -> GeneratorRegistry:
    """A registry without generators; its run log prints to the current stdout."""
    receiver = receiver or opened_receiver(stack)
    run_log = stack.enter_context(RunLog(folder, run="run", max_steps=9))
    return GeneratorRegistry(receiver, run_log, TRAINER_INFO)


def opened_receiver(stack: ExitStack) -> wire.GeneratorStatusReceiver:
    return stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)))


@pytest.fixture
def receiver(stack: ExitStack) -> wire.GeneratorStatusReceiver:
    """The socket of `empty` and `registry`."""
    return opened_receiver(stack)


@pytest.fixture
def sender(receiver: wire.GeneratorStatusReceiver, stack: ExitStack) -> wire.GeneratorStatusSender:
    """A socket that is connected to `receiver`."""
    return stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))


@pytest.fixture
def empty(
    tmp_path: Path, stack: ExitStack, receiver: wire.GeneratorStatusReceiver
) -> GeneratorRegistry:
    """A registry without generators."""
    return opened(stack, tmp_path, receiver)


@pytest.fixture
def registry(
    empty: GeneratorRegistry, receiver: wire.GeneratorStatusReceiver
) -> Iterator[GeneratorRegistry]:
    """A registry that has received a status of ann."""
    with closing(wire.GeneratorStatusSender(receiver.address)) as ann:

        def received() -> bool:
            ann.send(STATUS)
            empty.receive_status(step=1)
            return bool(empty.live)

        eventually(received)
        yield empty


def status_of(sender_id: str, **fields: Any) -> wire.GeneratorStatus:
    """A status of the sender NAME/INCARNATION."""
    name, _, incarnation = sender_id.partition("/")
    return wire.GeneratorStatus(RUN, name, bytes.fromhex(incarnation), **fields)


def live(registry: GeneratorRegistry) -> list[str]:
    registry.remove_silent()
    return [sender.id for sender in registry.live]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A monotonic clock that tests advance."""
    now = [100.0]
    monkeypatch.setattr(generator_registry.time, "monotonic", lambda: now[0])
    return now


def test_statuses_of_invented_names_do_not_displace_live_senders(
    registry: GeneratorRegistry, tmp_path: Path
) -> None:
    registry.limits = RegistryLimits(max_live=3)
    known, *_ = live(registry)
    for number in range(10):
        registry.add_status(status_of(f"stranger-{number}/{'0' * 16}"), step=1)
    assert live(registry) == [known, *(f"stranger-{number}/{'0' * 16}" for number in range(2))]
    joins = [row["generator"] for row in read_rows(tmp_path / EVENTS) if row["event"] == "join"]
    assert joins == ["ann", "stranger-0", "stranger-1"]


def test_first_group_replaces_an_invented_sender_at_the_limit(registry: GeneratorRegistry) -> None:
    registry.limits = RegistryLimits(max_live=3)
    ann, *_ = live(registry)
    registry.add_group(ann, step=1)
    first, second = (f"stranger-{number}/{'0' * 16}" for number in range(2))
    for stranger in (first, second):
        assert registry.add_status(status_of(stranger), step=1)
    bob, carl, dan = (f"{name}/{'0' * 16}" for name in ("bob", "carl", "dan"))
    assert not registry.add_status(status_of(bob), step=1)
    registry.add_group(bob, step=1)
    assert live(registry) == [ann, second, bob]
    registry.add_group(carl, step=1)
    assert live(registry) == [ann, bob, carl]
    # Now all others have sent a group.
    assert registry.add_status(status_of(ann), step=1)
    registry.add_group(dan, step=1)
    assert {*live(registry)} == {ann, carl, dan}


def test_starts_of_one_name_are_bounded(registry: GeneratorRegistry, tmp_path: Path) -> None:
    ann, *_ = live(registry)
    for number in range(1000):
        registry.add_group(f"bob/{number:016x}", step=1)
    newest = [f"bob/{number:016x}" for number in range(1000 - MAX_STARTS, 1000)]
    assert live(registry) == [ann, *newest]
    rows = read_rows(tmp_path / EVENTS)
    assert len(rows) <= 1 + LIMITS["join"] + LIMITS["leave"]
    assert not registry.add_status(status_of(f"bob/{1000:016x}"), step=1)
    registry.receive_status(step=1)
    registry.limits = RegistryLimits(live_seconds=0.0)
    assert live(registry) == []
    assert registry.add_status(status_of(f"bob/{1000:016x}"), step=1)  # the others have left


def test_start_with_a_group_replaces_one_without(registry: GeneratorRegistry) -> None:
    for number in range(MAX_STARTS):
        assert registry.add_status(status_of(f"bob/{number:016x}"), step=1)
    assert not registry.add_status(status_of(f"bob/{100:016x}"), step=1)
    registry.add_group(f"bob/{100:016x}", step=1)
    ann, *starts = live(registry)
    assert starts == [f"bob/{number:016x}" for number in [*range(1, 16), 100]]
    for number in range(200, 215):  # the start that has sent a group stays
        registry.add_group(f"bob/{number:016x}", step=1)
    assert live(registry) == [ann, *(f"bob/{n:016x}" for n in [100, *range(200, 215)])]
    registry.add_group(f"bob/{300:016x}", step=1)  # only the least recently active is left
    assert live(registry) == [ann, *(f"bob/{n:016x}" for n in [*range(200, 215), 300])]


def test_refusal_of_a_status_takes_no_longer_with_many_senders(
    stack: ExitStack, tmp_path: Path
) -> None:
    def seconds_with(num_senders: int) -> float:
        folder = tmp_path / str(num_senders)
        folder.mkdir()
        registry = opened(stack, folder)
        for number in range(num_senders):
            assert registry.add_status(status_of(f"g{number}/00"), step=1)
        for number in range(MAX_STARTS):
            assert registry.add_status(status_of(f"bob/{number:016x}"), step=1)
        started = time.process_time()
        for number in range(1000, 3000):
            assert not registry.add_status(status_of(f"bob/{number:016x}"), step=1)
        return time.process_time() - started

    # 20 senders take some milliseconds; a search of 4,000 would take more than 100 times as long.
    assert seconds_with(4000) < 10 * seconds_with(20) + 0.1


@pytest.mark.usefixtures("clock")
def test_keyframe_requests_are_honoured_at_most_every_30_seconds(
    empty: GeneratorRegistry, clock: list[float]
) -> None:
    """A client alternates its flag, so that each second status is a request."""
    taken = list[int]()
    for second in range(80):
        status = replace(STATUS, wants_keyframe=second % 2 == 0)
        empty.add_status(status, step=1)
        if empty.keyframe_due and empty.take_keyframe_request():
            taken.append(second)
        assert not empty.take_keyframe_request()
        clock[0] += 1.0
    assert taken == [0, 30, 60]


def test_store_error_of_a_generator_is_recorded_when_it_changes(
    capsys: pytest.CaptureFixture[str], stack: ExitStack, tmp_path: Path
) -> None:
    registry = opened(stack, tmp_path)
    for reason in ("denied", "denied", "", ""):
        registry.add_status(replace(STATUS, store_error=reason), step=1)
    rows = [row for row in read_rows(tmp_path / EVENTS) if row["event"] == "store_error"]
    assert [(row["generator"], row["reason"]) for row in rows] == [("ann", "denied"), ("ann", "")]
    assert capsys.readouterr().out.count("generator ann cannot read the weights: denied") == 1


def test_final_statuses_of_invented_starts_are_bounded(registry: GeneratorRegistry) -> None:
    registry.limits = RegistryLimits(max_final_statuses=3)
    for number in range(10):
        registry.add_status(status_of(f"bob/{number:016x}", made=1, last=True), step=1)
    assert list(registry.num_made) == [f"bob/{number:016x}" for number in range(3)]


@pytest.mark.parametrize(
    ("of_groups", "step"), [({}, 4), ({"gen/ann/step": 3}, 4), ({"gen/ann/step": 6}, 6)]
)
def test_metrics_have_the_statistics_and_the_newest_step(
    registry: GeneratorRegistry, of_groups: dict[str, float], step: int
) -> None:
    assert registry.metrics(of_groups) == {
        "gen/ann/tokens_per_s": 100.0, "gen/ann/blocked_frac": 0.5, "gen/ann/queue_frac": 0.25,
        "gen/ann/reload_s": 1.0, "gen/ann/step": step, "gen/ann/unscored": 0, "gen/ann/aborted": 0,
        "gen/ann/resumed": 0,
        "gen/ann/branched": 0,
    }  # fmt: skip


def test_metrics_are_bounded_and_prefer_senders_of_groups(empty: GeneratorRegistry) -> None:
    empty.limits = RegistryLimits(max_in_metrics=2)
    for name in ("ann", "bob", "carl"):
        status = replace(STATUS, generator_id=name)
        empty.add_status(status, step=1)
    empty.add_group(replace(STATUS, generator_id="carl").sender, step=1)  # for a group
    names = {name.split("/")[1] for name in empty.metrics({})}
    assert names == {"carl", "ann"}


def has_left(registry: GeneratorRegistry, sender: str) -> bool:
    registry.receive_status(step=2, timeout=0.02)  # a repeated status may still be in the queue
    return sender not in live(registry)


def test_silent_sender_leaves_once_after_the_trainer_received(
    registry: GeneratorRegistry, tmp_path: Path
) -> None:
    registry.limits = RegistryLimits(live_seconds=0.2)
    time.sleep(0.2)
    (ann,) = live(registry)  # nothing was received meanwhile: no silence of the sender
    eventually(lambda: has_left(registry, ann))
    assert live(registry) == []
    rows = read_rows(tmp_path / EVENTS)
    assert [row["event"] for row in rows] == ["join", "leave"]
    assert (rows[1]["generator"], rows[1]["incarnation"]) == ("ann", INCARNATION.hex())
    assert abs(float(str(rows[1]["time"])) - time.time()) < 20


def test_sender_with_an_unread_status_has_not_left(
    registry: GeneratorRegistry,
    receiver: wire.GeneratorStatusReceiver,
    sender: wire.GeneratorStatusSender,
) -> None:
    ann, *_ = live(registry)

    def queued() -> bool:
        sender.send(replace(STATUS, generator_id="bob"))
        return ready(receiver.socket, zmq.POLLIN, 0.05)

    eventually(queued)
    receiver.max_at_once = 1  # part of the queue stays
    registry.limits = RegistryLimits(live_seconds=0.2)
    time.sleep(0.2)
    registry.receive_status(step=2)
    assert ann in live(registry)
    eventually(lambda: has_left(registry, ann))


def test_final_statuses_are_awaited_until_the_timeout(
    empty: GeneratorRegistry,
    receiver: wire.GeneratorStatusReceiver,
    sender: wire.GeneratorStatusSender,
) -> None:
    empty.add_group(f"ann/{INCARNATION.hex()}", step=1)

    def queued() -> bool:
        sender.send(replace(STATUS, made=6))
        return bool(receiver.socket.poll(10))

    eventually(queued)  # a status from before the end: not the final one
    empty.limits = RegistryLimits(final_status_seconds=15.0)
    late = threading.Timer(0.3, sender.send, [replace(STATUS, made=7, last=True)])
    late.start()
    empty.wait_for_final_statuses(step=2)
    assert empty.num_made == {f"ann/{INCARNATION.hex()}": 7}
    empty.add_group("bob/00", step=2)
    empty.limits = RegistryLimits(final_status_seconds=0.6)
    started = time.monotonic()
    empty.wait_for_final_statuses(step=2)  # bob sends none
    assert 0.5 < time.monotonic() - started < 30


def test_worker_info_after_the_first_group_is_recorded_once(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = opened(stack, tmp_path)
    empty.add_group("ann/00", step=1)
    assert "generator ann" not in capsys.readouterr().out
    for _ in range(2):
        empty.add_status(status_of("ann/00", worker_info=INFO), step=1)
    rows = read_rows(tmp_path / EVENTS)
    recorded = [(row["event"], row.get("worker_info")) for row in rows]
    assert recorded == [("join", None), ("worker_info", INFO)]
    printed = capsys.readouterr().out
    assert printed.count("generator ann: cpu; python 3.10.12 (trainer: 3.11.7)") == 1


def test_flood_of_starts_is_bounded_on_disk_and_terminal(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = opened(stack, tmp_path)
    info = {f"{number}": '"' * 128 for number in range(16)}
    for number in range(3000):
        status = status_of(f"ann/{number:016x}", worker_info=info, made=1, last=True)
        empty.add_status(status, step=1)
    assert (tmp_path / EVENTS).stat().st_size < 100_000
    assert len(capsys.readouterr().out.splitlines()) < 30
    stack.close()
    rows = read_rows(tmp_path / EVENTS)
    num_joins = sum(int(str(row.get("count", 1))) for row in rows if row["event"] == "join")
    assert num_joins == MAX_STARTS


def test_second_generator_of_a_name_is_reported_with_the_remedy(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = opened(stack, tmp_path)
    empty.add_group("ann/00", step=1)
    empty.add_group("bob/00", step=1)
    assert "two generators" not in capsys.readouterr().out
    empty.add_group("ann/01", step=1)
    text = "two generators are called ann; if both run, start one with another --generator.name\n"
    assert capsys.readouterr().out == text
    assert [row["event"] for row in read_rows(tmp_path / EVENTS)] == ["join"] * 3


def silent_events(folder: Path) -> list[object]:
    return [row["connection"] for row in read_rows(folder / EVENTS) if row["event"] == "silent"]


def without_status(registry: GeneratorRegistry) -> dict[str, int]:
    """By live sender: seconds without a status, if they are many."""
    seconds = {sender.id: registry.without_status(sender) for sender in registry.live}
    return {sender: number for sender, number in seconds.items() if number}


def test_groups_without_a_status_for_long_are_reported_once(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    empty, lists = opened(stack, tmp_path), list[dict[str, int]]()
    bob = replace(STATUS, generator_id="bob")
    for _ in range(4):  # groups at 5, 10, 15 and 20 s; only bob sends statuses, too
        lists.append(without_status(empty))
        clock[0] += 5.0
        for sender in (STATUS.sender, bob.sender):
            empty.add_group(sender, step=1)
        empty.add_status(bob, step=1)
    assert lists == [{}, {}, {}, {STATUS.sender: 10}]
    assert without_status(empty) == {STATUS.sender: 15}
    text = (
        "generator ann: no status for 10 s while its other connections work; "
        "the generator reconnects\n"
    )
    assert capsys.readouterr().out.count(text) == 1 and silent_events(tmp_path) == ["status"]
    empty.add_status(STATUS, step=1)
    assert without_status(empty) == {}


def let_leave(registry: GeneratorRegistry, clock: list[float], *, seconds: float) -> None:
    """Let all senders be silent for some seconds, and leave."""
    clock[0] += seconds
    registry.receive_status(step=1)
    assert live(registry) == []


def test_bursts_of_groups_without_a_status_are_reported(
    empty: GeneratorRegistry, tmp_path: Path, clock: list[float]
) -> None:
    """The sender leaves between two bursts, which are a minute apart."""
    lists = list[dict[str, int]]()
    for _ in range(5):
        for _ in range(3):
            empty.add_group(STATUS.sender, step=1)
            clock[0] += 0.25
        lists.append(without_status(empty))
        let_leave(empty, clock, seconds=59.25)
    # From burst to burst at most 5 s count: the generator itself may have been away.
    assert lists == [{}, {}, *({STATUS.sender: seconds} for seconds in (11, 17, 22))]
    assert set(silent_events(tmp_path)) == {"status"}
    empty.add_status(STATUS, step=1)
    empty.add_group(STATUS.sender, step=1)
    assert without_status(empty) == {}


def test_group_of_a_sender_that_was_away_once_is_not_reported(
    empty: GeneratorRegistry, tmp_path: Path, clock: list[float]
) -> None:
    empty.add_group(STATUS.sender, step=1)
    let_leave(empty, clock, seconds=3600.0)  # for instance asleep
    empty.add_group(STATUS.sender, step=1)
    assert without_status(empty) == {} and silent_events(tmp_path) == []


def test_groups_without_a_status_of_past_senders_are_bounded(
    empty: GeneratorRegistry, clock: list[float]
) -> None:
    empty.limits = RegistryLimits(max_live=3)
    for number in range(10):
        empty.add_group(f"stranger-{number}/00", step=1)
    let_leave(empty, clock, seconds=60.0)
    for _ in range(2):  # the first one is forgotten, the last one is not
        for number in (0, 9):
            empty.add_group(f"stranger-{number}/00", step=1)
        clock[0] += 5.0
    assert without_status(empty) == {"stranger-9/00": 10}


def test_silent_connections_in_a_status_are_reported(
    registry: GeneratorRegistry, sender: wire.GeneratorStatusSender, tmp_path: Path
) -> None:
    later = replace(STATUS, announcement_reconnects=1)

    def reported() -> list[object]:
        sender.send(later)
        registry.receive_status(step=1, timeout=0.1)
        return silent_events(tmp_path)

    assert eventually(reported) == ["announcements"]
    later = replace(later, announcement_reconnects=2, rollout_reconnects=1)
    eventually(lambda: len(reported()) > 1)
    assert silent_events(tmp_path) == ["announcements", "rollouts"]  # each at most once a minute


def test_mismatch_is_printed_as_often_as_it_is_recorded(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log = stack.enter_context(RunLog(tmp_path, run="run", max_steps=9))
    config = load_config("bin/trainer", [])
    announcer = ProgressAnnouncer(cast(Any, None), wire.Announcement(RUN))
    address_file = wire.AddressFile(None, "localhost", 1, RUN)
    session = Session(config, RUN, run_log, announcer, address_file, StopSignal())
    senders = [f"ann/{number:016x}" for number in range(3 * LIMITS["mismatch"])]
    statistics = MismatchStatistics(bound=0.1)
    for _ in range(statistics.window):
        statistics.record(dict.fromkeys(senders, Mismatch(3.0, 10.0)))
    report_mismatches(statistics, session, step=2)
    assert capsys.readouterr().out.count("generator ann differ") == LIMITS["mismatch"]
