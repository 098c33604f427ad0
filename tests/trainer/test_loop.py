"""Opening and recovery of a trainer: refused settings and files, damaged state."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import failing, failing_until_pause, on_pause, start_and_end
from sample_data import group_of
from trainer_sessions import Session, groups_for

from peralta_zmq import atomic_files, models, wire
from peralta_zmq.atomic_files import is_held
from peralta_zmq.config import Config, load_config, write_resolved
from peralta_zmq.errors import (
    ConfigError,
    JournalError,
    OutageError,
    PeraltaError,
    StoreError,
    TaskError,
    WireError,
)
from peralta_zmq.learning.admission import Ledger
from peralta_zmq.learning.learner import StepResult
from peralta_zmq.observe.metrics import EVENTS, LOCK, METRICS, SAMPLES, read_rows
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.trainer import checkpoint, generator_registry, trainer
from peralta_zmq.trainer.collector import CollectorLimits
from peralta_zmq.trainer.journal import DROPPED, GROUP, DroppedGroup
from peralta_zmq.trainer.session import IDENTITY, lock
from peralta_zmq.trainer.trainer import Trainer
from tools.link_proxy import free_ports


@pytest.fixture
def port() -> int:
    return free_ports()


@pytest.fixture
def settings(tmp_path: Path, port: int) -> list[str]:
    return ["--run.dir", str(tmp_path / "runs"), "--wire.port", str(port), "--dashboard.port=None"]


def config_of(*arguments: str) -> Config:
    return load_config("bin/trainer", list(arguments))


def refused(config: Config, kind: type[PeraltaError], match: str) -> None:
    """Assert that the run ends with a one-line error and writes nothing."""
    with pytest.raises(kind, match=match) as caught:
        trainer.run(config)
    assert "\n" not in str(caught.value)
    assert not config.run_folder.exists()


@pytest.mark.parametrize(
    ("setting", "value", "kind", "match"),
    [
        ("model.name", "{folder}", ConfigError, r"no config\.json; give a Hugging Face model fold"),
        ("model.name", "nobody/x", ConfigError, r"fetch it once with: hf download nobody/x"),
        ("data.train", "math_1kk", TaskError, r"math_1kk.*did you mean 'math_1k'"),
        ("data.prompt-column", "q", TaskError, r"'?q'?.*python_expression.*natural_language"),
        ("data.train", "{folder}/empty.csv", TaskError, r"empty\.csv"),
        ("loss.name", "gropo", ConfigError, r"'gropo'; did you mean grpo\?.*reinforce"),
        ("model.device", "abacus", ConfigError, r"device 'abacus' cannot be used here"),
    ],
)
def test_start_refuses_a_setting_and_writes_nothing(
    settings: list[str],
    tmp_path: Path,
    setting: str,
    value: str,
    kind: type[PeraltaError],
    match: str,
) -> None:
    (tmp_path / "empty.csv").write_text("python_expression,natural_language\n")
    refused(config_of(*settings, f"--{setting}", value.format(folder=tmp_path)), kind, match)


@pytest.mark.parametrize("offset", [0, 1])
def test_port_in_use_is_refused_with_its_process(
    settings: list[str], port: int, offset: int
) -> None:
    with socket.create_server(("127.0.0.1", port + offset)):
        message = f"port {port + offset} is in use by pid {os.getpid()} "
        refused(config_of(*settings), WireError, message)


def test_weights_folder_of_another_run_is_refused(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "nas").mkdir()
    (tmp_path / "nas" / "RUN.json").write_text(json.dumps({"run_id": "other-1"}))
    config = config_of(*settings, "--weights.dir", str(tmp_path / "nas"))
    refused(config, StoreError, r"belongs to run other-1.*choose another with --weights\.dir")


def test_run_folder_with_other_settings_is_refused_and_unchanged(settings: list[str]) -> None:
    earlier = config_of(*settings)
    earlier.run_folder.mkdir(parents=True)
    write_resolved(earlier, earlier.run_folder)
    before = (earlier.run_folder / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"loss\.name 'reinforce' -> 'grpo'"):
        trainer.run(config_of(*settings, "--loss.name", "grpo"))
    assert [each.name for each in earlier.run_folder.iterdir()] == ["config.toml"]
    assert (earlier.run_folder / "config.toml").read_bytes() == before


def test_run_with_an_edited_template_or_tokenizer_is_refused(
    settings: list[str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models.EMBEDDED, tmp_path / "model"))
    file = folder / "tokenizer_config.json"
    config = config_of(*settings, "--model.name", str(folder))
    before = file.read_text("utf-8")
    for text in (before, before):
        file.write_text(text, "utf-8")
        start_and_end(config)
    file.write_text(before.replace("{{ message.role }}", "{{ message.role | upper }}"), "utf-8")
    identity = (config.run_folder / "RUN.json").read_bytes()
    changed = r"have changed since .*: chat_template=\w{16} -> chat_template=\w{16}; put them back"
    with pytest.raises(ConfigError, match=changed):
        start_and_end(config)
    assert (config.run_folder / "RUN.json").read_bytes() == identity


def test_second_trainer_on_a_run_folder_is_refused(settings: list[str]) -> None:
    config = config_of(*settings)
    start_and_end(config)
    # The lock is the one that the first trainer would hold.
    refused = pytest.raises(ConfigError, match=r"another trainer uses .*--run\.name")
    with closing(lock(config.run_folder)), refused:
        trainer.run(config)


def test_lock_held_for_a_moment_by_a_reader_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = (tmp_path / LOCK).open("ab")
    fcntl.flock(reader, fcntl.LOCK_SH)

    def end_reading(seconds: float) -> None:
        reader.close()

    monkeypatch.setattr(time, "sleep", end_reading)
    with closing(lock(tmp_path)):
        assert is_held(tmp_path / LOCK) is True
    assert is_held(tmp_path / LOCK) is False
    assert is_held(tmp_path / "nothing") is None


@pytest.mark.parametrize("folders", [("nas", "other"), ("", "")], ids=["other", "default"])
def test_run_continues_with_another_or_deleted_weights_folder(
    settings: list[str], tmp_path: Path, folders: tuple[str, ...]
) -> None:
    for name in folders:
        more = ("--weights.dir", str(tmp_path / name)) if name else ()
        with ExitStack() as stack:
            trainer = Trainer(config_of(*settings, *more), stack)
            assert trainer.publishing.store.run_id == trainer.session.run_id
        shutil.rmtree(trainer.publishing.store.folder)


@pytest.mark.timeout(60)
def test_keyframe_request_of_a_generator_is_served_once(settings: list[str], port: int) -> None:
    with ExitStack() as stack:
        trainer = Trainer(config_of(*settings), stack)
        trainer.generators.limits = generator_registry.RegistryLimits(keyframe_seconds=0.0)
        trainer.recover()
        sender = stack.enter_context(
            closing(wire.GeneratorStatusSender(f"tcp://127.0.0.1:{port + 2}"))
        )
        status = wire.GeneratorStatus(trainer.session.run_id, "ann", b"bootboot")

        def deliver(status: wire.GeneratorStatus) -> None:
            # The first one may be lost.
            while not any(known.status == status for known in trainer.generators.live):
                sender.send(status)
                trainer.generators.receive_status(step=1)

        def kind_of_next() -> str:
            before = trainer.publishing.store.newest()
            trainer.publish()
            trainer.publishing.wait()
            newest = trainer.publishing.store.newest()
            assert newest is not None and newest != before
            return newest.kind

        deliver(status)
        assert kind_of_next() == "delta"
        deliver(replace(status, wants_keyframe=True))
        assert kind_of_next() == "keyframe"
        deliver(replace(status, wants_keyframe=True, made=1))  # not loaded yet: no new request
        assert kind_of_next() == "delta"
        deliver(status)
        deliver(replace(status, wants_keyframe=True))
        assert kind_of_next() == "keyframe"


def test_weights_folder_that_cannot_be_created_is_refused_once(
    settings: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    bad = config_of(*settings, "--weights.dir", str(tmp_path / "file" / "weights"))
    refused(bad, StoreError, r"cannot be written .*choose another with --weights\.dir")
    with ExitStack() as stack:
        assert Trainer(config_of(*settings), stack).unfinished


# Recovery from what an earlier session left.


@pytest.fixture
def opened(settings: list[str]) -> Iterator[Trainer]:
    with ExitStack() as stack:
        yield Trainer(config_of(*settings, "--no-eval.eval-base-model"), stack)


def saved_by(
    trainer: Trainer,
    ledger: Ledger | None = None,
    *,
    duplicates: int = 0,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Save a checkpoint of step 0 of this trainer's run, with an empty ledger by default."""
    folder = trainer.session.folder / "checkpoints"
    state = {**trainer.policy.learner.state(), **(tensors or {})}
    saved = (ledger or Ledger()).saved()
    progress = trainer.collector.state() | {"ledger": saved, "duplicates": duplicates}
    content = checkpoint.Checkpoint(0, state, progress)
    checkpoint.write_checkpoint(folder, content, run_id=trainer.session.run_id)


