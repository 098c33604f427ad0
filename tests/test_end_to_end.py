"""The programs as users start them: real processes, real sockets, the embedded model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from bad_network import Slow
from real_programs import REPO, RealRun, missing_keys, ran, until

from peralta_zmq import models
from peralta_zmq.errors import ConfigError, JournalError
from peralta_zmq.observe.metrics import read_rows
from peralta_zmq.observe.prometheus import documented_name
from peralta_zmq.rollout import Message
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.journal import read_records
from peralta_zmq.trainer.trainer import Trainer
from tools.base_model import new_model
from tools.link_proxy import LinkProxy, free_ports

SMALL = ("--sampling.num-generations", "4", "--train.batch-size", "16", "--eval.num-examples", "4",
         "--checkpoint.interval", "2", "--engine.slots", "8",
         "--run.num-workers", "2")  # fmt: skip
GENERATOR_KEYS = {"groups", "step", "tokens_per_s", "blocked_frac", "queue_frac", "reload_s"}
SUMMARY_KEYS = {
    "reward_first", "reward_last5", "eval_before", "eval_after", "seconds", "steps", "restarts",
    "accounting", "final_statuses", "verdict",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RealRun]:
    with closing(RealRun(tmp_path, small=SMALL)) as started:
        yield started


def digest_of_weights(version: Path) -> str:
    """Digest of a version's weights, keyframe or delta."""
    return str(json.loads((version / "manifest.json").read_text())["result"])


@pytest.mark.timeout(120)
def test_complete_run_writes_metrics_summary_and_usable_weights(
    run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = run.start("trainer", "--train.max-steps", "3", "--checkpoint.keep-journal")
    # The sockets are bound before this file exists, so the first status arrives in time.
    until((run.folder / "config.toml").exists, trainer)
    generator = run.start("generator")
    assert trainer.wait() == 0, trainer.printed
    assert generator.wait() == 0, generator.printed
    replayed = ran("replay", str(run.folder), "--from", "2")
    assert [row["step"] for row in run.rows] == [1, 2, 3]
    assert [missing_keys(row) for row in run.rows] == [set()] * 3
    rows = run.events
    assert [row["worker_info"].keys() for row in rows if row.get("worker_info")] == [
        {"package", "python", "torch", "transformers", "device", "dtype", "threads"}
    ]
    assert "; same versions as the trainer" in trainer.printed
    known = {key for row in run.rows for key in row}
    assert all(map(documented_name, known))
    name = f"gen/{socket.gethostname()}"
    assert known >= {f"{name}/{kind}" for kind in GENERATOR_KEYS} | {"weights/bytes"}
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary.keys() == SUMMARY_KEYS
    assert list(summary["final_statuses"].values()) == [summary["accounting"]["made"]]
    assert 'id="report"' in (run.folder / "report.html").read_text("utf-8")
    weights = run.folder / "weights" / "step_00000003"
    assert f'from_pretrained("{weights}")' in trainer.printed
    model = models.load_model(weights, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = models.load_tokenizer(weights)
    prompt = models.chat_prompt(tokenizer, [Message("user", "add 2 to the product of 3 and 4.")])
    completion = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=48)
    assert models.text_of(tokenizer, completion[0, len(prompt) :].numpy())

    assert "step=3" in replayed and "  as published" in replayed and "step=1" not in replayed
    settings = ["--train.learning-rate", "0.01", "--run.num-workers", "1"]
    assert replay.main([str(run.folder), *settings]) == 0
    printed = capsys.readouterr().out
    assert "step=3" in printed and "published" not in printed

    with ExitStack() as stack:  # complete: no step left
        again = Trainer(run.config("--train.max-steps", "3"), stack)
        again.recover()
        assert not again.unfinished
        again.finish()
    assert [row["step"] for row in run.rows] == [1, 2, 3]

    with pytest.raises(JournalError, match=r"--from 9: the last step that can be replayed is 3"):
        replay.main([str(run.folder), "--from", "9"])
    larger = 2 * run.config().train.batch_size
    with pytest.raises(JournalError, match=r"000001\.msgpack .* train\.batch_size is larger than"):
        replay.main([str(run.folder), "--train.batch-size", str(larger)])
    assert "step=" not in capsys.readouterr().out

    (run.folder / "journal" / "step_000002.msgpack").unlink()
    with pytest.raises(
        JournalError, match=r"000002\.msgpack is missing or lacks groups, .* \(--to\)"
    ):
        replay.main([str(run.folder)])
    assert "step=1 " in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_killed_trainer_resumes_with_a_bit_identical_replay(run: RealRun) -> None:
    trainer = run.start("trainer", "--train.max-steps", "7")
    generator = run.start("generator")
    until(lambda: run.published_step == len(run.rows) >= 3, trainer, generator)
    trainer.signal(signal.SIGKILL)
    trainer.wait()
    generator.signal(signal.SIGSTOP)
    newest = max((run.folder / "weights").glob("step_*"))
    published = digest_of_weights(newest)
    shutil.rmtree(newest)
    journal, after = run.folder / "journal", int(newest.name[5:]) + 1
    num_deleted = len(read_records(journal, after)[0])  # a full batch would be trained
    (journal / f"step_{after:06d}.msgpack").unlink(missing_ok=True)

    trainer = run.start("trainer", "--train.max-steps", "7")

    def published_again() -> list[Path]:
        """The step, from the journal; under the next number if the first one was recorded."""
        stable = (run.folder / "weights").glob("step_*/STABLE")
        return [file.parent for file in stable if file.parent.name >= newest.name]

    until(published_again, trainer)
    (again,) = published_again()
    assert digest_of_weights(again) == published

    generator.signal(signal.SIGCONT)
    assert trainer.wait() == 0, trainer.printed
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5, 6, 7]
    events = [row["event"] for row in run.events]
    assert events.count("resume") == 1
    progress = (run.folder / "checkpoints" / "step_000007" / "progress.json").read_text()
    ((settled, after_a_gap),) = json.loads(progress)["ledger"]["senders"].values()
    assert settled >= 27  # 7 steps of 4 groups: those in the killed trainer's socket are resent
    assert after_a_gap == []
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["restarts"] == 1
    made, *parts, in_flight, _ = summary["accounting"].values()
    assert made == sum(parts) + in_flight
    assert sum(parts) >= settled + 1  # further ones arrived during the last evaluation
    assert summary["accounting"]["trained"] + summary["accounting"]["no_signal"] == 7 * 4
    # The trainer may have been killed before it announced some of them as durable.
    assert 0 <= summary["accounting"]["lost"] <= num_deleted


