"""Steps whose micro-batches are computed while groups arrive: replay, kills, stops, drops."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace as changed
from pathlib import Path

import pytest
from trainer_sessions import Continued, groups_for

from peralta_zmq.observe.metrics import METRICS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.journal import ACCUMULATED, GROUP, JournalRecord, read_records
from peralta_zmq.trainer.loop import Trainer

STEPS, GROUPS_PER_STEP = 2, 2
# A group of four rollouts needs at least two micro-batches.
SETTINGS = ("--train.max-tokens-per-microbatch=20", "--train.dtype=float32")
DROPOUT = ("--lora.rank=4", "--lora.dropout=0.2")


class Killed(Exception):
    """The session ends like that of a killed trainer."""


class SlowGenerator:
    """Sends a group whenever the trainer of `continued` has waited for one in vain.

    With `kills` the trainer is killed after its first micro-batch.
    """

    def __init__(
        self, continued: Continued, groups: Sequence[RolloutGroup], *, kills: bool = False
    ) -> None:
        self._continued, self._groups, self._kills = continued, [*groups], kills

    def advance(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take one step, or less."""

        def between_groups(idle: bool) -> None:
            if self._kills and trainer.accumulation.seconds:
                raise Killed
            if idle:
                self._continued.send(self._groups.pop(0))

        with monkeypatch.context() as patched:
            patched.setattr(trainer, "_between_groups", between_groups)
            trainer.advance()
        trainer.publishing.wait()


def records_of(continued: Continued, step: int) -> list[JournalRecord]:
    return read_records(continued.folder / "journal", step)[0]


def kinds_of(continued: Continued, step: int) -> list[int]:
    return [record.kind for record in records_of(continued, step)]


def is_as_published(continued: Continued, capsys: pytest.CaptureFixture[str]) -> list[bool]:
    capsys.readouterr()
    replay.main([str(continued.folder)])
    return [line.endswith("  as published") for line in capsys.readouterr().out.splitlines()]


def remove_accumulated(folder: Path) -> None:
    """Remove the records of micro-batches from the journal."""
    journal = replay.journal.Journal(folder / "journal")
    for step in range(1, STEPS + 1):
        records = read_records(folder / "journal", step)[0]
        journal.replace(step, [each for each in records if each.kind != ACCUMULATED])
    journal.close()


def test_replay_computes_the_micro_batches_of_the_run(
    continued: Continued, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        trainer = continued.open(stack, *SETTINGS, max_steps=STEPS)
        trainer.recover()
        generator = SlowGenerator(continued, groups_for(trainer))
        for _ in range(STEPS):
            generator.advance(trainer, monkeypatch)
    for row in read_rows(continued.folder / METRICS):
        seconds = {name: float(str(value)) for name, value in row.items() if "time/" in name}
        overlapped = seconds.pop("time/overlapped")
        assert 0 < overlapped < seconds["time/forward_backward"]
        assert sum(seconds.values()) < float(str(row["step_time"]))
        assert seconds["time/wait_for_batch"] > 0.02  # at least one receive has timed out
    for step in range(1, STEPS + 1):
        kinds = kinds_of(continued, step)
        assert ACCUMULATED in kinds and kinds.count(GROUP) == GROUPS_PER_STEP
        assert kinds[-1] == GROUP  # which completes the batch
    assert is_as_published(continued, capsys) == [True] * STEPS
    remove_accumulated(continued.folder)
    assert is_as_published(continued, capsys) == [False] * STEPS


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="full"),
        pytest.param(DROPOUT, id="lora_dropout", marks=pytest.mark.slow),
    ],
)
def test_sessions_that_end_within_a_step_continue_as_the_journal_says(
    continued: Continued,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
) -> None:
    if more:
        pytest.importorskip("peft", reason="the extra lora is not installed")
    for end, num_journaled in (("killed", 0), ("killed after a commit", 1), ("stopped", 1)):
        with ExitStack() as stack:
            trainer = continued.open(stack, *SETTINGS, *more, max_steps=STEPS)
            trainer.recover()
            generator = SlowGenerator(continued, groups_for(trainer), kills=True)
            with pytest.raises(Killed):
                generator.advance(trainer, monkeypatch)
            if end != "killed":
                trainer.collector.commit()
            if end == "stopped":
                trainer.session.stop.requested = True
                trainer.advance()
                trainer.finish()
        kinds = kinds_of(continued, 1)
        assert (kinds.count(GROUP), kinds.count(ACCUMULATED)) == (1, num_journaled)
    with ExitStack() as stack:
        trainer = continued.open(stack, *SETTINGS, *more, max_steps=STEPS)
        trainer.recover()
        assert trainer.collector.accumulated_sizes == [1]
        generator = SlowGenerator(continued, groups_for(trainer))  # from the first one
        for _ in range(STEPS):
            generator.advance(trainer, monkeypatch)
        outcomes = trainer.collector.admission.ledger.outcomes
    assert outcomes["trained"] + outcomes["no_signal"] == STEPS * GROUPS_PER_STEP
    assert is_as_published(continued, capsys) == [True] * STEPS


def test_dropped_groups_of_a_step_change_no_micro_batch(
    continued: Continued, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        trainer = continued.open(stack, *SETTINGS, max_steps=1)
        trainer.recover()
        with pytest.raises(Killed):
            SlowGenerator(continued, groups_for(trainer), kills=True).advance(trainer, monkeypatch)
        trainer.collector.commit()
    with ExitStack() as stack:
        trainer = continued.open(stack, *SETTINGS, "--checkpoint.skip-buffer", max_steps=1)
        trainer.recover()  # drops the first group, of which a micro-batch has been computed
        assert ACCUMULATED not in kinds_of(continued, 1) and not trainer.collector.accumulated_sizes
        dropped, first, second, last, *_ = groups_for(trainer)
        # From weights that do not exist; it would complete the batch.
        undone = changed(second, rollouts=tuple(
            changed(each, policy_steps=each.policy_steps + 5) for each in second.rollouts
        ), policy_step=5)  # fmt: skip
        generator = SlowGenerator(continued, [dropped, first, first, undone, last])
        generator.advance(trainer, monkeypatch)
        admission = trainer.collector.admission
        assert (admission.ledger.outcomes["abandoned"], admission.duplicates) == (2, 2)
    assert ACCUMULATED in kinds_of(continued, 1)
    assert is_as_published(continued, capsys) == [True]
