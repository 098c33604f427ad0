"""The end of a trainer session: the run complete, or stopped by a signal."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import cast

import pytest
from faults import failing, on_pause
from sample_data import INCARNATION
from trainer_sessions import Continued, Session

from peralta_zmq import wire
from peralta_zmq.observe import report
from peralta_zmq.observe.metrics import EVENTS, Row, read_rows
from peralta_zmq.observe.run_state import SESSION_ENDS, SESSION_STARTS
from peralta_zmq.trainer.session import StopSignal
from peralta_zmq.trainer.trainer import Trainer

pytestmark = pytest.mark.timeout(60)
FOUR = "--train.max-steps=4"


def complete(stack: ExitStack, folder: Path) -> Trainer:
    """A trainer that has taken all four steps, before `finish`."""
    trainer = Session(stack, folder, FOUR).trainer
    while trainer.unfinished:
        trainer.advance()
    return trainer


def test_long_last_evaluation_makes_no_generator_leave(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = complete(stack, tmp_path)
    assert trainer.generators.live
    clock, passed, evaluate = time.monotonic, [0.0], trainer.evaluations.evaluate

    def evaluate_slowly(step: int) -> Iterator[None]:
        passed[0] += trainer.generators.limits.live_seconds + 1
        yield from evaluate(step)

    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])
    monkeypatch.setattr(trainer.evaluations, "evaluate", evaluate_slowly)
    trainer.finish()
    events = [row["event"] for row in read_rows(trainer.session.folder / EVENTS)]
    assert "complete" in events and "leave" not in events
    assert events[events.index("evaluate") :] == ["evaluate", "evaluated", "complete"]


def send_final_status(trainer: Trainer, *, made: int) -> None:
    """Send the final status of the session's generator until the trainer has received it."""
    address = f"tcp://127.0.0.1:{trainer.session.config.wire.port}"
    last = wire.GeneratorStatus(trainer.session.run_id, "ann", INCARNATION, made=made, last=True)
    with closing(wire.GeneratorStatusSender(wire.next_port(address, 2))) as sender:
        while not trainer.generators.num_made:
            sender.send(last)  # lost until the sockets are connected
            trainer.generators.receive_status(step=4, timeout=0.2)


def summary_of(trainer: Trainer) -> Row:
    trainer.finish()
    summary = json.loads((trainer.session.folder / "summary.json").read_bytes())
    return {key: summary[key] for key in ("accounting", "final_statuses")}