@pytest.mark.timeout(120)
def test_each_program_alone_prints_the_remedy_and_ends_on_a_signal(
    run: RealRun, tmp_path: Path
) -> None:
    other_run = ("--run.dir", str(tmp_path / "elsewhere"), "--wire.port", str(free_ports()))
    generator = run.start("generator", *other_run)  # prints after five seconds
    trainer = run.start("trainer")
    until((run.folder / "weights" / "step_00000000" / "STABLE").exists, trainer)
    until(lambda: bool(read_rows(run.folder / "eval.jsonl")), trainer)
    trainer.signal(signal.SIGINT)
    assert trainer.wait(timeout=20) == 0, trainer.printed  # in 3 s: tests/chaos
    assert "stopped after step 0, saved; the same command resumes it" in trainer.printed

    until(lambda: "no TCP answer" in generator.printed, generator)
    assert re.search(
        r"waiting for trainer tcp://127\.0\.0\.1:\d+ \(\d+ s\): no TCP answer\. "
        r"Start it: bin/trainer.*\. Diagnose: bin/doctor", generator.printed,
    )  # fmt: skip
    generator.signal(signal.SIGTERM)
    assert generator.wait(timeout=20) == -signal.SIGTERM, generator.printed
    for program in (trainer, generator):
        assert "Traceback" not in program.printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generator_behind_a_slow_link_keeps_the_staleness_bound(
    run: RealRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_ports()
    trainer = run.start(
        "trainer", "--train.max-steps", "8", "--weights.serve-port", str(port),
        "--train.max-off-policy-steps", "8",
    )  # fmt: skip
    with LinkProxy(port, num_ports=1) as link:
        link.damage = Slow(bits_per_s=20e6, delay=0.06)
        weights = f"http://127.0.0.1:{link.port}"
        other_run = ("--run.dir", str(tmp_path / "elsewhere"), "--weights.dir", weights)
        generator = run.start("generator", *other_run)
        assert trainer.wait() == 0, trainer.printed
        assert generator.wait() == 0, generator.printed
    loaded = re.findall(
        r"loaded .*step=(\d+) .*bytes=(\d+) visible_seconds=(\S+)", generator.printed
    )
    steps = [int(step) for step, _, _ in loaded]
    assert len(steps) >= 3 and steps == sorted(set(steps))
    assert not (tmp_path / "elsewhere" / "run" / "weights").exists()
    rows = run.rows
    assert [row["step"] for row in rows] == [*range(1, 9)]
    oldest = max(float(str(row["staleness/max"])) for row in rows)
    assert oldest <= 8
    later = sorted(float(seconds) for _, _, seconds in loaded[1:])
    sizes = sorted(int(size) for _, size, _ in loaded[1:])
    with capsys.disabled():
        print(
            f"\n{sizes[len(sizes) // 2] / 1e6:.2f} MB, visible after "
            f"{later[len(later) // 2]:.2f} s (median of {len(later)}), staleness at most {oldest:g}"
        )


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_original_experiment_runs_with_a_random_model(run: RealRun, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models.EMBEDDED, model)
    settings = json.loads((model / "config.json").read_text())
    settings |= {"hidden_size": 32, "intermediate_size": 64}
    new_model(settings, seed=0).save_pretrained(model)
    original = ("@", str(REPO / "configs" / "calculator.toml"), "--model.name", str(model),
                "--sampling.num-generations", "4", "--train.batch-size", "48")  # fmt: skip
    steps = ("--train.max-steps", "1")
    trainer = run.start("trainer", *original, *steps)
    run.start("generator", *original, *steps)
    assert trainer.wait() == 0, trainer.printed
    (row,) = run.rows
    assert row["num_rollouts"] == 48
    assert row["completions/mean_length"] == pytest.approx(48, abs=24)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_doctor_of_a_generator_reaches_a_running_trainer(run: RealRun) -> None:
    trainer = run.start("trainer", "--no-eval.eval-base-model")
    until(lambda: run.published_step == 0, trainer)
    doctor = run.start("doctor", "--role", "generator")
    assert doctor.wait() == 0, doctor.printed
    for text in ("the trainer of run run answers in", "the same folder as the trainer's",
                 "of the newest version; a whole model takes", "all checks passed"):  # fmt: skip
        assert text in doctor.printed
    doctor = run.start("doctor", "--role", "trainer")
    assert doctor.wait() == 0, doctor.printed
    assert "the running trainer of run run uses the ports" in doctor.printed
    trainer.process.terminate()
    assert trainer.wait() == 0, trainer.printed
    assert not list((run.folder / "weights").glob("doctor-*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_outputs_of_a_run_are_models_of_the_next_one(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def run(name: str, *settings: str) -> str:
        """Run a trainer and a generator to step 2; returns what they print."""
        arguments = ("--run.dir", str(runs), "--run.name", name, "--wire.port", str(free_ports()))
        more = ("--train.max-steps", "2", "--dashboard.port=None", "--no-eval.eval-base-model")
        command = [sys.executable, str(REPO / "bin/lan"), "local", *arguments, *SMALL, *more]
        ended = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=120)
        rows = read_rows(runs / name / "metrics.jsonl")
        assert (ended.returncode, [row["step"] for row in rows]) == (0, [1, 2]), ended.stderr
        return ended.stdout

    run("full")
    run("lora", "--lora.rank", "4")
    exported = [tmp_path / "exported", tmp_path / "exported_lora"]
    for name, folder in zip(("full", "lora"), exported, strict=True):
        command = [sys.executable, str(REPO / "bin/replay"), "export", str(runs / name), "2"]
        subprocess.run([*command, str(folder)], check=True, timeout=60)
    outputs = [runs / "full/weights/step_00000002", runs / "lora/merged", *exported]
    for number, folder in enumerate(outputs):
        run(f"next_{number}", "--model.name", str(folder))
        run(f"next_lora_{number}", "--model.name", str(folder), "--lora.rank", "4")
    assert models.model_folder(str(runs / "lora/adapter")) == runs / "lora/merged"
    with pytest.raises(ConfigError, match="is a LoRA adapter; give a complete model"):
        models.model_folder(str(runs / "lora/weights/step_00000002"))
