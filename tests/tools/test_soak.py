"""The report of a soak, compared with figures counted by hand."""

from __future__ import annotations

import pytest

from peralta_zmq.observe.metrics import Row
from tools.run_history import History, Logs
from tools.soak import WITH_RESTART, check_faults, recovery_text


def history(events: list[Row]) -> History:
    rows: list[Row] = [{"step": step, "time": at} for step, at in ((1, 9.0), (2, 15.5), (3, 23.0))]
    return History(
        max_steps=3, max_off_policy_steps=4, rows=rows, events=events, summary={}, journal=[],
        logs=Logs(),
    )  # fmt: skip


def killed(worker: str, time: float = 10.0) -> Row:
    return {"event": "killed", "worker": worker, "time": time}


def test_recovery_is_the_time_from_a_kill_of_the_trainer_to_its_next_step() -> None:
    moments = (10.0, 21.0, 40.0)  # the third kill came after the last step
    kills = [killed("generator-0", 15.0), *(killed("trainer", time) for time in moments)]
    assert recovery_text(history(kills)).endswith("median 3.8 s, at most 5.5 s")


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
    fault: Row = {"event": "fault", "kind": f"disk journal full{outage}"}
    checked = check_faults(history([killed("trainer")] * kills + [fault]), minutes=minutes)
    assert checked.broken == broken
    assert checked.text == f"{kills} SIGKILLs; 1 x disk journal full{outage}"
