"""bin/replay: the weights of each step as published, without damaged versions; its export."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from damage import flip_bit, remove
from sample_data import group_of
from trainer_sessions import Continued, Session, groups_for
from weight_sets import COMPANIONS, names_in, publish_chain, same, weights_at

from peralta_zmq.config import load_config, write_resolved
from peralta_zmq.errors import ConfigError, JournalError, StoreError
from peralta_zmq.learning.optimizer import UpdateSettings
from peralta_zmq.observe.metrics import EVENTS, METRICS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.checkpoint import CHECKPOINTS
from peralta_zmq.trainer.journal import BEGUN, JOURNAL, Journal, encode_update, file_of
from peralta_zmq.weights.store import WEIGHTS_FILE, WeightStore
from peralta_zmq.weights.tensor_set import FileTensors


def test_replay_of_a_continued_run_uses_each_steps_learning_rate(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    for max_steps in (2, 4):
        continued.train(max_steps=max_steps, until=max_steps)
    assert continued.replay(capsys) == ["as published"] * 4
    replay.main([str(continued.folder), "--train.learning-rate=0.02"])
    assert "learning_rate=0.02 " in capsys.readouterr().out.splitlines()[0]


def test_replay_without_journaled_steps_names_the_setting(continued: Continued) -> None:
    with continued.session("--no-checkpoint.keep-journal", max_steps=2, until=2) as trainer:
        trainer.finish()
    with pytest.raises(JournalError, match=r"nothing to replay: .* after 2, .*keep_journal"):
        replay.main([str(continued.folder)])


@pytest.mark.parametrize(
    "num_ranks, saved, options, wrong, code, results",
    [  # of the two sessions; checkpoint of the second; step with a wrong learning rate
        ((1, 1), 2, [], 1, 1, ["NOT", "NOT", "NOT", "NOT"]),
        ((1, 2), 2, [], 1, 1, ["NOT", "NOT", "not", "not"]),
        ((1, 2), 0, [], 1, 0, ["not", "not", "not", "not"]),  # it trained steps 1 and 2 again
        ((1, 2), 2, [], 3, 0, ["as", "as", "not", "not"]),
        ((2, 1), 2, [], 1, 0, ["not", "not", "not", "not"]),
        ((2, 1), 2, ["--from=3"], 3, 1, ["NOT", "NOT"]),
    ],
)
def test_replay_excuses_other_weights_only_after_steps_on_other_ranks(
    continued: Continued,
    capsys: pytest.CaptureFixture[str],
    num_ranks: tuple[int, int],
    saved: int,
    options: list[str],
    wrong: int,
    code: int,
    results: list[str],
) -> None:
    for max_steps in (2, 4):
        continued.train(max_steps=max_steps, until=max_steps)
    with closing(Journal(continued.folder / JOURNAL)) as journal:  # its newest record counts
        numbers = UpdateSettings(0.03, weight_decay=0.0, max_grad_norm=1.0)
        journal.append(wrong, encode_update(numbers), BEGUN)
        journal.commit()
    starts = [
        index for index, row in enumerate(read_rows(continued.folder / EVENTS)) if "ranks" in row
    ]
    change_rows(continued.folder / EVENTS, "ranks", dict(zip(starts, num_ranks, strict=True)))
    change_rows(continued.folder / EVENTS, "checkpoint", {starts[1]: saved})
    capsys.readouterr()
    assert replay.main([str(continued.folder), *options]) == code
    output = capsys.readouterr()
    assert [line.split("  ")[-1].split()[0] for line in output.out.splitlines()] == results
    first, last = (1, 2) if num_ranks[0] == 2 else (saved + 1, 4)
    text = f"number of ranks: 2 in steps {first} to {last} of the run, 1 in this replay, "
    assert (text in output.err) == (2 in num_ranks)


def change_rows(file: Path, name: str, values: Mapping[int, float]) -> None:
    """Set a field of some rows of a file, by index."""
    rows = read_rows(file)
    changed = [
        {**row, name: values[index]} if index in values else row for index, row in enumerate(rows)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in changed))


def with_turn_rewards(group: RolloutGroup) -> RolloutGroup:
    """Equal rewards, and two turns in each rollout, of which the first has a reward."""
    names = ("group_number", "sample_index", "problem_id", "run_id")
    fields = {name: getattr(group, name) for name in names}
    equal = group_of([1.0] * 4, lengths=[4, 5, 6, 7], seed=group.group_number, **fields)
    rollouts = [
        replace(
            rollout,
            loss_mask=rollout.loss_mask & (np.arange(len(rollout.token_ids)) != 5),
            turn_rewards=(float((group.group_number + index) % 3), 0.0),
        )
        for index, rollout in enumerate(equal.rollouts)
    ]
    return replace(equal, rollouts=tuple(rollouts))


def test_replay_trains_rewards_of_turns_again(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    with continued.session(max_steps=2) as trainer:
        continued.feed(trainer, [*map(with_turn_rewards, groups_for(trainer))], until=2)
        row = read_rows(continued.folder / METRICS)[0]
        assert row["rewards/turn_rewards/mean"] > 0 and row["frac_reward_zero_std"] == 0
    assert continued.replay(capsys) == ["as published"] * 2
    message = "advantage.scale_rewards batch cannot be combined with the rewards of turns"
    with pytest.raises(ConfigError, match=message):
        changed = ("--advantage.name=group_zscore", "--advantage.scale-rewards=batch")
        replay.main([str(continued.folder), *changed])


def keyframe_and_deltas(continued: Continued) -> Path:
    """The weights of a run of 4 steps: versions 0 and 4 are keyframes, 1 to 3 deltas."""
    kept = ("--weights.keep-last=10", "--train.learning-rate=0.00001")  # small deltas
    continued.train(*kept, max_steps=4, until=4)
    weights = continued.folder / "weights"
    assert sorted(file.parent.name[-1] for file in weights.glob("*/delta.bin")) == [*"123"]
    return weights


def test_replay_leaves_out_old_deltas_whose_parents_were_removed(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = keyframe_and_deltas(continued)
    shutil.rmtree(weights / "step_00000000")
    shutil.rmtree(weights / "step_00000001")

    def not_compared(code: int) -> int:
        capsys.readouterr()
        assert replay.main([str(continued.folder)]) == code
        out, err = capsys.readouterr()
        compared = [line.endswith("  as published") for line in out.splitlines()]
        assert compared == [False, False, False, code == 0]
        assert ("versions 2 to 3 are not compared" in err) == (code == 0)
        return err.count("is not compared: ")

    assert not_compared(0) == 0
    shutil.rmtree(weights / "step_00000004")  # without a newer keyframe the deltas are needed
    assert not_compared(3) == 2


@pytest.mark.timeout(180)
def test_replay_names_damaged_versions_and_compares_the_rest(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = keyframe_and_deltas(continued)
    whole = shutil.copytree(weights, continued.folder / "whole")

    def check(expected: dict[int, str]) -> None:
        capsys.readouterr()
        assert replay.main([str(continued.folder)]) == 3
        out, err = capsys.readouterr()
        compared = [line.endswith("  as published") for line in out.splitlines()]
        assert compared == [step not in expected for step in (1, 2, 3, 4)]
        problems = [line for line in err.splitlines() if "is not compared" in line]
        for line, (number, reason) in zip(problems, expected.items(), strict=True):
            assert re.match(rf"version {number} (\(step {number}\) )?is not compared: ", line)
            assert reason in line

    flip_bit(weights / "step_00000002" / "delta.bin")
    check({2: "version 2 does not verify: ", 3: "version 2 does not verify: "})
    shutil.rmtree(weights)
    whole.rename(weights)
    flip_bit(weights / "step_00000002" / "manifest.json")
    check({2: "no valid manifest.json", 3: "version 3 needs version 2, which is missing"})
    remove(weights / "RUN.json")
    assert replay.main([str(continued.folder)]) == 3
    problem = f"no version is compared: RUN.json in {weights} cannot be read\n"
    assert problem in capsys.readouterr().err
    shutil.rmtree(weights)
    assert replay.main([str(continued.folder)]) == 3
    assert problem in capsys.readouterr().err


@pytest.mark.timeout(180)
def test_replay_does_not_compare_versions_that_a_roll_back_has_undone(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ("--weights.keep-last=10", "--checkpoint.interval=1", "--checkpoint.keep-last=10")
    continued.train(*kept, max_steps=3, until=3)
    for step in (2, 3):  # the journal has lost them
        shutil.rmtree(continued.folder / CHECKPOINTS / f"step_{step:06d}")
        remove(file_of(continued.folder / JOURNAL, step))
    with continued.session(*kept, max_steps=3) as trainer:
        others = [replace(group, generator_id="bob") for group in groups_for(trainer)[20:]]
        continued.feed(trainer, others, until=3)
        numbers = {each.number: each.step for each in trainer.publishing.store.versions()}
    assert numbers == {0: 0, 1: 1, 2: 2, 3: 3, 4: 1, 5: 2, 6: 3}

    def compared() -> list[str]:
        capsys.readouterr()
        assert replay.main([str(continued.folder)]) == 3
        return [line.partition("weights=")[2][16:] for line in capsys.readouterr().out.splitlines()]

    for number in (4, 5):
        flip_bit(continued.folder / "weights" / f"step_{number:08d}" / "manifest.json")
    assert compared() == ["  as published", "", "  as published"]
    flip_bit(continued.folder / "weights" / "step_00000006" / "manifest.json")
    assert compared() == ["  as published", "", ""]


def test_export_writes_a_published_step_to_a_new_folder(store: WeightStore, tmp_path: Path) -> None:
    publish_chain(store, 3)
    config = load_config("bin/trainer", ["--weights.dir", str(store.folder)])
    write_resolved(config, tmp_path / "run")

    def export(step: int, name: str) -> None:
        replay.main(["export", str(tmp_path / "run"), str(step), str(tmp_path / name)])

    export(1, "out")
    assert same(FileTensors(tmp_path / "out" / WEIGHTS_FILE), weights_at(1))
    assert names_in(tmp_path / "out") == {WEIGHTS_FILE, *COMPANIONS}
    with pytest.raises(StoreError, match=r"no version of step 9.*available steps: 0, 1, 2"):
        export(9, "new")
    with pytest.raises(StoreError, match="exists; choose a new folder"):
        export(0, "out")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file/below cannot be written: Not a directory"):
        export(0, "file/below")
    with pytest.raises(StoreError, match=r"^nas:/out should be a path on this machine \(mount it"):
        replay.main(["export", str(tmp_path / "run"), "0", "nas:/out"])


def published(folder: Path, *more: str) -> list[str | None]:
    """The digests of the weights of all versions after two steps."""
    with ExitStack() as stack:
        session = Session(stack, folder, *more)
        session.advance()
        session.advance()
        session.trainer.publishing.wait()
        return [each.field("result") for each in session.trainer.publishing.store.versions()]


def test_first_version_has_the_base_weights_with_and_without_noise(tmp_path: Path) -> None:
    with_noise = published(tmp_path / "a")
    without = published(tmp_path / "b", "--no-train.master-noise")
    assert with_noise[0] is not None and with_noise[0] == without[0]
    assert with_noise[-1] != without[-1]
