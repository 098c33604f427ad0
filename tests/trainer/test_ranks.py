"""A trainer of several ranks: the same steps and checkpoints as one rank, and its end."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import failing_losses
import numpy as np
import pytest
import torch
from exactness import Float64
from local_ranks import DEADLINE, GROUPS, join_sharded, on_ranks, results, start
from sample_data import RUN
from trainer_sessions import ONE_THREAD

from peralta_zmq import build, models, wire
from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import ConfigError
from peralta_zmq.learning import distributed
from peralta_zmq.learning.distributed import SingleRank
from peralta_zmq.observe.metrics import Row, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import checkpoint, replay, trainer
from peralta_zmq.trainer.ranks import local_rank, run_follower
from peralta_zmq.trainer.session import write_identity
from tools.link_proxy import free_ports

STEPS, GROUPS_PER_STEP = 5, 4
SETTINGS = (
    *("--sampling.num-generations=4", "--train.batch-size=16", "--train.max-steps=9"),
    *("--checkpoint.interval=2", "--no-eval.eval-base-model", "--eval.num-examples=1"),
    *("--sampling.max-completion-length=9", "--engine.max-model-len=128"),
    *("--train.max-tokens-per-microbatch=40", "--train.dtype=float32", "--dashboard.port=None"),
    "--no-train.master-noise",  # the masters have 32 bits, and these tests compute in float64
)
Tensors = Mapping[str, torch.Tensor]


class Run:
    """A run on the same groups, with any number of ranks."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.port, self._folder, self._sessions = free_ports(), folder, 0
        chosen = (*SETTINGS, "--run.dir", str(folder), "--wire.port", str(self.port), *settings)
        self.config = load_config("bin/trainer", list(chosen))
        self.config.run_folder.mkdir(parents=True)
        write_identity(self.config.run_folder, run_id=RUN, weights=None)

    def train(self, *, to: int, num_ranks: int = 1, **options: Any) -> Tensors:
        """The checkpoint after `to` steps and a SIGTERM."""
        with self.session(num_ranks=num_ranks, **options) as session:
            self.feed(session, to=to)
            for process in session.ranks:
                os.kill(int(process.pid or 0), signal.SIGTERM)  # as torchrun does
            session.wait()
        return self.saved(to)

    def session(self, *, num_ranks: int, **options: Any) -> Session:
        """Start the trainer once more."""
        self._sessions += 1
        folder = self._folder / f"session_{self._sessions}"
        folder.mkdir()
        return Session(folder, self.config, num_ranks, options)

    def feed(self, session: Session, *, to: int, groups: Sequence[RolloutGroup] = GROUPS) -> None:
        """Send the groups of steps 1 to `to` and wait until step `to` is recorded."""
        session.until(self._is_listening)
        with closing(wire.RolloutSender(f"tcp://127.0.0.1:{self.port}", hwm=1000)) as sender:
            for group in groups[: to * GROUPS_PER_STEP]:
                assert sender.send(wire.encode_group(group), timeout=5)
            session.until(lambda: self.step == to)

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def saved(self, step: int) -> Tensors:
        """The newest checkpoint, which is of this step."""
        newest = checkpoint.newest(self.config.run_folder / "checkpoints", run_id=RUN)
        assert newest is not None and newest.step == step
        return newest.tensors

    def published(self, step: int) -> bool:
        """Whether the weights of a step are published."""
        return any(row["event"] == "publish" and row["step"] == step for row in self.events)

    @property
    def step(self) -> int:
        """Steps trained so far."""
        return int(str(self.rows[-1]["step"])) if self.rows else 0

    @property
    def rows(self) -> list[Row]:
        """metrics.jsonl so far."""
        return read_rows(self.config.run_folder / "metrics.jsonl")

    @property
    def events(self) -> list[Row]:
        """events.jsonl so far."""
        return read_rows(self.config.run_folder / "events.jsonl")


class Session:
    """The ranks of one start; killed at exit if they have not ended."""

    def __init__(self, folder: Path, config: Config, num_ranks: int, options: Any) -> None:
        self._folder = folder
        self.ranks = start(folder, run_one_rank, config, options, count=num_ranks)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *reason: object) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while all ranks run."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            if not all(process.is_alive() for process in self.ranks):
                self.wait()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait(self) -> None:
        """Wait for the end of all ranks; raises RuntimeError for one that failed."""
        results(self._folder, self.ranks)


def run_one_rank(config: Config, options: dict[str, bool]) -> None:
    if options.get("shards"):  # as on CUDA
        distributed.join = join_sharded
    if not options.get("in_float64"):
        trainer.run(config)
        return
    load_policy = build.load_policy
    build.load_policy = lambda *arguments: load_policy(*arguments).double()
    with Float64():
        trainer.run(config)


@pytest.fixture(scope="module")
def single_rank(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """The checkpoint of one rank."""
    return Run(tmp_path_factory.mktemp("single_rank")).train(to=STEPS, in_float64=True)


def assert_same(tensors: Tensors, expected: Tensors) -> None:
    """Checkpoints in float64 are equal, but for the order of additions."""
    assert tensors.keys() == expected.keys()
    for name in tensors.keys() - {"rng/torch"}:
        torch.testing.assert_close(tensors[name], expected[name], rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((2, 1), id="sharded to one", marks=pytest.mark.slow),
        pytest.param((2, 4), id="sharded to more shards", marks=pytest.mark.slow),
        pytest.param((1, 2), id="one to sharded", marks=pytest.mark.slow),
    ],
)
def test_run_resumes_with_another_number_of_ranks(
    tmp_path: Path, single_rank: Tensors, counts: tuple[int, int]
) -> None:
    run = Run(tmp_path)
    for to, num_ranks in zip((3, STEPS), counts, strict=True):
        saved = run.train(to=to, num_ranks=num_ranks, shards=True, in_float64=True)
    assert_same(saved, single_rank)


