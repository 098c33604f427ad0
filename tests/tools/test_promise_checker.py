"""The promise checker accepts a valid history and reports every change that breaks a promise.

The valid run: 3 steps of 2 groups, max_off_policy_steps 1. Incarnation `aa` of the generator ann
makes 4 groups and is killed before it has sent the last one; incarnation `bb` makes 5, of which one
is stale and the last one too late. The trainer has received 7 of them. It is killed after step 1
and resumes.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from sample_data import group_of

from peralta_zmq import wire
from peralta_zmq.config import Config, write_resolved
from peralta_zmq.config.sections import RunSection
from peralta_zmq.config.training_sections import CurriculumSection, TrainSection
from peralta_zmq.observe.metrics import JsonLines, Row
from tools import promise_checker
from tools.promise_checker import hostile_groups
from tools.run_history import History, HostileGroup, Logs, read_history, read_journal

INCARNATIONS = {"aa": b"\xaa" * 8, "bb": b"\xbb" * 8, "ee": b"\xee" * 8}
A, B, HOSTILE = (f"ann/{incarnation.hex()}" for incarnation in INCARNATIONS.values())
LOG = [
    "10:00:00 bin/generator loaded version=0 step=0 weights_id=w0 seconds=0.1",
    *(f"10:00:01 bin/generator made group={A}/{n} step=0 weights_id=w0" for n in range(4)),
    "10:00:03 bin/generator generator=ann threads=1 version=1",
    "10:00:03 bin/generator loaded version=1 step=1 weights_id=w1 seconds=0.1",
    "10:00:05 bin/generator loaded version=2 step=2 weights_id=w2 seconds=0.1",
    f"10:00:04 bin/generator made group={B}/0 step=0 weights_id=w0",
    *(f"10:00:04 bin/generator made group={B}/{n} step=1 weights_id=w1" for n in (1, 2, 3)),
    f"10:00:05 bin/generator made group={B}/4 step=2 weights_id=w2",
    "10:00:40 bin/generator run complete: groups=5",
]


@dataclass
class RecordedRun:
    """The files of a run. A test changes a field, then calls `check`."""

    # step -> (incarnation, group_number, policy_step); a text instead: the reason of the drop
    journal: dict[int, list[tuple[str, int, int | str]]] = field(default_factory=lambda: {
        1: [("aa", 0, 0), ("aa", 1, 0)],
        2: [("aa", 2, 0), ("bb", 1, 1)],
        3: [("bb", 0, "stale"), ("bb", 2, 1), ("bb", 3, 1)],
    })  # fmt: skip
    events: list[Row] = field(default_factory=lambda: [
        {"event": "start", "step": 0, "time": 5.0},
        {"event": "publish", "step": 0, "number": 0, "weights_id": "w0"},
        {"event": "publish", "step": 1, "number": 1, "weights_id": "w1"},
        {"event": "resume", "step": 1, "time": 15.0},
        {"event": "publish", "step": 2, "number": 2, "weights_id": "w2"},
    ])  # fmt: skip
    steps: list[int] = field(default_factory=lambda: [1, 2, 3])
    log: list[str] = field(default_factory=lambda: list(LOG))
    accounting: dict[str, int] = field(default_factory=lambda: {
        "made": 7, "trained": 6, "no_signal": 0, "stale": 1, "abandoned": 0, "invalid": 0,
        "lost": 0, "in_flight": 0, "duplicates": 1,
    })  # fmt: skip
    final_statuses: dict[str, int] = field(default_factory=dict[str, int])
    filters: bool = False
    max_steps: int = 0  # 0 = the newest step in the journal

    def check(self, folder: Path) -> dict[str, tuple[str, ...]]:
        """Violations by promise, only of promises that are broken."""
        folder.mkdir(exist_ok=True)
        train = TrainSection(max_steps=self.max_steps or max(self.journal), max_off_policy_steps=1)
        curriculum = CurriculumSection(online_difficulty_filtering=self.filters)
        write_resolved(
            Config(run=RunSection(name="run"), train=train, curriculum=curriculum), folder
        )
        for step, groups in self.journal.items():
            write_journal(folder / "journal" / f"step_{step:06d}.msgpack", groups)
        with JsonLines(folder / "events.jsonl") as events:
            for row in self.events:
                events.append({"time": 0.0, **row})
        with JsonLines(folder / "metrics.jsonl") as metrics:
            for index, step in enumerate(self.steps):
                metrics.append({"step": step, "time": 10.0 * (index + 1)})
        (folder / "summary.json").write_text(
            json.dumps({"accounting": self.accounting, "final_statuses": self.final_statuses})
        )
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "generator-0.log").write_text("\n".join(self.log) + "\n")
        checks = promise_checker.check(read_history(folder))
        assert [result.promise for result in checks] == ["P1", "P2", "P3", "P4", "P5", "P6"]
        return {result.promise: result.broken for result in checks if result.broken}

    def change_outcome(self, group_number: int, outcome: str) -> None:
        """Record another outcome for a group of `bb` that was trained in step 3."""
        index = self.journal[3].index(("bb", group_number, 1))
        self.journal[3][index] = ("bb", group_number, outcome)
        self.accounting["trained"] -= 1
        self.accounting[outcome] = self.accounting.get(outcome, 0) + 1


def write_journal(file: Path, groups: list[tuple[str, int, int | str]]) -> None:
    """Append records of groups; a group says that all earlier ones of its sender are durable."""
    file.parent.mkdir(exist_ok=True)
    with file.open("ab") as journal:
        for group in groups:
            journal.write(record_of(*group))


def record_of(
    incarnation: str,
    group_number: int,
    policy_step: int | str,
    *,
    rewards: tuple[float, ...] = (0.0, 1.0),
) -> bytes:
    if isinstance(policy_step, str):
        note = {"sender": f"ann/{INCARNATIONS[incarnation].hex()}", "group_number": group_number,
                "outcome": policy_step, "min_group_number": group_number}  # fmt: skip
        kind, content = 2, json.dumps(note).encode()
    else:
        group = group_of(
            rewards,
            incarnation=INCARNATIONS[incarnation],
            group_number=group_number,
            min_group_number=group_number,
            policy_step=policy_step,
        )
        kind, content = 1, wire.encode_group(group)
    return struct.pack("<IIB", len(content), zlib.crc32(content, kind), kind) + content


def test_valid_history_breaks_no_promise(tmp_path: Path) -> None:
    assert RecordedRun().check(tmp_path) == {}


def test_incomplete_last_record_and_copied_file_are_not_read(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    RecordedRun().check(tmp_path)
    before = list(read_journal(journal))
    assert len(before) == 7
    shutil.copy(journal / "step_000002.msgpack", journal / "step_000002.old.msgpack")
    with (journal / "step_000003.msgpack").open("ab") as file:
        file.write(record_of("bb", 4, 2)[:-1])
    assert list(read_journal(journal)) == before


# P1: only published versions were loaded.


@pytest.mark.parametrize(("line", "broken"), [
    ("loaded version=0 step=0 weights_id=ff", "version=0 weights_id=ff was not published"),
    (f"made group={B}/9 step=2 weights_id=ee", "weights_id=ee was served and never loaded"),
    ("refused version=2 reason=shape", "version=2 refused"),
    ("load failed version=2 reason=version 2 does not verify: sha256", "version=2 refused"),
    ("load failed version=2 reason=version 2 was removed meanwhile", None),
])  # fmt: skip
def test_p1_reports_unpublished_and_refused_versions(
    tmp_path: Path, line: str, broken: str | None
) -> None:
    run = RecordedRun()
    run.log.append(line)
    assert run.check(tmp_path) == ({"P1": (broken,)} if broken else {})


@pytest.mark.parametrize(("resumed_at", "lines", "broken"), [
    (1, [], []),
    (0, [], ["w1"]),
    (2, [], ["w1"]),
    (1, ["loaded version=1 step=1 weights_id=ee seconds=0.1"], ["w1", "ee"]),
])  # fmt: skip
def test_p1_accepts_unrecorded_publish_if_trainer_resumed_at_its_step_and_readers_agree(
    tmp_path: Path, resumed_at: int, lines: list[str], broken: list[str]
) -> None:
    run = RecordedRun()
    del run.events[2]  # the publish of step 1: the trainer was killed before it recorded it
    run.events[2] = {"event": "resume", "step": resumed_at, "time": 15.0}
    run.log += lines
    expected = tuple(f"version=1 weights_id={name} was not published" for name in broken)
    assert run.check(tmp_path) == ({"P1": expected} if broken else {})


# P2: no group is trained twice.


@pytest.mark.parametrize(("steps", "broken"), [
    ([1, 2, 2, 3], {"P2": ("step 2 was taken twice without a resume",)}),
    ([1, 1, 2, 3], {}),  # the resume is between the first two rows
])  # fmt: skip
def test_p2_reports_repeated_step_without_a_resume(
    tmp_path: Path, steps: list[int], broken: dict[str, tuple[str, ...]]
) -> None:
    assert RecordedRun(steps=steps).check(tmp_path) == broken


def test_p2_reports_group_recorded_or_made_twice(tmp_path: Path) -> None:
    run = RecordedRun()
    run.journal[2] = [("aa", 1, 0), ("aa", 2, 0), ("bb", 1, 1), ("bb", 0, 0)]
    run.log.append(LOG[1])
    broken = [f"{name} is 2 times in the journal" for name in (f"{A}/1", f"{B}/0")]
    assert run.check(tmp_path) == {"P2": (*broken, f"{A}/0 was made twice")}


# P3: no group of a live generator is lost.


@pytest.mark.parametrize(("end", "is_lost"), [
    (LOG[-1:], True),
    # made at 10:00:04, resent after a broken connection until :19
    (["10:00:19 bin/generator run complete: groups=5"], False),
    (["10:00:20 bin/generator run complete: groups=5"], True),
    (["00:00:01 bin/generator run complete: groups=5"], True),  # after midnight
    ([], False),  # killed before the end
    (["10:00:40 bin/generator generator=ann threads=1 version=3", LOG[-1]], False),  # killed
])  # fmt: skip
def test_p3_reports_missing_group_of_a_generator_alive_at_the_end(
    tmp_path: Path, end: list[str], is_lost: bool
) -> None:
    run = RecordedRun(log=[*LOG[:-1], *end])
    del run.journal[3][0]  # the trainer has no record of group 0 of `bb`
    run.accounting |= {"stale": 0, "in_flight": 1}
    lost = {"P3": (f"{B}/0 of step 0 has no outcome",)}
    assert run.check(tmp_path / "early") == (lost if is_lost else {})
    run.log[-2 - len(end)] = f"made group={B}/3 step=2 weights_id=w2"  # much later than group 0
    run.journal[3][1] = ("bb", 3, 2)
    assert run.check(tmp_path / "late") == lost
    history = read_history(tmp_path / "late")
    undelivered = [record._replace(min_group_number=0) for record in history.journal]
    is_killed = not end or "threads" in end[0]  # with all groups that were not durable
    checked = promise_checker.unaccounted_groups(replace(history, journal=undelivered))
    assert checked.broken == (() if is_killed else lost["P3"])


def test_p3_reports_missing_group_after_the_end_unless_the_run_was_continued(
    tmp_path: Path,
) -> None:
    run = RecordedRun()
    run.log.insert(5, "10:00:02 bin/generator run complete: groups=4")
    assert run.check(tmp_path / "continued") == {}
    run.log = [line for line in run.log if B not in line and "generator=" not in line]
    assert run.check(tmp_path / "ended")["P3"] == (f"{A}/3 of step 0 has no outcome",)


def test_p3_reports_group_given_up_by_its_sender(tmp_path: Path) -> None:
    run = RecordedRun()
    run.log.append(f"lost group={A}/3 reason=outbox")
    assert run.check(tmp_path) == {"P3": (f"{A}/3 was given up by its sender",)}


# Hostile groups are refused or excluded from the loss.


def hostile_line(number: int, expected: str, *, sent_at: float = 1.0) -> str:
    return f"hostile group={HOSTILE}/{number} time={sent_at} expected={expected} attack=some kind"


def test_excluded_and_refused_hostile_groups_break_no_promise(tmp_path: Path) -> None:
    run = RecordedRun()
    outcomes = ("abandoned", "invalid", "excluded", "excluded", "invalid")  # the last never arrives
    run.log += [
        hostile_line(group_number, outcome) for group_number, outcome in enumerate(outcomes)
    ]
    run.journal[2] += [("ee", 0, "abandoned"), ("ee", 1, "invalid"), ("ee", 2, 1)]
    run.journal[3].append(("ee", 3, "stale"))
    exclusion: Row = {"event": "exclude", "step": 2, "groups": {f"{HOSTILE}/2": "mismatch"}}
    run.events += [exclusion, exclusion]  # the trainer was killed and has repeated the step
    run.accounting |= {"made": 11, "trained": 7, "stale": 2, "abandoned": 1, "invalid": 1}
    assert run.check(tmp_path) == {}
    result = hostile_groups(read_history(tmp_path), minutes=30)
    assert result.text == (
        "5 groups sent: 1 refused at decode, 1 excluded from the loss, 1 abandoned, of future "
        "weights, 1 poisoned but stale, 1 in flight at a kill or outage (not checked), "
        "0 unaccounted"
    )
    assert result.broken == ()


@pytest.mark.parametrize(("expected", "outcome", "broken"), [
    ("excluded", 1, "trained, not excluded"),  # in the loss of step 2
    ("excluded", "invalid", "invalid, not excluded"),
    ("invalid", 1, "trained, not invalid"),
    ("invalid", "stale", "stale, not invalid"),
    ("abandoned", 1, "trained, not abandoned"),
])  # fmt: skip
def test_hostile_group_with_another_outcome_is_reported(
    tmp_path: Path, expected: str, outcome: int | str, broken: str
) -> None:
    run = RecordedRun()
    run.log.append(hostile_line(0, expected))
    run.journal[2].append(("ee", 0, outcome))
    # An exclusion from another step does not count.
    run.events.append({"event": "exclude", "step": 3, "groups": {f"{HOSTILE}/0": "mismatch"}})
    run.check(tmp_path)
    result = hostile_groups(read_history(tmp_path))
    assert result.broken == (f"{HOSTILE}/0 is {broken}",)


@pytest.mark.parametrize(("sent_at", "events", "outcome"), [
    (11.0, {}, "unaccounted"),
    (11.0, {16.5: "killed"}, "unaccounted"),  # after five steps
    (11.0, {15.5: "killed"}, "in flight"),  # after four
    (11.0, {15.5: "complete"}, "in flight"),
    (5.5, {}, "unaccounted"),
    (1.5, {}, "in flight"),  # the sender gave up at 11.5 s, before the second step
    (11.0, {9.0: "killed", 11.5: "resume"}, "in flight"),  # the trainer was down
    (11.0, {9.0: "killed", 10.5: "resume"}, "unaccounted"),
])  # fmt: skip
def test_hostile_group_without_record_must_have_been_in_flight(
    sent_at: float, events: dict[float, str], outcome: str
) -> None:
    timeline = {0.0: "start", **events}
    sender = (HOSTILE, 0)
    history = History(
        max_steps=10,
        max_off_policy_steps=4,
        rows=[{"step": step, "time": 10.0 + step} for step in range(1, 11)],
        events=[
            *({"event": name, "worker": "trainer", "time": at} for at, name in timeline.items()),
            {"event": "killed", "worker": "generator-0", "time": 11.5},
        ],
        summary={},
        journal=[],
        logs=Logs(hostile={sender: HostileGroup(sent_at, "invalid")}),
    )
    result = hostile_groups(history)
    is_due = outcome == "unaccounted"
    assert result.broken == ((f"{HOSTILE}/0 is unaccounted, not invalid",) if is_due else ())
    assert f"{1 - is_due} in flight at a kill" in result.text
    assert result.text.endswith(f", {int(is_due)} unaccounted")


@pytest.mark.parametrize(("minutes", "broken"), [
    (9, ()), (10, ("none is excluded from the loss",)),
])  # fmt: skip
def test_long_soak_must_exclude_a_hostile_group(
    tmp_path: Path, minutes: float, broken: tuple[str, ...]
) -> None:
    RecordedRun().check(tmp_path)
    assert hostile_groups(read_history(tmp_path), minutes=minutes).broken == broken


def test_excluded_group_of_a_sender_that_is_not_hostile_is_reported(tmp_path: Path) -> None:
    run = RecordedRun()
    run.events.append({"event": "exclude", "step": 2, "groups": {f"{A}/2": "loss not finite"}})
    assert run.check(tmp_path) == {}
    broken = hostile_groups(read_history(tmp_path)).broken
    assert broken == (f"{A}/2 is excluded, and its sender is not hostile",)


DROPPED = ("stale", "abandoned", "filtered", "evaluated", "invalid")


@pytest.mark.parametrize(
    ("outcome", "filters", "is_valid"),
    [*((outcome, False, False) for outcome in DROPPED), ("filtered", True, True)],
)
def test_p3_reports_drop_without_a_cause(
    tmp_path: Path, outcome: str, filters: bool, is_valid: bool
) -> None:
    run = RecordedRun(filters=filters)
    run.change_outcome(2, outcome)  # its age is within the limit
    broken = {"P3": (f"{B}/2 is {outcome} at step 3 without a cause",)}
    assert run.check(tmp_path) == ({} if is_valid else broken)


def test_p3_accepts_evaluated_group_only_if_made_for_an_evaluation(tmp_path: Path) -> None:
    run = RecordedRun()
    run.log[-4] += " evaluation_step=1"
    broken = (f"{B}/2 is trained at step 3 without a cause",)
    assert run.check(tmp_path / "trained") == {"P3": broken}
    run.change_outcome(2, "evaluated")
    assert run.check(tmp_path / "evaluated") == {}


def rolled_back(made: str = "step=3 weights_id=w9") -> RecordedRun:
    """A roll-back from the published step 3 to step 1 has abandoned group 3 of `aa`."""
    run = RecordedRun()
    run.events.insert(3, {"event": "publish", "step": 3, "number": 9, "weights_id": "w9"})
    run.events.insert(4, {"event": "roll_back", "step": 1})
    run.log[4] = f"made group={A}/3 {made}"
    run.log.insert(5, "loaded version=9 step=3 weights_id=w9 seconds=0.1")
    run.journal[2].append(("aa", 3, "abandoned"))
    run.accounting |= {"made": 8, "abandoned": 1}
    return run


@pytest.mark.parametrize(("made", "step", "has_roll_back", "is_valid"), [
    ("step=3 weights_id=w9", 2, True, True),  # sampled with undone weights
    ("step=3 weights_id=w9", 2, False, False),
    ("step=1 weights_id=w1 newest=2", 2, True, True),  # last tokens of undone weights
    ("step=1 weights_id=w1 newest=2", 3, True, False),  # step 2 was published again
    ("step=0 weights_id=w0 newest=1", 2, True, False),
])  # fmt: skip
def test_p3_accepts_abandoned_group_only_of_undone_weights(
    tmp_path: Path, made: str, step: int, has_roll_back: bool, is_valid: bool
) -> None:
    run = rolled_back(made)
    run.journal[step].append(run.journal[2].pop())
    if not has_roll_back:
        del run.events[4]
    broken = {"P3": (f"{A}/3 is abandoned at step {step} without a cause",)}
    assert run.check(tmp_path) == ({} if is_valid else broken)


def test_p3_and_p6_accept_abandoned_group_after_the_last_step(tmp_path: Path) -> None:
    run = RecordedRun(max_steps=3)
    run.journal[4] = [("bb", 4, "abandoned")]
    run.accounting |= {"made": 8, "abandoned": 1}
    assert run.check(tmp_path / "last") == {}
    run.max_steps = 4
    run.steps.append(4)
    assert run.check(tmp_path / "other") == {
        "P3": (f"{B}/4 is abandoned at step 4 without a cause",)
    }
    run.events.append({"event": "complete", "step": 3})
    assert run.check(tmp_path / "continued") == {}


def test_p3_and_p4_report_trained_group_of_undone_weights(tmp_path: Path) -> None:
    run = rolled_back()
    run.journal[2][2] = ("aa", 3, 1)
    run.accounting |= {"trained": 7, "abandoned": 0}
    broken = run.check(tmp_path)
    assert broken["P3"] == (f"{A}/3 is trained at step 2 without a cause",)
    assert broken["P4"] == (f"{A}/3 is of step 1, and of step 3 in the log",)


# P4: no trained group exceeds the staleness limit.


@pytest.mark.parametrize(("recorded", "logged", "broken"), [
    (0, "step=0 weights_id=w0", "2 steps old at step 3"),
    (3, "step=3 weights_id=w2", "-1 steps old at step 3"),  # the weights after that step
    (1, "step=0 weights_id=w0", "of step 1, and of step 0 in the log"),
])  # fmt: skip
def test_p4_reports_stale_and_inconsistent_groups(
    tmp_path: Path, recorded: int, logged: str, broken: str
) -> None:
    run = RecordedRun()
    run.journal[3][1] = ("bb", 2, recorded)
    run.log[-4] = f"made group={B}/2 {logged}"
    assert run.check(tmp_path) == {"P4": (f"{B}/2 is {broken}",)}


# P5: the run completes.


def test_p5_reports_missing_step_and_missing_summary(tmp_path: Path) -> None:
    assert RecordedRun(steps=[1, 3]).check(tmp_path)["P5"] == ("steps 2 to 2: 1 missing",)
    (tmp_path / "summary.json").unlink()
    broken = {
        result.promise: result.broken for result in promise_checker.check(read_history(tmp_path))
    }
    assert broken["P5"][-1] == "there is no summary: the run has not ended"
    assert broken["P6"] == ("the summary has none",)


# P6: every group is accounted for.


def test_p6_reports_group_that_no_generator_made(tmp_path: Path) -> None:
    run = RecordedRun()
    run.log.remove(f"10:00:01 bin/generator made group={A}/2 step=0 weights_id=w0")
    assert f"{A}/2 was never made" in run.check(tmp_path)["P6"]


@pytest.mark.parametrize(("stated", "broken"), [
    ({"trained": 5}, "trained is 5 in the summary, 6 in the records"),
    ({"stale": 0}, "stale is 0 in the summary, 1 in the records"),
    ({"no_signal": 1}, "no_signal is 1 in the summary, 0 in the records"),
    ({"made": 8}, "lost or in flight is 0 in the summary, 1 in the records"),
    ({"made": 10, "in_flight": 3}, "made is 10 in the summary, 7 to 9 in the records"),
    ({"made": 6, "in_flight": -1}, "made is 6 in the summary, 7 to 9 in the records"),
    ({"in_flight": 1}, "lost or in flight is 1 in the summary, 0 in the records"),
    ({"lost": 1}, "lost is 1 in the summary, 0 in the logs"),
])  # fmt: skip
def test_p6_reports_wrong_count_in_the_summary(
    tmp_path: Path, stated: dict[str, int], broken: str
) -> None:
    run = RecordedRun()
    run.accounting |= stated
    assert broken in run.check(tmp_path)["P6"]


@pytest.mark.parametrize(("final_statuses", "made", "broken"), [
    ({B: 5}, 8, ()),  # with the late group of `bb`, without the unsent one of `aa`
    ({B: 5}, 9, ()),  # an earlier report of `aa` may have counted its unsent group
    ({B: 5}, 7, ("made is 7 in the summary, 8 to 9 in the records",)),
    ({A: 4, B: 5}, 9, ()),
    ({A: 4, B: 5}, 8, ("made is 8 in the summary, 9 in the records",)),
    ({B: 6}, 9, (f"{B} has made 6 by its final status, 5 by the logs",)),
])  # fmt: skip
def test_p6_counts_all_groups_of_a_sender_with_a_final_status(
    tmp_path: Path, final_statuses: dict[str, int], made: int, broken: tuple[str, ...]
) -> None:
    run = RecordedRun(final_statuses=final_statuses)
    run.accounting |= {"made": made, "in_flight": made - 7}
    assert run.check(tmp_path).get("P6", ()) == broken


def test_p6_counts_group_with_equal_rewards_as_no_signal(tmp_path: Path) -> None:
    run = RecordedRun()
    run.journal[3].remove(("bb", 3, 1))
    run.accounting |= {"trained": 5, "no_signal": 1}
    file = tmp_path / "journal" / "step_000003.msgpack"
    file.parent.mkdir()
    file.write_bytes(record_of("bb", 3, 1, rewards=(1.0, 1.0)))
    assert run.check(tmp_path) == {}


# Output.


def test_main_prints_violations_and_returns_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RecordedRun()
    run.check(tmp_path)
    assert promise_checker.main([str(tmp_path)]) == 0
    valid = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in valid[:3]] == [
        "ok    P1 torn 0", "ok    P2 twice 0", "ok    P3 lost 0",
    ]  # fmt: skip
    log = tmp_path / "other.log"
    more = ["refused version=2 reason=shape"] * 3 + [f"lost group={A}/3 reason=outbox", LOG[1]]
    log.write_text("\n".join([*run.log, *more]))
    assert promise_checker.main([str(tmp_path), str(log)]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert [line.split(":")[0] for line in failed] == [
        "FAIL  P1 torn 3", "FAIL  P2 twice 1", "FAIL  P3 lost 1",
    ]  # fmt: skip
    assert failed[0].endswith("version=2 refused; version=2 refused; version=2 refused")


def test_unexpected_ends_names_workers_that_the_test_did_not_kill(tmp_path: Path) -> None:
    run = RecordedRun()
    killed = {"reason": "killed by SIGKILL", "killed": True}
    restarts: list[Row] = [
        {"event": "restart", "worker": "trainer", **killed},
        {"event": "restart", "worker": "generator-0", "reason": "exit code 1", "killed": False},
        {"event": "restart", "worker": "generator-1", **killed, "killed": False},  # out of memory
    ]
    run.events += restarts
    assert run.check(tmp_path / "crashed") == {}
    assert promise_checker.unexpected_ends(read_history(tmp_path / "crashed")).line == (
        "FAIL  ended by themselves 2, after a kill 1: "
        "generator-0 (exit code 1); generator-1 (killed by SIGKILL)"
    )
    run.events = run.events[:-2]
    run.check(tmp_path / "killed")
    line = promise_checker.unexpected_ends(read_history(tmp_path / "killed")).line
    assert line == "ok    ended by themselves 0, after a kill 1"
