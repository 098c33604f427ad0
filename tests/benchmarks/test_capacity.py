"""The limits of docs/scaling.md: computed from the recorded results, and up to date."""

from __future__ import annotations

import pytest

from benchmarks import capacity
from benchmarks.report import REPO

KNOWN = capacity.Constants(
    announcement=100.0, group=25_000, core_seconds=250e-6, delta=20e6, keyframe=1020e6,
    checkpoint=2e9, memory=0.3e9, memory_per_generator=1e5,
)  # fmt: skip


def test_limits_of_round_constants_are_those_computed_by_hand() -> None:
    found = {each.name: each for each in capacity.limits(KNOWN, keyframe_interval=10)}
    most = {name: round(each.most, 3) for name, each in found.items()}
    assert most == {
        "link of the NAS": 62.5,  # 60 s x 125 MB/s / (20 MB + 1000 MB / 10)
        "link of the trainer: announcements": round(1_250_000**0.5, 3),  # 125 MB/s / 100 bytes
        "core of the trainer": 4000.0,
        "senders": 4096.0,
        "link of the trainer: groups": 5000.0,
        "open files": 16384.0,
    }
    assert [*most.values()] == sorted(most.values())
    for each in found.values():
        assert each.share(each.most) == pytest.approx(1.0)
        assert each.share(each.most / 10) <= 0.1 + 1e-9
    limits = list(found.values())
    assert capacity.exceeded(limits, 62) == "none"
    assert capacity.exceeded(limits, 1_000) == "link of the NAS"
    assert capacity.exceeded(limits, 1_000_000) == "link of the trainer: announcements"


def test_seconds_of_a_version_grow_with_the_generators_of_one_link_only() -> None:
    rows = capacity.transfer(KNOWN)
    assert rows["one link of 1 Gbit/s, a delta only"] == ["1.6", "16", "160", "1,600"]
    assert {*rows.popitem()[1]} == {"9.6"}  # 120 MB on 100 Mbit/s


def test_tables_of_the_page_are_up_to_date() -> None:
    text = (REPO / "docs/scaling.md").read_text("utf-8")
    written = text.partition(f"{capacity.BEGIN}\n")[2].partition(capacity.END)[0]
    assert written == capacity.tables(), "run python -m benchmarks.capacity"
