"""The checker finds nothing in a sound history, and each doctored one breaks its promise.

The sound run, by hand: 3 steps of 2 groups, max_off_policy_steps 1. Start `aa` of ann makes 4
groups and is killed with one unsent; start `bb` makes 5: one is stale, the last one too late.
The trainer has heard of 7 of them. It is killed after step 1 and resumes.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sample_data import group_of

from peralta_zmq import wire
from peralta_zmq.config import Config, write_resolved
from peralta_zmq.config.sections import RunSection
from peralta_zmq.config.training_sections import CurriculumSection, TrainSection
from peralta_zmq.observe.metrics import JsonLines, Row
from tools import promise_checker
from tools.run_history import read_history, read_journal

pytestmark = pytest.mark.timeout(60)

BOOTS = {"aa": b"\xaa" * 8, "bb": b"\xbb" * 8}
A, B = (f"ann/{incarnation.hex()}" for incarnation in BOOTS.values())
LOG = [
    "10:00:00 bin/generator loaded version=0 step=0 weights_id=w0 seconds=0.1",
    *(f"10:00:01 bin/generator made group={A}/{n} step=0 weights_id=w0" for n in range(4)),
    "10:00:03 bin/generator generator=ann threads=1 version=1",
    "10:00:03 bin/generator loaded version=1 step=1 weights_id=w1 seconds=0.1",
    "10:00:05 bin/generator loaded version=2 step=2 weights_id=w2 seconds=0.1",
    f"10:00:04 bin/generator made group={B}/0 step=0 weights_id=w0",
    *(f"10:00:04 bin/generator made group={B}/{n} step=1 weights_id=w1" for n in (1, 2, 3)),
    f"10:00:05 bin/generator made group={B}/4 step=2 weights_id=w2",
    "10:00:06 bin/generator run complete: groups=5",
]


@dataclass
class Run:
    """The files of a run; doctor a field, then `check`."""

    # step -> (boot, sequence, policy_step), or instead of the latter why it was dropped
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
    last_reports: dict[str, int] = field(default_factory=dict[str, int])
    filters: bool = False

    def check(self, folder: Path) -> dict[str, tuple[str, ...]]:
        """What breaks each promise; promises that hold are left out."""
        train = TrainSection(max_steps=max(self.journal), max_off_policy_steps=1)
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
            json.dumps({"accounting": self.accounting, "last_reports": self.last_reports})
        )
        (folder / "logs").mkdir()
        (folder / "logs" / "generator-0.log").write_text("\n".join(self.log) + "\n")
        checks = promise_checker.check(read_history(folder))
        assert [each.promise for each in checks] == ["P1", "P2", "P3", "P4", "P5", "P6"]
        return {each.promise: each.broken for each in checks if each.broken}


def write_journal(file: Path, groups: list[tuple[str, int, int | str]]) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("ab") as journal:
        for group in groups:
            journal.write(record_of(*group))


def record_of(
    incarnation: str,
    sequence: int,
    policy_step: int | str,
    *,
    rewards: tuple[float, ...] = (0.0, 1.0),
) -> bytes:
    if isinstance(policy_step, str):
        note = {"sender": f"ann/{BOOTS[incarnation].hex()}", "sequence": sequence,
                "outcome": policy_step, "min_sequence": 0}  # fmt: skip
        kind, content = 2, json.dumps(note).encode()
    else:
        group = group_of(
            rewards, incarnation=BOOTS[incarnation], sequence=sequence, policy_step=policy_step
        )
        kind, content = 1, wire.encode_group(group)
    return struct.pack("<IIB", len(content), zlib.crc32(content, kind), kind) + content


def test_a_sound_history_breaks_nothing(tmp_path: Path) -> None:
    assert Run().check(tmp_path) == {}


def test_a_torn_tail_of_the_journal_is_no_group(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    Run().check(tmp_path)
    with (tmp_path / "journal" / "step_000003.msgpack").open("ab") as file:
        file.write(record_of("bb", 4, 2)[:-1])
    assert len(read_history(tmp_path).journal) == 7


def test_p1_version_that_was_never_published(tmp_path: Path) -> None:
    run = Run()
    run.log.append("loaded version=0 step=0 weights_id=ff seconds=0.1")
    assert run.check(tmp_path) == {"P1": ("version=0 weights_id=ff was not published",)}


def test_p1_a_version_that_was_served_and_never_loaded(tmp_path: Path) -> None:
    run = Run()
    run.log[-2] = run.log[-2].replace("weights_id=w2", "weights_id=ee")
    assert run.check(tmp_path) == {"P1": ("weights_id=ee was served and never loaded",)}


@pytest.mark.parametrize(
    "line",
    ["refused version=2 reason=shape", "unread version=2 reason=version 2 does not verify: sha256"],
)
def test_p1_a_version_that_was_refused(tmp_path: Path, line: str) -> None:
    run = Run()
    run.log.append(line)
    assert run.check(tmp_path) == {"P1": ("version=2 refused",)}


def test_p1_a_version_that_was_pruned_meanwhile_is_no_torn_one(tmp_path: Path) -> None:
    run = Run()
    run.log.append("unread version=2 reason=version 2 was removed meanwhile")
    assert run.check(tmp_path) == {}


def test_p1_a_trainer_killed_before_it_could_tell_of_a_version_has_published_it(
    tmp_path: Path,
) -> None:
    run = Run()
    del run.events[2]  # publish of step 1, from which the next start resumed
    assert run.check(tmp_path) == {}


@pytest.mark.parametrize("step", [0, 2])
def test_p1_but_only_if_the_next_start_found_itself_there(tmp_path: Path, step: int) -> None:
    run = Run()
    del run.events[2]
    run.events[2] = {"event": "resume", "step": step, "time": 15.0}
    assert run.check(tmp_path) == {"P1": ("version=1 weights_id=w1 was not published",)}


def test_p1_and_only_if_all_readers_agree(tmp_path: Path) -> None:
    run = Run()
    del run.events[2]
    run.log.append("loaded version=1 step=1 weights_id=ee seconds=0.1")
    assert run.check(tmp_path) == {
        "P1": (
            "version=1 weights_id=w1 was not published",
            "version=1 weights_id=ee was not published",
        )
    }


def test_p2_a_group_in_two_steps_of_the_journal(tmp_path: Path) -> None:
    run = Run()
    run.journal[2][0] = ("aa", 1, 0)
    broken = run.check(tmp_path)
    assert broken["P2"] == (f"{A}/1 is 2 times in the journal",)


def test_p2_a_sequence_that_was_made_twice(tmp_path: Path) -> None:
    run = Run()
    run.log.append(run.log[1])
    assert run.check(tmp_path) == {"P2": (f"{A}/0 was made twice",)}


@pytest.mark.parametrize(("steps", "twice"), [([1, 2, 2, 3], [2]), ([1, 1, 2, 3], [])])
def test_p2_a_step_taken_twice_needs_a_resume_between(
    tmp_path: Path, steps: list[int], twice: list[int]
) -> None:
    broken = Run(steps=steps).check(tmp_path)  # the resume is between the first two rows
    assert broken.get("P2", ()) == tuple(
        f"step {step} was taken twice without a resume" for step in twice
    )


def test_p3_a_group_of_a_living_generator_without_a_fate(tmp_path: Path) -> None:
    run = Run()
    del run.journal[3][0]
    run.accounting |= {"stale": 0, "in_flight": 1}
    assert run.check(tmp_path) == {"P3": (f"{B}/0 of step 0 has no fate",)}


def test_p3_a_killed_generator_that_was_heard_long_after_it_made_the_group(tmp_path: Path) -> None:
    run = Run()
    del run.journal[3][0]
    run.accounting |= {"stale": 0, "in_flight": 1}
    run.log = [line for line in run.log if "complete" not in line]
    assert run.check(tmp_path) == {}  # it lived for one step more, as old as may be
    run.log[-2] = f"made group={B}/3 step=2 weights_id=w2"
    run.journal[3][1] = ("bb", 3, 2)
    (tmp_path / "again").mkdir()
    assert run.check(tmp_path / "again") == {"P3": (f"{B}/0 of step 0 has no fate",)}


def test_p3_a_group_that_its_sender_gave_up(tmp_path: Path) -> None:
    run = Run()
    run.log.append(f"lost group={A}/3 reason=outbox")
    assert run.check(tmp_path) == {"P3": (f"{A}/3 was given up by its sender",)}


DROPPED = ("stale", "abandoned", "filtered", "evaluated", "mismatched", "invalid")


@pytest.mark.parametrize("fate", DROPPED)
def test_p3_a_group_that_could_be_trained_and_was_dropped(tmp_path: Path, fate: str) -> None:
    run = Run()
    run.journal[3][1] = ("bb", 2, fate)  # a step old, as old as may be
    run.accounting["trained"] -= 1
    run.accounting[fate] = run.accounting.get(fate, 0) + 1
    assert run.check(tmp_path) == {"P3": (f"{B}/2 is {fate} at step 3 without a cause",)}


def test_p3_all_groups_dropped_as_stale(tmp_path: Path) -> None:
    run = Run()
    for step, groups in run.journal.items():
        run.journal[step] = [
            (incarnation, sequence, "stale") for incarnation, sequence, _ in groups
        ]
    run.accounting |= {"trained": 0, "stale": 7}
    assert len(run.check(tmp_path)["P3"]) == 6  # all but the one that is too old


def rolled_back() -> Run:
    """Step 3 was published, and left behind by a roll-back to 1; of its weights is group 3."""
    run = Run()
    run.events.insert(3, {"event": "publish", "step": 3, "number": 9, "weights_id": "w9"})
    run.events.insert(4, {"event": "roll_back", "step": 1})
    run.log[4] = f"made group={A}/3 step=3 weights_id=w9"
    run.log.insert(5, "loaded version=9 step=3 weights_id=w9 seconds=0.1")
    run.journal[2].append(("aa", 3, "abandoned"))
    run.accounting |= {"made": 8, "abandoned": 1}
    return run


def test_p3_a_group_of_weights_that_a_roll_back_left_behind_is_abandoned(tmp_path: Path) -> None:
    run = rolled_back()
    assert run.check(tmp_path) == {}
    del run.events[4]
    (tmp_path / "again").mkdir()
    broken = {"P3": (f"{A}/3 is abandoned at step 2 without a cause",)}
    assert run.check(tmp_path / "again") == broken


def test_p3_a_group_with_tokens_of_weights_left_behind_is_abandoned_too(tmp_path: Path) -> None:
    run = rolled_back()
    run.log[4] = (
        f"made group={A}/3 step=1 weights_id=w1 newest=2"  # the newest of what was left behind
    )
    assert run.check(tmp_path) == {}
    (tmp_path / "again").mkdir()
    run.log[4] = f"made group={A}/3 step=0 weights_id=w0 newest=1"  # of what is there by then
    broken = {"P3": (f"{A}/3 is abandoned at step 2 without a cause",)}
    assert run.check(tmp_path / "again") == broken


def test_p3_one_of_the_new_line_is_not(tmp_path: Path) -> None:
    run = rolled_back()
    run.log[4] = f"made group={A}/3 step=1 weights_id=w1 newest=2"
    run.journal[3].append(run.journal[2].pop())
    broken = {"P3": (f"{A}/3 is abandoned at step 3 without a cause",)}
    assert run.check(tmp_path) == broken


def test_p3_a_group_of_other_weights_is_not_and_one_of_these_is_not_trained(tmp_path: Path) -> None:
    run = rolled_back()
    run.journal[2][:2] = [("aa", 2, "abandoned"), ("bb", 1, 1)]  # made of step 0
    run.accounting |= {"trained": 5, "abandoned": 2}
    broken = {"P3": (f"{A}/2 is abandoned at step 2 without a cause",)}
    assert run.check(tmp_path) == broken
    run = rolled_back()
    run.journal[2][2] = ("aa", 3, 1)
    run.accounting |= {"trained": 7, "abandoned": 0}
    (tmp_path / "again").mkdir()
    broken = run.check(tmp_path / "again")
    assert broken["P3"] == (f"{A}/3 is trained at step 2 without a cause",)
    assert broken["P4"] == (f"{A}/3 is of step 1, and of step 3 in the log",)


def test_p3_a_group_is_evaluated_if_it_was_made_for_that_and_only_then(tmp_path: Path) -> None:
    run = Run()
    run.log[-4] += " evaluation_step=1"
    assert run.check(tmp_path) == {"P3": (f"{B}/2 is trained at step 3 without a cause",)}
    run.journal[3][1] = ("bb", 2, "evaluated")
    run.accounting |= {"trained": 5, "evaluated": 1}
    (tmp_path / "again").mkdir()
    assert run.check(tmp_path / "again") == {}


@pytest.mark.parametrize(
    ("event", "sound"),
    [
        ({}, True),
        ({"step": 3}, False),  # it was not distrusted yet
        ({"incarnation": BOOTS["aa"].hex()}, False),
        ({"dropped": False}, False),
    ],
)
def test_p3_a_group_is_mismatched_if_its_sender_was_dropped_before(
    tmp_path: Path, event: Row, sound: bool
) -> None:
    run = Run()
    run.journal[3][1] = ("bb", 2, "mismatched")
    run.accounting |= {"trained": 5, "mismatched": 1}
    named = {"generator": "ann", "incarnation": BOOTS["bb"].hex(), "step": 2, "dropped": True}
    run.events.append({"event": "mismatch", **named, **event})
    assert (run.check(tmp_path) == {}) == sound


def test_p3_a_group_is_filtered_where_the_settings_say_so(tmp_path: Path) -> None:
    run = Run(filters=True)
    run.journal[3][1] = ("bb", 2, "filtered")
    run.accounting |= {"trained": 5, "filtered": 1}
    assert run.check(tmp_path) == {}


def test_p3_a_shorter_run_that_was_continued_ends_its_generators(tmp_path: Path) -> None:
    run = Run()
    run.log.insert(5, "10:00:02 bin/generator run complete: groups=4")
    assert run.check(tmp_path) == {}  # else the unsent group of `aa` would have no fate
    run.log = [line for line in run.log if B not in line and "generator=" not in line]
    (tmp_path / "again").mkdir()
    assert run.check(tmp_path / "again")["P3"] == (f"{A}/3 of step 0 has no fate",)


def test_p3_who_comes_back_after_the_last_step_does_not_speak_for_the_one_killed(
    tmp_path: Path,
) -> None:
    run = Run()
    del run.journal[3][0]
    run.accounting |= {"stale": 0, "in_flight": 1}
    run.log.insert(-1, "10:00:06 bin/generator generator=ann threads=1 version=3")
    assert run.check(tmp_path) == {}


def test_p4_a_group_older_than_the_limit(tmp_path: Path) -> None:
    run = Run()
    run.journal[3][1] = ("bb", 2, 0)
    run.log[-4] = f"made group={B}/2 step=0 weights_id=w0"
    assert run.check(tmp_path) == {"P4": (f"{B}/2 is 2 steps old at step 3",)}


def test_p4_a_group_of_weights_that_were_not_there_yet(tmp_path: Path) -> None:
    run = Run()
    run.journal[3][1] = ("bb", 2, 3)  # what step 3 makes
    run.log[-4] = f"made group={B}/2 step=3 weights_id=w2"
    assert run.check(tmp_path) == {"P4": (f"{B}/2 is -1 steps old at step 3",)}


def test_p4_a_group_that_is_older_than_it_claims(tmp_path: Path) -> None:
    run = Run()
    run.log[-4] = f"made group={B}/2 step=0 weights_id=w0"
    assert run.check(tmp_path) == {"P4": (f"{B}/2 is of step 1, and of step 0 in the log",)}


def test_p5_a_step_that_is_missing(tmp_path: Path) -> None:
    assert Run(steps=[1, 3]).check(tmp_path)["P5"] == ("steps 2 to 2: 1 missing",)


def test_p5_a_run_that_has_not_ended(tmp_path: Path) -> None:
    Run().check(tmp_path)
    (tmp_path / "summary.json").unlink()
    broken = {each.promise: each.broken for each in promise_checker.check(read_history(tmp_path))}
    assert broken["P5"] == ("there is no summary: the run has not ended",)
    assert broken["P6"] == ("the summary has none",)


def test_p6_group_that_no_generator_made(tmp_path: Path) -> None:
    run = Run()
    run.log.remove(f"10:00:01 bin/generator made group={A}/2 step=0 weights_id=w0")
    assert f"{A}/2 was never made" in run.check(tmp_path)["P6"]


def test_p2_a_group_that_was_dropped_and_trained(tmp_path: Path) -> None:
    run = Run()
    run.journal[2].append(("bb", 0, 0))
    assert run.check(tmp_path) == {"P2": (f"{B}/0 is 2 times in the journal",)}


@pytest.mark.parametrize(
    ("stated", "broken"),
    [
        ({"trained": 5}, "trained is 5 in the summary, 6 in the records"),
        ({"stale": 0}, "stale is 0 in the summary, 1 in the records"),
        ({"no_signal": 1}, "no_signal is 1 in the summary, 0 in the records"),
        ({"made": 8}, "lost or in flight is 0 in the summary, 1 in the records"),
        ({"made": 10, "in_flight": 3}, "made is 10 in the summary, 7 to 9 in the records"),
        ({"made": 6, "in_flight": -1}, "made is 6 in the summary, 7 to 9 in the records"),
        ({"in_flight": 1}, "lost or in flight is 1 in the summary, 0 in the records"),
        ({"lost": 1}, "lost is 1 in the summary, 0 in the logs"),
    ],
)
def test_p6_a_summary_that_counts_otherwise(
    tmp_path: Path, stated: dict[str, int], broken: str
) -> None:
    run = Run()
    run.accounting |= stated
    assert broken in run.check(tmp_path)["P6"]


@pytest.mark.parametrize(
    ("last_reports", "made", "broken"),
    [
        ({B: 5}, 8, ()),  # with the late group, without the unsent one of `aa`
        ({B: 5}, 9, ()),  # an earlier report may have contained this loss
        ({B: 5}, 7, ("made is 7 in the summary, 8 to 9 in the records",)),
        ({A: 4, B: 5}, 9, ()),
        ({A: 4, B: 5}, 8, ("made is 8 in the summary, 9 in the records",)),
        ({B: 6}, 9, (f"{B} has made 6 by its last report, 5 by the logs",)),
    ],
)
def test_p6_of_a_sender_whose_last_report_came_every_group_is_counted(
    tmp_path: Path, last_reports: dict[str, int], made: int, broken: tuple[str, ...]
) -> None:
    run = Run(last_reports=last_reports)
    run.accounting |= {"made": made, "in_flight": made - 7}
    assert run.check(tmp_path).get("P6", ()) == broken


def test_p6_a_group_without_signal_counts_as_no_signal(tmp_path: Path) -> None:
    run = Run()
    run.journal[3].remove(("bb", 3, 1))
    run.accounting |= {"trained": 5, "no_signal": 1}
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "step_000003.msgpack").write_bytes(
        record_of("bb", 3, 1, rewards=(1.0, 1.0))
    )
    assert run.check(tmp_path) == {}


def test_the_table_names_the_broken_promise_and_the_exit_code_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    run.check(tmp_path)
    assert promise_checker.main([str(tmp_path)]) == 0
    assert "FAIL" not in capsys.readouterr().out
    log = tmp_path / "elsewhere.log"
    log.write_text("\n".join([*run.log, "refused version=2 reason=shape"]))
    assert promise_checker.main([str(tmp_path), str(log)]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and failed[0].startswith("FAIL  P1 torn 1: ")
    assert failed[0].endswith("version=2 refused")


def test_table_counts_violations(tmp_path: Path) -> None:
    Run().check(tmp_path)
    run = Run()
    run.log += ["refused version=2 reason=shape"] * 3 + [f"lost group={A}/3 reason=outbox", LOG[1]]
    run.journal[2][0] = ("aa", 1, 0)
    run.steps.remove(2)
    (tmp_path / "again").mkdir()
    run.check(tmp_path / "again")
    sound, broken = (
        [each.line[6:].split(":")[0] for each in promise_checker.check(read_history(folder))]
        for folder in (tmp_path, tmp_path / "again")
    )
    assert sound[:3] == ["P1 torn 0", "P2 twice 0", "P3 lost 0"]
    assert broken[:3] == ["P1 torn 3", "P2 twice 2", "P3 lost 1"]
    assert (sound[4], broken[4]) == ("P5 3 steps of 3, 1 resumes", "P5 2 steps of 3, 1 resumes")


def test_a_worker_that_ended_by_itself_is_named_and_one_that_was_killed_is_not(
    tmp_path: Path,
) -> None:
    run = Run()
    run.events += [
        {"event": "restart", "worker": "trainer", "reason": "killed by SIGKILL", "killed": True},
        {"event": "restart", "worker": "generator-0", "reason": "exit code 1", "killed": False},
        {"event": "restart", "worker": "generator-1", "reason": "killed by SIGKILL",
         "killed": False},  # for want of memory, say
    ]  # fmt: skip
    assert run.check(tmp_path) == {}
    assert promise_checker.unexpected_ends(read_history(tmp_path)).line == (
        "FAIL  ended by themselves 2, after a kill 1: "
        "generator-0 (exit code 1); generator-1 (killed by SIGKILL)"
    )
    run.events = run.events[:-2]
    (tmp_path / "again").mkdir()
    run.check(tmp_path / "again")
    line = promise_checker.unexpected_ends(read_history(tmp_path / "again")).line
    assert line == "ok    ended by themselves 0, after a kill 1"


def test_a_copy_beside_the_files_of_a_journal_is_not_read(tmp_path: Path) -> None:
    Run().check(tmp_path)
    journal = tmp_path / "journal"
    before = list(read_journal(journal))
    shutil.copy(journal / "step_000002.msgpack", journal / "step_000002.old.msgpack")
    assert list(read_journal(journal)) == before