def test_complete_run_started_again_keeps_its_accounting(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = complete(stack, tmp_path)
        send_final_status(first, made=60)
        status = wire.GeneratorStatus(first.session.run_id, "bob", INCARNATION, made=3)  # killed
        first.generators.add_status(status, step=4)
        summary = summary_of(first)
    accounting = cast("dict[str, int]", summary["accounting"])
    assert (accounting["made"], summary["final_statuses"]) == (63, {f"ann/{INCARNATION.hex()}": 60})
    for _ in range(2):
        with ExitStack() as stack:
            assert summary_of(Session(stack, tmp_path, FOUR).trainer) == summary


def test_final_status_survives_a_kill_during_the_evaluation(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = complete(stack, tmp_path)
        send_final_status(first, made=60)  # and no `finish`
    with ExitStack() as stack:
        summary = summary_of(Session(stack, tmp_path, FOUR).trainer)
    assert summary["final_statuses"] == {f"ann/{INCARNATION.hex()}": 60}
    assert cast("dict[str, int]", summary["accounting"])["made"] == 60


def test_run_stopped_in_its_last_evaluation_is_closed_by_the_next_start(
    tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as opened:
        first = complete(opened, tmp_path)
        first.session.stop.requested = True
        first.finish()
        assert "stopped after step 4, saved; the same" in capsys.readouterr().out
        assert not (first.session.folder / "summary.json").exists()
        assert not first.session.run_log.has_evaluation(4)
    again = Session(stack, tmp_path, FOUR).trainer
    assert summary_of(again) and again.session.run_log.has_evaluation(4)


def test_end_of_a_run_waits_for_its_disk(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = complete(stack, tmp_path)
    monkeypatch.setattr(report, "replace_file", failing(errno.ENOSPC))
    pauses = list[bool]()

    def make_room() -> None:
        pauses.append(True)
        monkeypatch.undo()

    on_pause(monkeypatch, make_room)
    assert summary_of(trainer) and pauses == [True]


def last_step_in_an_outage(stack: ExitStack, folder: Path) -> tuple[Trainer, Callable[[], object]]:
    """A trainer after its last step, without its weights folder; and what puts the folder back."""
    trainer = Session(stack, folder, FOUR).trainer
    while trainer.step < 3:
        trainer.advance()
    trainer.publishing.wait()
    weights = trainer.publishing.store.folder
    away = weights.rename(weights.with_name("away"))
    trainer.advance()
    return trainer, lambda: away.rename(weights)


def events_of(trainer: Trainer) -> list[object]:
    return [row["event"] for row in read_rows(trainer.session.folder / EVENTS)]


def test_complete_run_waits_until_its_last_version_is_published(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trainer, end_outage = last_step_in_an_outage(stack, tmp_path)
    pause, done = StopSignal.pause, list[bool]()

    def end_outage_and_pause(stop: StopSignal, seconds: float) -> None:
        if not done:
            end_outage()
        done.append(trainer.session.announcer.announcement.done)
        pause(stop, seconds)

    monkeypatch.setattr(StopSignal, "pause", end_outage_and_pause)
    trainer.finish()
    newest = trainer.publishing.store.newest()
    assert newest is not None and (newest.step, newest.kind) == (4, "keyframe")
    assert done and not any(done) and trainer.session.announcer.announcement.done
    events = events_of(trainer)
    assert events.index("outage") < events.index("evaluate") and events[-1] == "complete"
    printed = capsys.readouterr().out
    assert "is gone; is it mounted?. Waiting, nothing is lost" in printed
    assert f'from_pretrained("{newest.folder}")' in printed


def test_stop_in_an_outage_at_the_end_lets_the_next_start_publish(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as opened, monkeypatch.context() as patched:
        trainer, end_outage = last_step_in_an_outage(opened, tmp_path)
        on_pause(patched, lambda: setattr(trainer.session.stop, "requested", True))
        trainer.finish()
        assert not trainer.session.announcer.announcement.done
        assert events_of(trainer)[-1] == "stop"
        assert not (trainer.session.folder / "summary.json").exists()
    end_outage()
    again = Session(stack, tmp_path, FOUR).trainer
    assert summary_of(again) and again.session.announcer.announcement.done
    newest = again.publishing.store.newest()
    assert newest is not None and newest.step == 4
    events = [event for event in events_of(again) if event in SESSION_STARTS + SESSION_ENDS]
    assert events == ["start", "stop", "resume", "complete"]


def test_stopped_run_writes_its_report(tmp_path: Path, stack: ExitStack) -> None:
    trainer = Session(stack, tmp_path).trainer
    trainer.advance()
    trainer.session.stop.requested = True
    trainer.finish()
    page = (trainer.session.folder / "report.html").read_text("utf-8")
    assert '"status": "stopped"' in page


def test_verdict_is_printed_while_the_trainer_waits_for_groups(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trainer = Continued(tmp_path).open(stack, max_steps=4)  # without groups
    trainer.recover()
    trainer.session.run_log.event("resume", step=trainer.policy.learner.step)
    capsys.readouterr()
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 45.0)
    groups = trainer.collector.groups
    monkeypatch.setattr(trainer.collector, "groups", lambda *step: islice(groups(*step), 1))
    trainer.advance()  # waits once
    line = "verdict: no step yet: no generator has joined in 45s; start one: bin/generator @ CONFIG"
    assert line in capsys.readouterr().out.splitlines()
