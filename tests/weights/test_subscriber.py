"""A generator finds each new version by any of three ways, and keeps the old one through faults."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from field import until
from weight_sets import COMPANIONS, chain_of, publish, same, weights_at

from peralta_zmq.weights.backends import FolderWatcher
from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import PendingWeights, WeightSubscriber
from peralta_zmq.weights.tensors import CHUNK, check_finite
from peralta_zmq.weights.version import DELTA, WEIGHTS, Version

NEVER = 1e9
DEADLINE = 20.0
Opener = Callable[..., WeightSubscriber]


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    opened = WeightStore.open(tmp_path / "weights")
    opened.claim("run-1")
    return opened


@pytest.fixture
def follow(store: WeightStore, tmp_path: Path) -> Iterator[Opener]:
    """Open followers of the store that are closed in the end."""
    opened: list[WeightSubscriber] = []

    def open_one(**options: Any) -> WeightSubscriber:
        place = WeightStore.open(store.folder)
        chosen = {"poll_seconds": 0.05, **options}
        opened.append(WeightSubscriber(place, tmp_path / "copy", **chosen))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def taken(follower: WeightSubscriber) -> PendingWeights:
    staged = follower.poll(timeout=DEADLINE)
    assert staged is not None
    return staged


def served(follower: WeightSubscriber) -> Version:
    """Take what is ready, and settle it, after a look at every bit."""
    staged = taken(follower)
    assert same(staged.tensors, weights_at(staged.version.step))
    follower.accept()
    return staged.version


def test_listing_alone_finds_a_version(store: WeightStore, follow: Opener) -> None:
    first = publish(store, 0)
    follower = follow(poll_seconds=0.1)
    assert served(follower) == first
    assert served_after(follower, publish(store, 1, base=first))


def test_event_alone_finds_a_version(store: WeightStore, follow: Opener) -> None:
    first = publish(store, 0)
    follower = follow(poll_seconds=NEVER, watch=store.folder)
    assert served(follower) == first
    assert served_after(follower, publish(store, 1, base=first))


def test_announcement_alone_finds_a_version(store: WeightStore, follow: Opener) -> None:
    first = publish(store, 0)
    follower = follow(poll_seconds=NEVER)
    assert served(follower) == first
    second = publish(store, 1, base=first)
    assert follower.poll(timeout=0.3) is None  # nobody told
    follower.notify(second.number, second.weights_id)
    assert served_after(follower, second)


def served_after(follower: WeightSubscriber, version: Version) -> bool:
    return served(follower).weights_id == version.weights_id


def test_announced_id_of_another_version_is_not_taken(store: WeightStore, follow: Opener) -> None:
    first = publish(store, 0)
    follower = follow(poll_seconds=NEVER)
    assert served(follower) == first
    second = publish(store, 1, base=first)
    follower.notify(second.number, "0" * 16)
    assert follower.poll(timeout=0.3) is None
    follower.notify(second.number, second.weights_id)
    assert served_after(follower, second)


def test_newest_wins_when_the_loop_takes_none(store: WeightStore, follow: Opener) -> None:
    follower = follow()
    versions = chain_of(store, 6)
    while (staged := taken(follower)).version.number < 5:
        follower.accept()
    assert staged.version == versions[5]


def test_copy_does_not_change_under_the_loop(store: WeightStore, follow: Opener) -> None:
    first = publish(store, 0)
    follower = follow()
    staged = taken(follower)
    second = publish(store, 1, base=first)
    assert follower.poll(timeout=0.5) is staged
    assert same(staged.tensors, weights_at(0))
    follower.accept()
    assert served_after(follower, second)


def test_refused_version_is_not_offered_again(store: WeightStore, follow: Opener) -> None:
    follower = follow()
    first = publish(store, 0)
    assert served(follower) == first
    publish(store, 1, base=first)
    taken(follower)
    follower.reject()
    assert follower.poll(timeout=0.3) is None
    third = publish(store, 2)
    assert served_after(follower, third)


def test_weights_that_are_not_finite_are_never_offered(store: WeightStore, follow: Opener) -> None:
    follower = follow()
    first = publish(store, 0)
    assert served(follower) == first
    bad = weights_at(1)
    bad["few"][1] = torch.nan
    store.publish(1, bad, companions=COMPANIONS)
    assert follower.poll(timeout=0.5) is None
    assert served_after(follower, publish(store, 2))


def test_nor_are_they_by_the_next_process_while_the_store_is_away(
    store: WeightStore, follow: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    bad = weights_at(1)
    bad["few"][1] = torch.nan
    store.publish(1, bad, companions=COMPANIONS)
    with closing(follow()) as follower:
        refuses(follower, caplog)
    store.folder.rename(store.folder.with_name("away"))
    caplog.clear()
    refuses(follow(), caplog)
    assert "serving version" not in caplog.text


def refuses(follower: WeightSubscriber, caplog: pytest.LogCaptureFixture) -> None:
    """It says why, and offers nothing."""
    until(lambda: follower.poll(timeout=0.1) is not None or "not finite" in caplog.text)
    assert follower.poll(timeout=0.3) is None


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, CHUNK, -1])  # in the first piece, the second, at the end
def test_one_number_that_is_not_finite_is_found(strange: float, place: int) -> None:
    weights = {"sound": torch.full((4,), 3e38), "other": torch.zeros(CHUNK + 3).bfloat16()}
    check_finite(weights)  # a sum of large numbers overflows, they do not
    weights["other"][place] = strange
    with pytest.raises(ValueError, match="other is not finite"):
        check_finite(weights)


def test_version_of_another_model_is_never_offered(store: WeightStore, follow: Opener) -> None:
    follower = follow()
    first = publish(store, 0)
    assert served(follower) == first
    store.publish(1, {"other": torch.zeros(3).bfloat16()}, companions=COMPANIONS)
    assert follower.poll(timeout=0.5) is None
    assert served_after(follower, publish(store, 2))


@pytest.mark.parametrize("name", [DELTA, "manifest.json", "STABLE"])
@pytest.mark.parametrize("harm", ["truncate", "remove", "flip"])
def test_damaged_version_leaves_the_old_one_and_the_next_keyframe_repairs(
    store: WeightStore, follow: Opener, harm: str, name: str
) -> None:
    versions = chain_of(store, 2)
    file = versions[1].folder / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "remove":
        file.unlink()
    else:
        file.write_bytes(bytes(content) if harm == "flip" else file.read_bytes()[:-1])
    follower = follow()
    until(lambda: follower.poll(timeout=0.1) or follower.wants_keyframe)
    if staged := follower.poll():  # the one before will do
        assert staged.version.number == 0
        follower.accept()
    assert served_after(follower, publish(store, 2))


def test_read_that_fails_for_a_while_is_tried_again(
    store: WeightStore, follow: Opener, tmp_path: Path
) -> None:
    versions = chain_of(store, 2)
    hidden = tmp_path / "hidden"
    shutil.move(versions[1].folder / DELTA, hidden)
    follower = follow()
    assert follower.poll(timeout=0.5) is None
    shutil.move(hidden, versions[1].folder / DELTA)
    assert served_after(follower, versions[1])


@pytest.mark.parametrize("empty_root", [False, True])
def test_mount_that_vanishes_costs_nothing_but_news(
    store: WeightStore, follow: Opener, tmp_path: Path, empty_root: bool
) -> None:
    follower = follow(watch=store.folder)
    first = publish(store, 0)
    assert served(follower) == first
    store.folder.rename(tmp_path / "away")
    if empty_root:
        store.folder.mkdir()
    assert follower.poll(timeout=0.5) is None
    assert not empty_root or list(store.folder.iterdir()) == []
    if empty_root:
        store.folder.rmdir()
    assert not store.folder.exists()
    (tmp_path / "away").rename(store.folder)
    assert served_after(follower, publish(store, 1, base=first))


def test_folder_that_vanishes_before_it_is_watched_does_no_harm(
    store: WeightStore, follow: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[bool] = []

    def watch(folder: Path, *arguments: Any, **options: Any) -> FolderWatcher:
        if not watched:
            store.folder.rename(tmp_path / "away")
        watched.append(True)
        return FolderWatcher(folder, *arguments, **options)

    monkeypatch.setattr("peralta_zmq.weights.subscriber.FolderWatcher", watch)
    first = publish(store, 0)
    follower = follow(watch=store.folder)
    assert follower.poll(timeout=0.5) is None
    (tmp_path / "away").rename(store.folder)
    assert served_after(follower, first)
    assert len(watched) > 1


def test_folder_that_comes_and_goes_all_the_time_does_no_harm(
    store: WeightStore, follow: Opener, tmp_path: Path
) -> None:
    follower = follow(watch=store.folder, poll_seconds=0.001)
    pruner = Pruner(store, Retention(last=3))
    base, serving = publish(store, 0), -1
    for step in range(1, 60):
        base = publish(store, step, base=base if step % 4 else None, pruner=pruner)
        for _ in range(5):
            store.folder.rename(tmp_path / "away")
            if staged := follower.poll(timeout=0.001 * (step % 3)):
                serving = staged.version.step
                follower.accept()
            (tmp_path / "away").rename(store.folder)
    while serving != 59:  # the test's deadline ends a hang
        serving = served(follower).step


def test_missing_link_is_told_until_a_keyframe_comes(store: WeightStore, follow: Opener) -> None:
    shutil.rmtree(chain_of(store, 4)[2].folder)
    follower = follow()
    while not follower.wants_keyframe:  # the test's deadline ends a hang
        assert follower.poll(timeout=0.1) is None
    keyframe = publish(store, 4)
    assert served_after(follower, keyframe)
    assert not follower.wants_keyframe


def test_store_that_is_away_is_no_want_of_a_keyframe(
    store: WeightStore, follow: Opener, tmp_path: Path
) -> None:
    follower = follow()
    assert served_after(follower, publish(store, 0))
    store.folder.rename(tmp_path / "away")
    assert follower.poll(timeout=0.5) is None
    assert not follower.wants_keyframe


def test_versions_of_a_new_run_are_newer_whatever_their_number(
    store: WeightStore, follow: Opener
) -> None:
    follower = follow()
    first = publish(store, 7)
    assert served(follower) == first
    shutil.rmtree(store.folder)
    again = WeightStore.open(store.folder)
    again.claim("run-2")
    new = publish(again, 1)
    assert served(follower).run_id == new.run_id == "run-2"


def test_restart_reads_nothing_that_it_has(store: WeightStore, follow: Opener) -> None:
    versions = chain_of(store, 2)
    before = follow()
    assert served(before) == versions[1]
    before.close()
    staged = taken(follow())
    assert (staged.version.weights_id, staged.bytes_read) == (versions[1].weights_id, 0)


def test_restart_without_a_store_serves_the_last_good_copy(
    store: WeightStore, follow: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = chain_of(store, 2)
    before = follow()
    assert served(before) == versions[1]
    before.close()
    store.folder.rename(tmp_path / "away")
    monkeypatch.setattr("peralta_zmq.weights.subscriber.OFFLINE_SECONDS", 0.2)
    follower = follow()
    assert served(follower).weights_id == versions[1].weights_id
    (tmp_path / "away").rename(store.folder)
    assert served_after(follower, publish(store, 2, base=versions[1]))


def test_copy_that_another_process_uses_is_left_alone(store: WeightStore, follow: Opener) -> None:
    first = publish(store, 0)
    assert served(follow()) == first
    staged = taken(follow())
    assert staged.version == first
    assert staged.folder.name.startswith("peralta-")


def test_staged_folder_has_what_from_pretrained_needs(store: WeightStore, follow: Opener) -> None:
    chain_of(store, 3)
    folder = taken(follow()).folder
    assert {WEIGHTS, "config.json", "tokenizer.json"} <= {each.name for each in folder.iterdir()}


def test_closing_does_not_wait_for_the_loop(store: WeightStore, follow: Opener) -> None:
    follower = follow()
    first = publish(store, 0)
    taken(follower)
    publish(store, 1, base=first)  # waits for the loop to settle
    with closing(follower):
        pass
    assert not [each for each in threading.enumerate() if each.name == "weight-subscriber"]
