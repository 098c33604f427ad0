"""The limits of docs/scaling.md: computed from the recorded results, and up to date."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import capacity
from benchmarks.report import REPO

CONSTANTS = capacity.Constants(
    announcement=100.0, group=25_000, core_seconds={1: 5e-3, 100: 2e-3, 1_000: 250e-6},
    delta=20e6, keyframe=1020e6, checkpoint=2e9, memory=0.3e9, memory_per_generator=1e5,
)  # fmt: skip


def test_limits_of_round_constants_are_those_computed_by_hand() -> None:
    found = {each.name: each for each in capacity.limits(CONSTANTS)}
    capacities = {name: round(each.capacity, 3) for name, each in found.items()}
    assert capacities == {
        # Mean: 60 s x 125 MB/s / (20 MB + 1000 MB / 10) = 62.5. Keyframe in 8 steps: 58.8.
        "link of the NAS": round(8 * 60 * 125 / 1020, 3),
        # One per second: 125 MB/s / 100 bytes.
        "link of the trainer: announcements, while it collects": round(1_250_000**0.5, 3),
        "core of the trainer": 4000.0,
        "disk of the trainer: journal": 4000.0,
        "senders": 4096.0,
        "link of the trainer: groups": 5000.0,
        "open files": 16384.0,
    }
    assert [*capacities.values()] == sorted(capacities.values())
    for each in found.values():
        assert each.share(each.capacity) == pytest.approx(1.0)


def test_mean_bytes_limit_the_nas_if_keyframes_are_small() -> None:
    constants = replace(CONSTANTS, delta=300e6, keyframe=1000e6)
    [nas] = [each for each in capacity.limits(constants) if each.name == "link of the NAS"]
    assert nas.capacity == pytest.approx(60 * 125 / 370)


def test_shares_of_few_generators_are_those_computed_by_hand() -> None:
    found = {each.name: each.share for each in capacity.limits(CONSTANTS)}
    announcements = found["link of the trainer: announcements, while it collects"]
    assert announcements(10) == pytest.approx(10**2 * 100 * 200 / 125e6)  # 5 ms apart
    assert announcements(100) == pytest.approx(100**2 * 100 * 50 / 125e6)  # 20 ms apart
    assert announcements(1_000) == pytest.approx(1_000**2 * 100 / 125e6)  # 1 s apart
    core = [found["core of the trainer"](count) for count in (10, 100, 10_000)]
    assert core == pytest.approx([0.05, 0.2, 2.5])


def test_seconds_of_a_version_grow_with_the_generators_of_one_link_only() -> None:
    rows = capacity.transfer(CONSTANTS)
    assert rows["one link of 1 Gbit/s, a delta"] == ["1.6", "16", "160", "1,600"]
    own = "an object store, each generator with 100 Mbit/s of its own, a keyframe"
    assert {*rows[own]} == {"82"}


def test_tables_of_the_page_are_up_to_date() -> None:
    text = (REPO / "docs/scaling.md").read_text("utf-8")
    written = text.partition(f"{capacity.BEGIN}\n")[2].partition(capacity.END)[0]
    assert written == capacity.tables(), "run python -m benchmarks.capacity"
