"""Each attack sends what its name says; one of them is measured on a real run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from generators import publish
from sample_data import RUN
from sockets import drained, receiver_at, until

from peralta_zmq import wire
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore
from tools import attacks
from tools.attack_costs import ANYONE, Cost, measure
from tools.attacks import Client, Target
from tools.link_proxy import free_ports


@pytest.fixture
def client(tmp_path: Path, stack: ExitStack) -> Client:
    target = Target(RUN, free_ports(), page=free_ports(), step=7, weights=tmp_path / "weights")
    return Client(target, None, stack)


def address(client: Client, port: int) -> str:
    return f"tcp://127.0.0.1:{client.target.port + port}"


def test_new_incarnations_arrive_under_new_names(client: Client, stack: ExitStack) -> None:
    opened = wire.GeneratorStatusReceiver(address(client, attacks.STATUSES), run_id=RUN)
    receiver = stack.enter_context(closing(opened))
    pool = stack.enter_context(ThreadPoolExecutor(1))  # the receiver subscribes when it is called
    sent = pool.submit(attacks.new_incarnations, client, 50)
    names = set[str]()
    for _ in until():
        names |= {each.generator_id for each in receiver.receive(timeout=0.1).values()}
        if len(names) == 50:
            break
    assert len(names) == sent.result() == 50


def test_long_statuses_are_valid(client: Client, stack: ExitStack) -> None:
    opened = wire.GeneratorStatusReceiver(address(client, attacks.STATUSES), run_id=RUN)
    receiver = stack.enter_context(closing(opened))
    pool = stack.enter_context(ThreadPoolExecutor(1))  # the receiver subscribes when it is called
    sent = pool.submit(attacks.long_statuses, client, 1)
    received = next(filter(None, (receiver.receive(timeout=0.1) for _ in until())))
    assert sent.result() == 1
    assert [len(status.worker_info) for status in received.values()] == [16]


def test_statuses_are_not_sent_without_a_trainer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "STUCK_SECONDS", 0.1)
    assert attacks.long_statuses(client, 50) == 0


def test_stale_groups_are_valid_and_of_one_sender(client: Client, stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at(address(client, attacks.ROLLOUTS))))
    assert attacks.stale_groups(client, 20) == 20
    groups = drained(receiver)
    assert [group.sequence for group in groups] == list(range(20))
    assert len({group.sender for group in groups}) == 1 and not receiver.refused


def test_groups_of_new_incarnations_are_valid(client: Client, stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at(address(client, attacks.ROLLOUTS))))
    assert attacks.stale_groups_of_new_incarnations(client, 20) == 20
    groups = drained(receiver)
    assert len({group.generator_id for group in groups}) == 20 and not receiver.refused
    assert {group.sequence for group in groups} == {0}


def test_message_of_many_frames_is_refused_once(client: Client, stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at(address(client, attacks.ROLLOUTS))))
    assert attacks.many_frames(client, 20) == 20
    for _ in until():
        if receiver.receive(timeout=0.1) is None and receiver.refused:
            break
    assert sum(receiver.refused.values()) == 1


def test_keyframe_requests_are_valid(client: Client, stack: ExitStack) -> None:
    opened = wire.GeneratorStatusReceiver(address(client, attacks.STATUSES), run_id=RUN)
    receiver = stack.enter_context(closing(opened))
    pool = stack.enter_context(ThreadPoolExecutor(1))  # the receiver subscribes when it is called
    sent = pool.submit(attacks.keyframe_requests, client, 1)
    received = next(filter(None, (receiver.receive(timeout=0.1) for _ in until())))
    assert sent.result() == 1 and [each.wants_keyframe for each in received.values()] == [True]


def test_large_messages_are_sent_to_three_ports(client: Client, stack: ExitStack) -> None:
    stack.enter_context(closing(receiver_at(address(client, attacks.ROLLOUTS))))
    opened = wire.AnnouncementPublisher(address(client, attacks.ANNOUNCEMENTS))
    publisher = stack.enter_context(closing(opened))
    statuses = wire.GeneratorStatusReceiver(address(client, attacks.STATUSES), run_id=RUN)
    stack.enter_context(closing(statuses))
    pool = stack.enter_context(ThreadPoolExecutor(1))
    sent = pool.submit(attacks.large_messages, client, 3)
    while not sent.done():  # the test has a timeout
        statuses.receive(timeout=0.1)  # subscribes
        publisher.publish(wire.Announcement(RUN))
    assert sent.result() == 3


def test_idle_connections_are_accepted(client: Client, stack: ExitStack) -> None:
    stack.enter_context(closing(receiver_at(address(client, attacks.ROLLOUTS))))
    assert attacks.idle_connections(client, 8) == 8


def test_forged_version_is_loaded_with_its_large_file(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "LOAD_SECONDS", 0.0)
    store = WeightStore.open(client.target.weights)
    store.claim(RUN)
    published = publish(store, 1, 0.5)
    assert attacks.version_with_large_file(client, 3 << 20) == 3 << 20
    forged = store.newest()
    assert forged is not None and forged.number == published.number + 100
    assert LocalReplica(tmp_path / "copy").advance(store, forged) > 3 << 20
    assert (tmp_path / "copy" / "large").stat().st_size == 3 << 20


def test_cell_has_memory_disk_and_speed() -> None:
    assert Cost(9, 612e6, -3e6, 4.4e6, 0.97).cell == "612 / 0 MB, 4 MB, 97%"
    assert Cost(9, 9e9, 0, 0, 0, end="killed at 6 GiB").cell == "killed at 6 GiB"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_attack_on_a_real_run_is_measured() -> None:
    cost = measure([(attacks.new_incarnations, 100)], ANYONE)
    assert cost.sent == 100 and not cost.end and cost.speed > 0 and cost.peak >= cost.kept
