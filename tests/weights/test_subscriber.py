"""Generators find versions by listing, event or announcement, and survive faults of the store."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip_bit, remove, truncate
from real_programs import until
from weight_sets import COMPANIONS, publish, publish_chain, same, weights_at

from peralta_zmq.weights.backends import FolderWatcher
from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.store import DELTA_FILE, WEIGHTS_FILE, Version, WeightStore
from peralta_zmq.weights.subscriber import PendingWeights, WeightSubscriber
from peralta_zmq.weights.tensor_set import CHUNK, check_finite

NEVER = 1e9  # seconds
DEADLINE = 20.0
Opener = Callable[..., WeightSubscriber]


@pytest.fixture
def subscribe(store: WeightStore, tmp_path: Path) -> Iterator[Opener]:
    """Opens subscribers of the store, closed after the test."""
    opened: list[WeightSubscriber] = []

    def open_one(**options: Any) -> WeightSubscriber:
        source = WeightStore.open(store.folder)
        options = {"poll_seconds": 0.05, **options}
        opened.append(WeightSubscriber(source, tmp_path / "copy", **options))
        return opened[-1]

    yield open_one
    for subscriber in opened:
        subscriber.close()


def pending(subscriber: WeightSubscriber) -> PendingWeights:
    weights = subscriber.poll(timeout=DEADLINE)
    assert weights is not None
    return weights


def accepted(subscriber: WeightSubscriber) -> Version:
    """Poll a version, compare its bits and accept it."""
    weights = pending(subscriber)
    assert same(weights.tensors, weights_at(weights.version.step))
    subscriber.accept()
    return weights.version


def accepts(subscriber: WeightSubscriber, version: Version) -> bool:
    return accepted(subscriber).weights_id == version.weights_id


def test_unreadable_store_is_logged_once_and_reported_until_it_is_back(
    store: WeightStore, subscribe: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    subscriber = subscribe()
    assert accepts(subscriber, publish(store, 0))
    store.folder.rename(away := store.folder.with_name("away"))
    store.folder.touch()
    until(lambda: "Not a directory" in subscriber.store_error)
    store.folder.unlink()
    until(lambda: "has no weights any more; is it mounted?" in subscriber.store_error)
    away.rename(store.folder)
    until(lambda: subscriber.store_error == "")
    assert sum("Not a directory" in message for message in caplog.messages) == 1


# Finding versions.


@pytest.mark.parametrize("by_event", [False, True])
def test_listing_or_folder_event_alone_finds_a_version(
    store: WeightStore, subscribe: Opener, by_event: bool
) -> None:
    first = publish(store, 0)
    subscriber = subscribe(
        poll_seconds=NEVER if by_event else 0.1, watch=store.folder if by_event else None
    )
    assert accepts(subscriber, first)
    assert accepts(subscriber, publish(store, 1, base=first))


def test_event_alone_finds_a_folder_that_did_not_exist(
    store: WeightStore, subscribe: Opener, tmp_path: Path
) -> None:
    store.folder.rename(tmp_path / "away")
    subscriber = subscribe(poll_seconds=NEVER, first_poll_seconds=NEVER, watch=store.folder)
    assert subscriber.poll(timeout=0.5) is None  # it watches the folder above
    (tmp_path / "away").rename(store.folder)
    assert accepts(subscriber, publish(store, 0))


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit("broken")])
def test_exception_in_the_thread_is_raised_by_poll(
    store: WeightStore, subscribe: Opener, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(WeightSubscriber, "_load", fail)
    subscriber = subscribe()
    with pytest.raises(type(error), match="broken"):
        subscriber.poll(timeout=DEADLINE)


def test_announcement_alone_finds_the_version_with_its_id(
    store: WeightStore, subscribe: Opener
) -> None:
    version = publish(store, 0)
    subscriber = subscribe(poll_seconds=NEVER)
    assert accepts(subscriber, version)
    for number in range(1, 10):
        version = publish(store, number, base=version)
        if subscriber.poll(timeout=0.3) is None:
            break
        subscriber.accept()  # the thread was still looking for a version newer than the last one
    else:
        pytest.fail("versions are found without an announcement")
    subscriber.notify(version.number, "0" * 16)
    assert subscriber.poll(timeout=0.3) is None
    subscriber.notify(version.number, version.weights_id)
    assert accepts(subscriber, version)


def test_newest_version_replaces_offers_that_were_not_polled(
    store: WeightStore, subscribe: Opener
) -> None:
    subscriber = subscribe()
    versions = publish_chain(store, 6)
    while (weights := pending(subscriber)).version.number < 5:
        subscriber.accept()
    assert weights.version == versions[5]


def test_versions_of_a_new_run_are_newer_whatever_their_number(
    store: WeightStore, subscribe: Opener
) -> None:
    subscriber = subscribe()
    assert accepts(subscriber, publish(store, 7))
    shutil.rmtree(store.folder)
    new_store = WeightStore.open(store.folder)
    new_store.claim("run-2")
    version = publish(new_store, 1)
    assert accepted(subscriber).run_id == version.run_id == "run-2"


# The local copy.


def test_copy_does_not_change_between_poll_and_accept(
    store: WeightStore, subscribe: Opener
) -> None:
    first = publish(store, 0)
    subscriber = subscribe()
    weights = pending(subscriber)
    second = publish(store, 1, base=first)
    assert subscriber.poll(timeout=0.5) is weights
    assert same(weights.tensors, weights_at(0))
    subscriber.accept()
    assert accepts(subscriber, second)


def test_restart_reads_nothing_that_is_in_the_copy(store: WeightStore, subscribe: Opener) -> None:
    versions = publish_chain(store, 2)
    with closing(subscribe()) as subscriber:
        assert accepts(subscriber, versions[1])
    weights = pending(subscribe())
    assert (weights.version.weights_id, weights.bytes_read) == (versions[1].weights_id, 0)


def test_restart_without_a_store_offers_the_last_copy(
    store: WeightStore, subscribe: Opener, tmp_path: Path
) -> None:
    versions = publish_chain(store, 2)
    with closing(subscribe()) as subscriber:
        assert accepts(subscriber, versions[1])
    store.folder.rename(tmp_path / "away")
    subscriber = subscribe(offline_seconds=0.2)
    assert accepts(subscriber, versions[1])
    (tmp_path / "away").rename(store.folder)
    assert accepts(subscriber, publish(store, 2, base=versions[1]))


def test_copy_of_another_process_is_not_touched(store: WeightStore, subscribe: Opener) -> None:
    first = publish(store, 0)
    assert accepts(subscribe(), first)
    weights = pending(subscribe())
    assert weights.version == first
    assert weights.folder.name.startswith("peralta-")


def test_close_does_not_wait_for_accept(store: WeightStore, subscribe: Opener) -> None:
    first = publish(store, 0)
    with closing(subscribe()) as subscriber:
        pending(subscriber)
        publish(store, 1, base=first)  # the thread waits for accept
    assert not [each for each in threading.enumerate() if each.name == "weight-subscriber"]


# Rejected weights.


def test_rejected_version_is_not_offered_again(store: WeightStore, subscribe: Opener) -> None:
    subscriber = subscribe()
    first = publish(store, 0)
    assert accepts(subscriber, first)
    publish(store, 1, base=first)
    subscriber.reject(pending(subscriber).version)
    assert subscriber.poll(timeout=0.3) is None
    assert accepts(subscriber, publish(store, 2))


def test_rejecting_the_accepted_version_offers_the_one_before(
    store: WeightStore, subscribe: Opener
) -> None:
    first = publish(store, 0)
    second = publish(store, 1)
    subscriber = subscribe()
    newest = accepted(subscriber)
    assert newest.number == second.number
    subscriber.reject(newest)
    assert accepts(subscriber, first)


def test_rejecting_the_accepted_version_keeps_the_polled_one(
    store: WeightStore, subscribe: Opener
) -> None:
    subscriber = subscribe()
    publish(store, 0)
    first = accepted(subscriber)
    second = publish(store, 1)
    weights = pending(subscriber)
    subscriber.reject(first)
    assert subscriber.poll() is weights
    assert weights.version.weights_id == second.weights_id


def publish_nan(store: WeightStore, step: int) -> None:
    weights = weights_at(step)
    weights["few"][1] = torch.nan
    store.publish(step, weights, companions=COMPANIONS)


@pytest.mark.parametrize("fault", ["not finite", "another model"])
def test_weights_that_cannot_be_used_are_not_offered(
    store: WeightStore, subscribe: Opener, fault: str
) -> None:
    subscriber = subscribe()
    assert accepts(subscriber, publish(store, 0))
    if fault == "not finite":
        publish_nan(store, 1)
    else:
        store.publish(1, {"other": torch.zeros(3).bfloat16()}, companions=COMPANIONS)
    assert subscriber.poll(timeout=0.5) is None
    assert accepts(subscriber, publish(store, 2))


def test_copy_that_is_not_finite_is_not_offered_after_a_restart(
    store: WeightStore,
    subscribe: Opener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish_nan(store, 1)
    for _ in range(2):
        caplog.clear()
        with closing(subscribe(offline_seconds=0.2)) as subscriber:
            until(lambda one=subscriber: one.poll(timeout=0.1) or "not finite" in caplog.text)
            assert subscriber.poll(timeout=0.3) is None
        if store.folder.exists():
            store.folder.rename(store.folder.with_name("away"))
    assert "serving version" not in caplog.text


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("index", [0, CHUNK, -1])  # in the first and the second piece, at the end
def test_check_finite_finds_one_element(value: float, index: int) -> None:
    weights = {"large": torch.full((4,), 3e38), "other": torch.zeros(CHUNK + 3).bfloat16()}
    check_finite(weights)  # the sum overflows, the elements are finite
    weights["other"][index] = value
    with pytest.raises(ValueError, match="other is not finite"):
        check_finite(weights)


# Faults of the store.


@pytest.mark.parametrize("name", [DELTA_FILE, "manifest.json", "STABLE"])
@pytest.mark.parametrize("damage", [truncate, remove, flip_bit])
def test_damaged_version_is_skipped_until_a_keyframe_repairs(
    store: WeightStore, subscribe: Opener, damage: Callable[[Path], None], name: str
) -> None:
    damage(publish_chain(store, 2)[1].folder / name)
    subscriber = subscribe()
    until(lambda: subscriber.poll(timeout=0.1) or subscriber.wants_keyframe)
    if weights := subscriber.poll():
        assert weights.version.number == 0
        subscriber.accept()
    assert accepts(subscriber, publish(store, 2))


@pytest.mark.parametrize("name", [WEIGHTS_FILE, "STABLE"])
def test_unreadable_version_is_read_when_it_becomes_readable(
    store: WeightStore, subscribe: Opener, tmp_path: Path, name: str
) -> None:
    version = publish(store, 0)
    shutil.move(version.folder / name, tmp_path / "hidden")
    subscriber = subscribe()
    assert subscriber.poll(timeout=0.5) is None
    shutil.move(tmp_path / "hidden", version.folder / name)
    assert accepts(subscriber, version)


@pytest.mark.parametrize("mount_point_stays", [False, True])
def test_vanished_mount_is_read_again_when_it_returns(
    store: WeightStore, subscribe: Opener, tmp_path: Path, mount_point_stays: bool
) -> None:
    subscriber = subscribe(watch=store.folder)
    first = publish(store, 0)
    assert accepts(subscriber, first)
    store.folder.rename(tmp_path / "away")
    if mount_point_stays:
        store.folder.mkdir()
    assert subscriber.poll(timeout=0.5) is None
    assert not subscriber.wants_keyframe
    if mount_point_stays:
        assert list(store.folder.iterdir()) == []
        store.folder.rmdir()
    assert not store.folder.exists()
    (tmp_path / "away").rename(store.folder)
    assert accepts(subscriber, publish(store, 1, base=first))


def test_folder_that_vanishes_before_it_is_watched_is_watched_later(
    store: WeightStore, subscribe: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_attempts = 0

    def watch(folder: Path, *arguments: Any, **options: Any) -> FolderWatcher:
        nonlocal num_attempts
        if not num_attempts:
            store.folder.rename(tmp_path / "away")
        num_attempts += 1
        return FolderWatcher(folder, *arguments, **options)

    monkeypatch.setattr("peralta_zmq.weights.subscriber.FolderWatcher", watch)
    first = publish(store, 0)
    subscriber = subscribe(watch=store.folder)
    assert subscriber.poll(timeout=0.5) is None
    (tmp_path / "away").rename(store.folder)
    assert accepts(subscriber, first)
    assert num_attempts > 1


def test_folder_that_vanishes_repeatedly_is_followed(
    store: WeightStore, subscribe: Opener, tmp_path: Path
) -> None:
    subscriber = subscribe(watch=store.folder, poll_seconds=0.001)
    pruner = Pruner(store, Retention(last=3))
    base, current = publish(store, 0), -1
    for step in range(1, 60):
        base = publish(store, step, base=base if step % 4 else None, pruner=pruner)
        for _ in range(5):
            store.folder.rename(tmp_path / "away")
            if weights := subscriber.poll(timeout=0.001 * (step % 3)):
                current = weights.version.step
                subscriber.accept()
            (tmp_path / "away").rename(store.folder)
    while current != 59:
        current = accepted(subscriber).step


def test_broken_chain_wants_a_keyframe_until_one_arrives(
    store: WeightStore, subscribe: Opener
) -> None:
    shutil.rmtree(publish_chain(store, 4)[2].folder)
    subscriber = subscribe()
    while not subscriber.wants_keyframe:
        assert subscriber.poll(timeout=0.1) is None
    assert accepts(subscriber, publish(store, 4))
    assert not subscriber.wants_keyframe
