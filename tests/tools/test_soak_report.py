"""The report of a soak, compared with figures counted by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from peralta_zmq.observe.metrics import Row
from tools.promise_checker import Check
from tools.run_history import History, Load, Logs, Record
from tools.soak_report import WITH_RESTART, check_faults, figures_of, report

EVENTS: list[Row] = [
    {"event": "killed", "worker": "trainer", "time": 10.0},
    {"event": "resume", "time": 14.0},
    {"event": "killed", "worker": "generator-0", "time": 15.0},
    {"event": "killed", "worker": "trainer", "time": 21.0},
    {"event": "resume", "time": 22.0},
    {"event": "killed", "worker": "trainer", "time": 40.0},
    {"event": "fault", "kind": "freeze", "worker": "trainer"},
    {"event": "fault", "kind": "freeze", "worker": "generator-1"},
    {"event": "fault", "kind": "flip statuses, with keys"},
    {"event": "fault", "kind": "disk full, with a restart"},
    {"event": "fault", "kind": "disk away"},
    {"event": "fault", "kind": "hostile NaN rewards"},
    {"event": "publish_failed"},
]


def history() -> History:
    return History(
        max_steps=3,
        max_off_policy_steps=4,
        rows=[{"step": step, "time": at} for step, at in ((1, 9.0), (2, 15.5), (3, 23.0))],
        events=EVENTS,
        summary={},
        journal=[
            Record(("ann/aa", 0), "trained", 1, 0),
            Record(("ann/aa", 1), "trained", 2, 0),
            Record(("ann/aa", 2), "stale", 3, 0),
        ],
        logs=Logs(loads=[Load(1, 1, "w1")] * 4),
    )


def test_figures_count_events_and_groups() -> None:
    figures = figures_of(history())
    assert figures.kills == {"trainer": 3, "generator-0": 1}
    assert figures.faults["freeze"] == 2 and figures.faults.total() == 6
    assert figures.recoveries == [2.0, 5.5]  # the third kill came after the last step
    assert figures.outcomes == {"trained": 2, "stale": 1}
    assert (figures.steps, figures.resumes, figures.loads, figures.unpublished) == (3, 2, 4, 1)


FEW, NONE = "fewer than 200 SIGKILLs", "no start of the trainer during an outage"


@pytest.mark.parametrize(
    ("kills", "minutes", "outage", "broken"),
    [
        (199, 30, WITH_RESTART, (FEW,)), (200, 30, WITH_RESTART, ()),
        (200, 30, ", with a restart of a generator", (NONE,)), (4, 60, "", (FEW, NONE)),
        (4, 29, "", ()),
    ],
)  # fmt: skip
def test_soak_of_half_an_hour_needs_kills_and_starts_during_outages(
    kills: int, minutes: float, outage: str, broken: tuple[str, ...]
) -> None:
    kinds = Counter({"trainer": 3, "ann": kills - 3})
    figures = replace(
        figures_of(history()), kills=kinds, faults=Counter([f"disk journal full{outage}"])
    )
    assert check_faults(figures, minutes=minutes).broken == broken


def test_report_has_figures_and_violations() -> None:
    text = report(figures_of(history()), [Check("P1", "torn 0", ("version=2 refused",))])
    assert "SIGKILLs: 4, 3 of them of the trainer\n" in text
    assert "median 3.8 s, at most 5.5 s" in text
    assert "1 x flip statuses, with keys; 2 x freeze; 1 x hostile NaN rewards\n" in text
    assert text.endswith("FAIL  P1 torn 0: version=2 refused")