def test_run_resumes_after_a_killed_rank(tmp_path: Path, single_rank: Tensors) -> None:
    run = Run(tmp_path)
    with run.session(num_ranks=2, in_float64=True) as session:
        run.feed(session, to=3)  # the checkpoint is of step 2
        session.ranks[1].kill()
        session.ranks[1].join()
        with pytest.raises(RuntimeError, match="RankError: another rank of this trainer is gone"):
            run.feed(session, to=4)
    assert_same(run.train(to=STEPS, num_ranks=2, in_float64=True), single_rank)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True], ids=["whole", "sharded"])
def test_replay_on_the_ranks_of_the_run_is_bit_identical(tmp_path: Path, shards: bool) -> None:
    run = Run(tmp_path, "--checkpoint.keep-journal", "--weights.keep-last=9", ONE_THREAD)
    with run.session(num_ranks=2, shards=shards) as session:  # killed; its checkpoint is of step 2
        run.feed(session, to=3)
        session.until(lambda: run.published(3))
    run.train(to=STEPS, num_ranks=2, shards=shards)  # trains step 3 again
    folder = str(run.config.run_folder)
    (code, lines, notes), _ = on_ranks(tmp_path, replay_here, [folder], shards)
    assert (code, len(lines)) == (0, STEPS) and "number of ranks" not in notes
    assert all(line.endswith("  as published") for line in lines)
    code, lines, notes = replay_here([folder])  # one rank
    assert (code, len(lines)) == (0, STEPS)
    assert lines[-1].endswith("  not compared: other number of ranks")
    assert f"number of ranks: 2 in steps 1 to 3, 2 in steps 3 to {STEPS} of the run, 1 in " in notes
    (code, lines, _), _ = on_ranks(tmp_path, replay_here, [folder, f"--from={STEPS}"], shards)
    assert code == 0 and [line.rpartition("  ")[2] for line in lines] == ["as published"]


def replay_here(arguments: Sequence[str], shards: bool = False) -> tuple[int, list[str], str]:
    """Exit code, lines of the steps, and messages of bin/replay."""
    if shards:
        distributed.join = join_sharded
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as notes:
        code = replay.main(arguments)
    return code, output.getvalue().splitlines(), notes.getvalue()


# Steps without a finite gradient.


def poisoned(group: RolloutGroup) -> RolloutGroup:
    first, *others = group.rollouts
    poison = np.where(first.loss_mask, failing_losses.POISON, 0).astype(np.float32)
    return replace(group, rollouts=(replace(first, logprobs=poison), *others))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_without_finite_loss_are_skipped_on_all_ranks(tmp_path: Path, num_ranks: int) -> None:
    run, groups = Run(tmp_path, "--loss.name=failing_losses.steep"), list(GROUPS)
    bad = groups[GROUPS_PER_STEP - 2]  # only one rank sees it
    last = [group.name for group in groups[2 * GROUPS_PER_STEP :]]
    groups = [poisoned(each) if each.name in (bad.name, *last) else each for each in groups]
    with (
        run.session(num_ranks=num_ranks) as session,
        pytest.raises(
            RuntimeError, match="TrainingError: steps 3 to 5 had no finite grad"
        ) as error,
    ):
        run.feed(session, to=STEPS, groups=groups)
    assert "rank 1" not in str(error.value)  # followers do not report it
    assert [row["skipped_steps"] for row in run.rows] == [0, 0, 1, 2]
    assert [row["num_excluded"] for row in run.rows] == [1, 0, 4, 4]
    skips = [row for row in run.events if row["event"] == "skip"]
    assert [row["step"] for row in skips] == [3, 4]
    assert all("or its gradient is not finite" in str(row["reason"]) for row in skips)
    excluded = [row for row in run.events if row["event"] == "exclude"]
    assert [(row["step"], len(row["groups"])) for row in excluded] == [(1, 1), (3, 4), (4, 4)]
    assert excluded[0]["groups"] == {bad.name: "loss not finite"}
    base = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)
    norm, saved = "model.norm.weight", run.saved(4)  # with the weights of step 2
    assert not torch.equal(saved[f"model/{norm}"], base.state_dict()[norm])
    assert all(tensor.isfinite().all() for tensor in saved.values() if tensor.is_floating_point())


class SmallMemory(SingleRank):
    """A follower whose next command needs more memory than there is."""

    rank = 1

    def receive_command(self) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)


def test_follower_out_of_memory_names_its_rank_and_the_plan(tmp_path: Path) -> None:
    config = load_config("bin/trainer", ["--model.device=cpu"])
    message = r"rank 1: the trainer is out of memory \(.*; planned were .* GiB"
    with pytest.raises(RuntimeError, match=f"OutOfMemoryError: {message}"):
        on_ranks(tmp_path, run_follower, config, SmallMemory(), count=1)


# The environment of torchrun.


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, None), ({"WORLD_SIZE": "1", "RANK": "0"}, None), (TORCHRUN, (1, 2))],
)
def test_local_rank_is_read_from_the_environment(
    variables: dict[str, str], expected: tuple[int, int] | None
) -> None:
    assert local_rank(variables) == expected


@pytest.mark.parametrize("broken", [{"RANK": "x"}, {"LOCAL_RANK": ""}])
def test_local_rank_refuses_an_incomplete_environment(broken: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4.*torchrun, or unset WORLD_SIZE"):
        local_rank({**TORCHRUN, **broken})
