"""The reference and the teacher that a loss asks, by the settings of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import group_of

from peralta_zmq import build, models
from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import ConfigError

PULLED = ("--loss.name=importance", "--loss.adv-tau=0", "--loss.teacher-tau=1",
          "--loss.token-mask-low=0", "--loss.token-mask-high=1e9", "--loss.geo-mask-low=0",
          "--loss.geo-mask-high=1e9", "--loss.sequence-mask-high=1e9")  # fmt: skip


def config_of(*arguments: str) -> Config:
    return load_config("bin/trainer", ["--train.batch-size=8", "--train.dtype=float32",
                                       "--train.learning-rate=0.001", *arguments])  # fmt: skip


def embedded() -> Any:
    return models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """The embedded model with other weights and the same tokenizer."""
    folder = tmp_path / "teacher"
    shutil.copytree(models.EMBEDDED, folder)
    model = embedded()
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.9)
    model.save_pretrained(folder)
    return folder


def group() -> Any:
    return group_of([1, 0, 0, 1], lengths=[6, 5, 7, 4])


def apart(model: Any, other: Any) -> float:
    """The mean of teacher - policy over the generated tokens, absolute."""
    found = []
    for rollout in group().rollouts:
        ids = torch.from_numpy(rollout.token_ids).long()[None]
        with torch.no_grad():
            ours, theirs = (models.token_logprobs(each, ids, torch.ones_like(ids))[0]
                            for each in (model, other))  # fmt: skip
        found.append((theirs - ours)[torch.from_numpy(rollout.loss_mask)])
    return float(torch.cat(found).abs().mean())


def test_the_policy_is_pulled_to_the_teacher_in_the_folder(teacher: Path) -> None:
    config = config_of(*PULLED, "--model.teacher", str(teacher))
    model = embedded()
    other = models.load_model(teacher, device=torch.device("cpu"), dtype=torch.float32)
    learner = build.make_learner(config, model)
    before = apart(model, other)
    for _ in range(6):
        learner.learn([group()])
    assert apart(model, other) < 0.8 * before


def test_a_teacher_without_a_folder_is_the_base() -> None:
    # adv_tau 0: at the base nothing pulls; away from it the base does
    model, base = embedded(), embedded()
    learner = build.make_learner(config_of(*PULLED), model)
    assert learner.learn([group()])["grad_norm"] == 0
    assert apart(model, base) == 0
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.9)
    before = apart(model, base)
    for _ in range(6):
        learner.learn([group()])
    assert apart(model, base) < 0.8 * before


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build.make_learner(config_of(*arguments), embedded())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_teacher_with_another_vocabulary_is_refused_with_a_token_that_differs(
    teacher: Path,
) -> None:
    file = teacher / "tokenizer.json"
    told = json.loads(file.read_text("utf-8"))
    vocabulary = told["model"]["vocab"]
    five, six = vocabulary["5"], vocabulary["6"]
    vocabulary["5"], vocabulary["6"] = six, five
    file.write_text(json.dumps(told), "utf-8")
    words = refused(*PULLED, "--model.teacher", str(teacher))
    assert words.startswith(f"model.teacher {teacher} has another vocabulary: '5' is token {six} ")
    assert f"there and {five} in model.name embedded; choose a teacher with the same" in words


def test_a_teacher_with_fewer_logits_is_refused(teacher: Path) -> None:
    model = embedded()
    model.resize_token_embeddings(model.config.vocab_size - 4)
    model.save_pretrained(teacher)
    words = refused(*PULLED, "--model.teacher", str(teacher))
    assert "464 tokens, but model.name embedded for 468; choose a teacher with" in words


def test_a_teacher_that_nobody_asks_is_refused(teacher: Path) -> None:
    words = refused("--model.teacher", str(teacher))
    assert words == (
        f"model.teacher {teacher} is set, but loss 'reinforce' uses no teacher; "
        "remove it or choose loss 'importance' with loss.teacher_tau above 0"
    )


def test_a_teacher_that_is_nowhere_is_refused() -> None:
    assert "no/model" in refused(*PULLED, "--model.teacher=no/model")


def test_a_reference_is_refreshed_as_the_settings_say() -> None:
    config = config_of("--loss.name=grpo_kl", "--train.ref-sync-steps=2")
    learner = build.make_learner(config, embedded())
    kl = [learner.learn([group()])["kl"] for _ in range(4)]
    assert [each == 0 for each in kl] == [True, False, True, False]


def test_groups_of_equal_rewards_are_pulled_to_the_reference_when_they_are_kept() -> None:
    equal = group_of([1, 1, 1, 1], lengths=[6, 5, 7, 4])
    found = {}
    for keep in ("--no-train.keep-zero-std", "--train.keep-zero-std"):
        model = embedded()
        learner = build.make_learner(config_of("--loss.name=grpo_kl", "--loss.beta=1", keep), model)
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(0.9)
        found[keep] = learner.learn([equal])
    left_out, kept = found.values()
    assert left_out["grad_norm"] == 0
    assert kept["grad_norm"] > 0 and kept["kl"] > 0
    assert left_out["frac_reward_zero_std"] == kept["frac_reward_zero_std"] == 1
    assert kept["loss"] == pytest.approx(kept["kl"], rel=0.5)  # no advantage, only the distance


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.ref-sync-steps=2"],
         "train.ref_sync_steps 2 is set, but loss 'reinforce' uses no reference model; remove"),
        (["--loss.name=grpo_kl", "--loss.beta=0", "--train.ref-sync-steps=2"],
         "train.ref_sync_steps 2 is set, but loss 'grpo_kl' uses no reference model; remove it"),
        (["--loss.name=grpo_kl", "--train.ref-mixup-alpha=0.6"],
         "train.ref_mixup_alpha 0.6 needs train.ref_sync_steps"),
        (["--train.ref-sync-steps=2", "--train.ref-mixup-alpha=0.6", "--lora.rank=4"],
         "train.ref_mixup_alpha 0.6 and lora.rank 4 exclude each other"),
    ],
)  # fmt: skip
def test_settings_of_a_reference_that_make_no_sense_are_refused(
    arguments: list[str], words: str
) -> None:
    assert refused(*arguments).startswith(words)


OWN = """
def held(tokens, *, beta: float = 0.5, teacher_tau: float = 0.0):
    pull = beta * (tokens.logprobs - tokens.ref_logprobs) ** 2
    return (pull * tokens.mask).sum() / tokens.step_tokens, {}
"""


def test_a_loss_of_one_s_own_asks_by_the_names_of_its_options(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held_back.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = "--loss.name=held_back.held"
    assert build.reference_models_used(config_of(own)) == {"reference"}
    assert build.reference_models_used(config_of(own, "--loss.beta=0")) == set()
    assert build.reference_models_used(config_of(own, "--loss.kwargs", '{"teacher_tau": 1}')) == {
        "reference", "teacher",
    }  # fmt: skip
    learned = build.make_learner(config_of(own), embedded()).learn([group()])
    assert learned["loss"] == 0  # the reference is the policy itself