def journaled_by(trainer: Trainer, *group_numbers: int, step: int = 1, run_id: str = "") -> None:
    """Journal groups for a step, of this run unless another is given."""
    for number in group_numbers:
        rewards = [1, 0] * (trainer.session.config.sampling.num_generations // 2)
        group = group_of(rewards, group_number=number, run_id=run_id or trainer.session.run_id)
        trainer.collector.journal.append(step, wire.encode_group(group))
    trainer.collector.journal.commit()


def test_step_is_not_published_before_its_groups_are_on_disk(
    opened: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.recover()
    collector, finish_step = opened.collector, opened.policy.learner.finish_step
    # No commit before the step.
    collector.limits = CollectorLimits(commit_groups=1000, commit_seconds=1000.0)
    for number in itertools.takewhile(lambda _: not collector.is_full, itertools.count()):
        group = group_of([1, 0], group_number=number, run_id=opened.session.run_id)
        assert collector.add(group, wire.encode_group(group), step=1) == "trained"
    before = dict(collector.acknowledgements.durable)

    def finish_and_stop(**options: Any) -> StepResult:
        opened.session.stop.requested = True  # else it retries until there is room
        return finish_step(**options)

    monkeypatch.setattr(opened.policy.learner, "finish_step", finish_and_stop)
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(OutageError, match="No space left"):
        opened.advance()
    monkeypatch.undo()
    opened.publishing.wait()  # for a version that should not have been begun
    newest = opened.publishing.store.newest()
    assert newest is not None and newest.step == 0
    assert collector.acknowledgements.durable == before and collector.journal.num_waiting
    assert not (opened.session.folder / "checkpoints").exists()


def test_recovery_waits_until_the_journal_can_be_written(
    settings: list[str],
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened = Trainer(config_of(*settings), stack)
    journaled_by(opened, 0)
    monkeypatch.setattr(os, "fsync", failing(errno.EROFS))
    on_pause(monkeypatch, monkeypatch.undo)
    opened.recover()
    assert len(opened.collector.batch) == 1
    printed = capsys.readouterr().out
    assert "step_000001.msgpack: Read-only file system. Waiting" in printed
    assert "the outage is over after" in printed


def test_recovery_waits_until_the_run_folder_can_be_listed(
    settings: list[str], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Trainer(config_of(*settings), stack)
    journaled_by(opened, 0)
    listed = failing_until_pause(monkeypatch, atomic_files, "steps_in", errno.ESTALE)
    opened.recover()
    assert len(opened.collector.batch) == 1 and len(listed) > 2


def test_recovery_waits_until_its_records_can_be_read(
    settings: list[str], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Trainer(config_of(*settings), stack)
    saved_by(opened)
    opened.session.run_log.step({"step": 1, "time": 1.0}, [])  # its groups are not in the journal
    found = failing_until_pause(
        monkeypatch, Path, "exists", errno.EIO, concerns=lambda path: path.suffix == ".jsonl"
    )
    opened.recover()
    assert [path.name for (path,) in found] == [METRICS, EVENTS, EVENTS]


def test_evaluation_request_waits_until_its_records_can_be_read(
    opened: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = failing_until_pause(monkeypatch, RunLog, "has_evaluation", errno.EIO)
    opened.evaluations.request(1)
    assert len(calls) == 1


def test_checkpoints_that_cannot_be_listed_do_not_end_the_run(
    opened: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.recover()
    monkeypatch.setattr(atomic_files, "steps_in", failing(errno.ESTALE))
    opened.checkpoints.try_write()
    event = read_rows(opened.session.folder / EVENTS)[-1]
    assert event["event"] == "checkpoint_failed" and "Stale file handle" in str(event["reason"])


def checkpoint_of_another_model(trainer: Trainer) -> None:
    saved_by(trainer, tensors={"model/model.norm.weight": torch.zeros(3)})


def adapters_of_another_base(trainer: Trainer) -> None:
    fields = trainer.policy.manifest_fields
    fields |= {"adapts": "12", "adapts_name": "x"}
    trainer.checkpoints.update_progress()
    folder, content = trainer.session.folder / "checkpoints", trainer.checkpoints.state(step=0)
    checkpoint.write_checkpoint(folder, content, run_id=trainer.session.run_id)
    fields |= {"adapts_dtype": "nf4", "adapts_packed": "ab"}


def group_in_both(trainer: Trainer) -> None:
    ledger = Ledger()
    ledger.settle(group_of([1, 0]).sender, 0, "trained")
    saved_by(trainer, ledger)
    journaled_by(trainer, 0)


def gap(trainer: Trainer, *left: int) -> None:
    saved_by(trainer)
    journaled_by(trainer, *left)
    journaled_by(trainer, 1, step=2)
    journaled_by(trainer, 2, step=3)


GAP = r"step_000001\.msgpack is missing or .* steps 1 to 3 away to continue from step 0$"
INCONSISTENT: dict[str, tuple[Callable[[Trainer], None], str]] = {
    "checkpoint of another model": (
        checkpoint_of_another_model, r"does not fit.*norm\.weight.*--run\.name",
    ),
    "adapters of another base": (
        adapters_of_another_base,
        r"has adapters for x \(12\), but .* trains adapters for x \(12, nf4, ab\); choose",
    ),
    "group in checkpoint and journal": (group_in_both, r"disagree.*in both; move the newer"),
    "step missing": (gap, GAP),
    "step cut after its first group": (lambda trainer: gap(trainer, 0), GAP),
    "journal of another run": (
        lambda trainer: journaled_by(trainer, 0, run_id="other-0011aabb"),
        r"step_000001\.msgpack holds a group of run other-.* not of demo-.*move it",
    ),
    "no checkpoint before the journal": (
        lambda trainer: journaled_by(trainer, 0, step=5),
        r"begins with step 5, and there is no checkpoint before it; put .*/checkpoints back",
    ),
}  # fmt: skip


@pytest.mark.parametrize("state", INCONSISTENT)
def test_recovery_refuses_inconsistent_state(opened: Trainer, state: str) -> None:
    prepare, match = INCONSISTENT[state]
    prepare(opened)
    with pytest.raises(JournalError, match=match):
        opened.recover()


def test_half_written_checkpoint_is_removed(opened: Trainer) -> None:
    saved_by(opened)
    folder = opened.session.folder / "checkpoints"
    for name in (".tmp-step_000020-99", ".trash-step_000005-99"):
        (folder / name).mkdir()
    opened.recover()
    assert os.listdir(folder) == ["step_000000"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"a whole record", GROUP),
        (b"a whole record", DROPPED),
        (b"[]", DROPPED),
        (b'{"group_number": 0}', DROPPED),
        (b'{"sender": "ann/00", "group_number": 0, "outcome": "vanished"}', DROPPED),
    ],
)
def test_unreadable_record_is_refused_with_its_file(
    opened: Trainer, content: bytes, kind: int
) -> None:
    opened.collector.journal.append(1, content, kind)
    opened.collector.journal.commit()
    with pytest.raises(
        JournalError, match=r"step_000001\.msgpack .*; use the version .* step 0$"
    ) as caught:
        opened.recover()
    assert "\n" not in str(caught.value)


def test_lost_and_duplicate_groups_are_counted_after_a_restart(opened: Trainer) -> None:
    saved_by(opened, duplicates=3)
    dropped = DroppedGroup(group_of([1, 0]).sender, 7, "stale", min_group_number=5)
    opened.collector.journal.append(1, dropped.encode(), DROPPED)
    opened.collector.journal.commit()
    opened.recover()
    counts = opened.collector.accounting()
    expected = {"made": 8, "stale": 1, "lost": 5, "in_flight": 2, "duplicates": 3}
    assert {name: counts[name] for name in expected} == expected


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run_id"'])
def test_unreadable_identity_does_not_start_a_new_run(settings: list[str], text: str) -> None:
    config = config_of(*settings)
    start_and_end(config)
    (config.run_folder / IDENTITY).write_text(text)
    with pytest.raises(JournalError, match=r"RUN\.json cannot be read .*put a copy back"):
        trainer.run(config)


def test_samples_have_every_group_with_its_outcome(stack: ExitStack, tmp_path: Path) -> None:
    session = Session(stack, tmp_path)
    for _ in range(3):
        session.advance()
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    known = {}
    for group in groups_for(session.trainer):
        texts = tuple(tokenizer.decode(each.token_ids.tolist()) for each in group.rollouts)
        known[texts] = group
    rows = read_rows(tmp_path / "demo" / SAMPLES)
    assert Counter(row["step"] for row in rows if row["outcome"] == "trained") == {1: 4, 2: 4, 3: 4}
    assert {row["outcome"] for row in rows} == {"trained", "filtered"}
    for row in rows:
        group = known[tuple(row["texts"])]
        prompt = group.rollouts[0].token_ids[:3].tolist()
        assert row["prompt"] == tokenizer.decode(prompt)
        assert (row["problem"], row["task"]) == (group.problem_id, group.task)
        assert row["cut_off"] == [each.finish_reason == "length" for each in group.rollouts]
        assert (row["generator"], row["policy_step"]) == (group.generator_id, group.policy_step)
        assert tuple(row["rewards"]) == group.rewards
        mean = sum(group.rewards) / 4
        is_trained = row["outcome"] == "trained"
        assert row["advantages"] == [reward - mean for reward in group.rewards] * is_trained


def test_samples_have_groups_without_signal(stack: ExitStack, tmp_path: Path) -> None:
    session = Session(stack, tmp_path, "--no-curriculum.online-difficulty-filtering")
    for _ in range(3):
        session.advance()
    rows = read_rows(tmp_path / "demo" / SAMPLES)
    equal = [row for row in rows if len(set(row["rewards"])) == 1]
    assert equal and {row["outcome"] for row in equal} == {"no_signal"}
    assert all(len(row["texts"]) == 4 and row["advantages"] == [] for row in equal)
