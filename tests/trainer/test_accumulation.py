"""Steps whose micro-batches are computed while groups arrive: replay, kills, stops, drops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace as changed

import pytest
from trainer_sessions import Continued, groups_for

from peralta_zmq.learning.optimizer import UpdateSettings
from peralta_zmq.observe.metrics import METRICS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer.journal import BEGUN, GROUP, read_records
from peralta_zmq.trainer.trainer import Trainer

STEPS, GROUPS_PER_STEP = 2, 2
# A group of four rollouts needs at least two micro-batches.
SETTINGS = ("--train.max-tokens-per-microbatch=20", "--train.dtype=float32")
ADAPTERS = ("--lora.rank=4",)


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
        self._num_awaited = 0  # groups that the trainer has received when the next one is sent

    def advance(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take one step, or less."""
        groups_of_step = trainer.collector.groups

        def groups(step: int, update: UpdateSettings) -> Iterator[list[RolloutGroup]]:
            for groups in groups_of_step(step, update):
                yield groups
                if self._kills and trainer.policy.learner.seconds:
                    raise Killed
                admission = trainer.collector.admission
                num_received = admission.ledger.total + admission.duplicates
                if not groups and num_received >= self._num_awaited:
                    self._continued.send(self._groups.pop(0))
                    self._num_awaited = num_received + 1

        with monkeypatch.context() as patched:
            patched.setattr(trainer.collector, "groups", groups)
            trainer.advance()
        trainer.publishing.wait()


def kinds_of(continued: Continued, step: int) -> list[int]:
    records, _ = read_records(continued.folder / "journal", step)
    return [record.kind for record in records]


def test_replay_computes_the_micro_batches_of_the_run(
    continued: Continued, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with continued.session(*SETTINGS, max_steps=STEPS) as trainer:
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
        assert kinds.count(GROUP) == GROUPS_PER_STEP
        assert kinds[-2:] == [GROUP, BEGUN]  # the group completes the batch
    assert continued.replay(capsys) == ["as published"] * STEPS


@pytest.mark.parametrize(
    "more", [pytest.param((), id="full"), pytest.param(ADAPTERS, id="lora", marks=pytest.mark.slow)]
)
def test_sessions_that_end_within_a_step_continue_as_the_journal_says(
    continued: Continued,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
) -> None:
    if more:
        pytest.importorskip("peft", reason="the extra lora is not installed")
    for end in ("killed", "killed after a commit", "stopped"):
        with continued.session(*SETTINGS, *more, max_steps=STEPS) as trainer:
            generator = SlowGenerator(continued, groups_for(trainer), kills=True)
            with pytest.raises(Killed):
                generator.advance(trainer, monkeypatch)
            if end != "killed":
                trainer.collector.commit()
            if end == "stopped":
                trainer.session.stop.requested = True
                trainer.advance()
                trainer.finish()
        assert kinds_of(continued, 1).count(GROUP) == (end != "killed")
    with continued.session(*SETTINGS, *more, max_steps=STEPS) as trainer:
        assert len(trainer.collector.batch) == 1
        generator = SlowGenerator(continued, groups_for(trainer))  # from the first one
        for _ in range(STEPS):
            generator.advance(trainer, monkeypatch)
        outcomes = trainer.collector.admission.ledger.outcomes
    assert outcomes["trained"] + outcomes["no_signal"] == STEPS * GROUPS_PER_STEP
    assert continued.replay(capsys) == ["as published"] * STEPS


def test_dropped_groups_of_a_step_change_no_micro_batch(
    continued: Continued, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with continued.session(*SETTINGS, max_steps=1) as trainer:
        first, second, last, *_ = groups_for(trainer)
        # From weights that do not exist; it would complete the batch.
        undone = changed(second, rollouts=tuple(
            changed(each, policy_steps=each.policy_steps + 5) for each in second.rollouts
        ), policy_step=5)  # fmt: skip
        generator = SlowGenerator(continued, [first, first, undone, last])
        generator.advance(trainer, monkeypatch)
        admission = trainer.collector.admission
        assert (admission.ledger.outcomes["abandoned"], admission.duplicates) == (1, 1)
    assert continued.replay(capsys) == ["as published"]
